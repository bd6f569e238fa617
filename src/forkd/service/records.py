"""The database, asked from the event loop.

It has a thread of its own: what must be written down before a sandbox exists, and while it ends,
never waits for images that are being built or files that are being hashed.  Who reads the history
has another thread, and a connection of its own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from forkd.host import threads
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from forkd.model.caller import Owner
    from forkd.model.ids import SandboxId, Tag
    from forkd.store.database import Database, SandboxRow

T = TypeVar("T")


class Records:
    """What is remembered of sandboxes and snapshots; every method raises `StoreError`.

    Raises:
        CapacityError: The thread cannot be started, or the disk is full.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._thread = threads.start(1, "forkd-database")
        self._reading_thread = threads.start(1, "forkd-history")

    def close(self) -> None:
        """Close the database once what was asked for is written."""
        self._reading_thread.shutdown()
        self._thread.shutdown()
        self._database.close()

    async def put(self, rows: Iterable[SandboxRow]) -> None:
        """Write rows of sandboxes, all or none."""
        written = tuple(rows)
        await self._ask("put", lambda: self._database.put(written))

    async def remove(self, ids: Iterable[SandboxId]) -> None:
        """Remove rows of sandboxes, all or none; ids without one are fine."""
        removed = tuple(ids)
        await self._ask("remove", lambda: self._database.remove(removed))

    async def rows(self) -> tuple[SandboxRow, ...]:
        """Return every row of a sandbox, oldest first."""
        return await self._ask("rows", self._database.rows)

    async def put_snapshot_owner(self, tag: Tag, owner: Owner, *, shared: bool = False) -> None:
        """Write down whose a snapshot is, and whether every tenant may use it."""
        await self._ask(
            "put owner", lambda: self._database.put_snapshot_owner(tag, owner, shared=shared)
        )

    async def remove_snapshot_owners(self, tags: Iterable[Tag]) -> None:
        """Forget whose snapshots were."""
        removed = tuple(tags)
        await self._ask("remove owners", lambda: self._database.remove_snapshot_owners(removed))

    async def snapshot_owners(self) -> dict[Tag, tuple[Owner, bool]]:
        """Return whose snapshots are, and whether every tenant may use them."""
        return await self._ask("owners", self._database.snapshot_owners)

    async def ask(self, what: Callable[[Database], T]) -> T:
        """Return what one of the functions of `forkd.store` finds in the database."""
        return await self._ask("ask", lambda: what(self._database))

    async def read(self, what: Callable[[Database], T]) -> T:
        """Return what a function finds that only reads; nothing that is written waits for it."""
        with tracing.span("store read"):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._reading_thread, lambda: what(self._database))

    async def _ask(self, name: str, what: Callable[[], T]) -> T:
        with tracing.span(f"store {name}"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, what)
