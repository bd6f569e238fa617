"""Signals that tell this process to stop, or to read its files again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def on_hangup_within(act: Callable[[], object]) -> Iterator[None]:
    """Have SIGHUP call `act` in the event loop that runs, within the block."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


def on_stop(act: Callable[[], object]) -> None:
    """Have a signal to stop call `act` from now on, between two instructions of the main thread."""
    for number in _STOPPING:
        signal.signal(number, lambda *_: act())


@contextlib.contextmanager
def on_stop_within(act: Callable[[], object]) -> Iterator[None]:
    """Have a signal to stop call `act` in the event loop that runs, within the block."""
    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in _STOPPING:
            loop.remove_signal_handler(number)
