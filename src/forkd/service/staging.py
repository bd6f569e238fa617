"""A folder in the store's staging for the length of one block."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from forkd.host import files
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from forkd.store.snapshots import SnapshotStore


@contextlib.asynccontextmanager
async def staged_folder(store: SnapshotStore) -> AsyncGenerator[Path, None]:
    """Give an empty folder to write a snapshot in; what is left of it after the block is removed.

    The folder is known to the store before it is made, so a caller that is cancelled while it is
    made leaves neither a folder nor its name behind.

    Raises:
        HostError: The kernel refused.
        CapacityError: There is no room for it.
    """
    staged = store.reserve_stage()
    try:
        await to_end(asyncio.to_thread(files.make_folder, staged))
        yield staged
    finally:
        await to_end(asyncio.to_thread(store.discard, staged))
