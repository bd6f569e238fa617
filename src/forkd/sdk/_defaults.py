"""Connections that nobody opened: those of `Sandbox(…)` without a client.

Written by hand in both flavours, as `_transport`.  There is one for each daemon, because the
variables that name a daemon may change between two calls.  The synchronous ones are closed when
the program ends.  An event loop has its own, which are closed when it ends: its asynchronous
generators are, and each connection is kept by one.  A forked process starts without any.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from forkd.errors import ForkdError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from forkd.sdk._endpoint import Endpoint


class _AsyncClosable(Protocol):
    async def aclose(self) -> None: ...


class _Closable(Protocol):
    def close(self) -> None: ...


A = TypeVar("A", bound=_AsyncClosable)
C = TypeVar("C", bound=_Closable)

_lock = threading.Lock()
_opened: dict[Endpoint, Any] = {}
_of_loops: weakref.WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[Endpoint, tuple[Any, AsyncGenerator[None, None]]]
] = weakref.WeakKeyDictionary()


async def async_default(make: Callable[[Endpoint], A], endpoint: Endpoint) -> A:
    """Return this event loop's connection to a daemon, which `make` opens if there is none."""
    kept = _of_loops.setdefault(asyncio.get_running_loop(), {})
    if endpoint not in kept:
        made = make(endpoint)
        keeper = _kept(made)
        kept[endpoint] = (made, keeper)
        await anext(keeper)
    found: A = kept[endpoint][0]
    return found


async def _kept(connection: _AsyncClosable) -> AsyncGenerator[None, None]:
    """Close a connection when the event loop closes its asynchronous generators."""
    try:
        yield
    finally:
        await connection.aclose()


def sync_default(make: Callable[[Endpoint], C], endpoint: Endpoint) -> C:
    """Return this program's connection to a daemon, which `make` opens if there is none."""
    with _lock:
        if endpoint not in _opened:
            _opened[endpoint] = make(endpoint)
        found: C = _opened[endpoint]
        return found


@atexit.register
def close_all() -> None:
    """Close the synchronous connections."""
    for each in _opened.values():
        with contextlib.suppress(ForkdError, OSError):
            each.close()
    _opened.clear()


def _forget() -> None:
    """Leave the parent's connections to the parent."""
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    _opened.clear()
    _of_loops.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
