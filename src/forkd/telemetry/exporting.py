"""Choose whether traces are exported; what exports them is loaded only if they are."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


@contextlib.asynccontextmanager
async def exported(endpoint: str | None) -> AsyncGenerator[None, None]:
    """Export the spans of the block by OTLP over HTTP, from a thread; None: there are none.

    Raises:
        InvalidRequest: What exports them is not installed.
    """
    if endpoint is None:
        yield
        return
    try:
        from forkd.telemetry.export import Exporter  # noqa: PLC0415 - an extra, and slow to load
    except ImportError as error:
        raise InvalidRequest(
            "FORKD_OTLP_ENDPOINT is set, and what exports traces is not installed; run: "
            "pip install 'forkd-vm[tracing]'",
            field="otlp_endpoint",
        ) from error
    exporter = Exporter(endpoint)
    tracing.use(exporter)
    try:
        yield
    finally:
        tracing.use(None)
        await asyncio.to_thread(exporter.close)
