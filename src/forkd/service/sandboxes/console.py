"""Read what a guest wrote to its console, which the VMM keeps in two bounded files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forkd.engine.process import CONSOLE_LOG
from forkd.host import files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

CONSOLE_BYTES_MAX = 1 << 20
"""Most bytes that are read of one of the two files; the VMM keeps half as many."""

FOLLOW_INTERVAL_S = 0.25
"""How often a followed console is looked at; a person reads no faster."""


def read(directory: Path) -> bytes:
    """Return what is kept of a console; empty if nothing was written.  Blocks.

    Raises:
        HostError: The machine has put something else there than a file.
    """
    return _read(directory / f"{CONSOLE_LOG}.1") + _read(directory / CONSOLE_LOG)


async def follow(directory: Path, alive: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Yield what is kept of a console, then what is added, until `alive` says no.

    What the guest writes and the VMM drops between two looks, more than half a MiB, is lost.
    """
    yield await asyncio.to_thread(read, directory)
    path = directory / CONSOLE_LOG
    seen = len(await asyncio.to_thread(_read, path))
    while True:
        last = not alive()
        now = await asyncio.to_thread(_read, path)
        if len(now) < seen:  # it was rotated away
            rest = (await asyncio.to_thread(_read, directory / f"{CONSOLE_LOG}.1"))[seen:]
            seen = 0
            if rest:
                yield rest
        if len(now) > seen:
            yield now[seen:]
        seen = len(now)
        if last:
            return
        await asyncio.sleep(FOLLOW_INTERVAL_S)


def _read(path: Path) -> bytes:
    return files.read_foreign(path, CONSOLE_BYTES_MAX) or b""
