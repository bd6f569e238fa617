"""Builds of images that go on until a test lets them end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

from forkd.images import builder
from tests.support.callers import CALLER
from tests.support.service_host import UNTIL_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    import pytest

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost


@contextlib.asynccontextmanager
async def blocked_builds(
    service: Host, host: FakeHost, count: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """Have so many builds wanted, of which none ends before the block does."""
    go_on = threading.Event()
    build = builder.build_recipe

    def waiting(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - as it was called
        go_on.wait(UNTIL_DEADLINE_S)
        return build(*args, **kwargs)

    monkeypatch.setattr(builder, "build_recipe", waiting)
    recipe = host.recipe()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(drain(service.images.build(CALLER, recipe)))
        try:
            yield
        finally:
            go_on.set()


async def drain(items: AsyncIterable[object]) -> None:
    """Take everything, and drop it."""
    async for _ in items:
        pass
