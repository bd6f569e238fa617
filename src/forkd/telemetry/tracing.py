"""Spans of a trace, if traces are exported; nothing at all otherwise.

A span is the child of the one around it, in the same task or in one that it began.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Tracer(Protocol):
    """What makes spans: an exporter of `forkd.telemetry.export`."""

    def span(self, name: str, attributes: dict[str, str | int]) -> AbstractContextManager[None]:
        """Return a span around a block."""
        ...


class _Chosen:
    tracer: Tracer | None = None


def use(tracer: Tracer | None) -> None:
    """Have spans made by `tracer` from now on; None for none."""
    _Chosen.tracer = tracer


def span(name: str, **attributes: str | int) -> AbstractContextManager[None]:
    """Return a span around a block; without a tracer, one that costs nothing."""
    tracer = _Chosen.tracer
    return _NOTHING if tracer is None else tracer.span(name, attributes)
