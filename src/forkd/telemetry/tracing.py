"""Spans of a trace, if traces are exported; nothing at all otherwise.

    with tracing.request("POST", headers):      # a trace, or a part of the client's
        with tracing.span("store put"):         # a child of the span around it
            ...

A span is the child of the one around it, in the same task or in one that it began.  What happens
on behalf of no request has no spans.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

Attributes = dict[str, str | int]

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Tracer(Protocol):
    """What makes spans: an exporter of `forkd.telemetry.export`."""

    def request(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """Return a span around a block: a trace's first, or below the client's `traceparent`."""
        ...

    def span(self, name: str, attributes: Attributes) -> AbstractContextManager[None]:
        """Return a span around a block; nothing without one around it."""
        ...

    def note(self, name: str | None, attributes: Attributes) -> None:
        """Name the innermost span, and say more of it."""
        ...

    def here(self) -> object:
        """Return the innermost span; None without one."""
        ...

    def within(self, span: object) -> AbstractContextManager[None]:
        """Have `span`, which `here` gave, around a block."""
        ...


class _Chosen:
    tracer: Tracer | None = None


def use(tracer: Tracer | None) -> None:
    """Have spans made by `tracer` from now on; None for none."""
    _Chosen.tracer = tracer


def request(name: str, headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return the span of a request, which may be a part of its client's trace."""
    tracer = _Chosen.tracer
    return _NOTHING if tracer is None else tracer.request(name, headers)


def span(name: str, **attributes: str | int) -> AbstractContextManager[None]:
    """Return a span around a block; without a tracer, one that costs nothing."""
    tracer = _Chosen.tracer
    return _NOTHING if tracer is None else tracer.span(name, attributes)


def note(attributes: Attributes, *, name: str | None = None) -> None:
    """Say more of the innermost span, and perhaps name it."""
    if _Chosen.tracer is not None:
        _Chosen.tracer.note(name, attributes)


def here() -> object:
    """Return the innermost span, for `within`; None without one."""
    return None if _Chosen.tracer is None else _Chosen.tracer.here()


def within(span: object) -> AbstractContextManager[None]:
    """Have a span around a block in another task: what is done there is done on its behalf."""
    tracer = _Chosen.tracer
    return _NOTHING if tracer is None else tracer.within(span)
