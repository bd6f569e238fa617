"""Folders of machines, which a caller that is cancelled meanwhile does not leave behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forkd.host import files, ownership
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from pathlib import Path


async def make(directory: Path, uid: int | None = None) -> None:
    """Make a folder and give it to a user; None for the daemon's.

    A thread does it, which a cancellation does not stop: we wait for it, and remove what it made.

    Raises:
        HostError: The kernel refused.
    """
    work = asyncio.ensure_future(asyncio.to_thread(_make, directory, uid))
    try:
        await to_end(work)
    except asyncio.CancelledError:
        if not work.cancelled() and work.exception() is None:
            await to_end(asyncio.to_thread(files.remove_tree, directory))
        raise


def _make(directory: Path, uid: int | None) -> None:
    files.make_folder(directory)
    try:
        ownership.give(directory, uid)
    except BaseException:
        files.remove_tree(directory)
        raise
