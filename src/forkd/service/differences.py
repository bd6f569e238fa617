"""How two machines differ: their files, as each guest sees them, and pages of memory.

The guests are asked, because they alone know what is in their caches and not on their disks
yet, and because that works on any file system.  A snapshot is asked by forking it, for as long as
that takes.  Every file keeps its times over a fork, so what has other times, another length or
another inode's change was changed since.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, Conflict, GuestError
from forkd.host import pages
from forkd.model.diff import FileState, compare
from forkd.model.exec import ExecRequest, Exited, Stdout
from forkd.model.limits import DIFF_ENTRIES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from forkd.model.diff import Difference
    from forkd.model.sandbox import Sandbox
    from forkd.service.api import ExecSession

FIND = ("find", "/", "-xdev", "-printf", r"%D\t%y\t%s\t%T@\t%C@\t%m %U %G\t%p\0%l\0")
"""GNU find: device, kind, length, both times, mode and owner, path; then where a link leads."""

FIND_TIMEOUT_S = 600.0
"""How long a guest may take to look at all of its files."""

MEMORY_NAME = "forkd-memory"
"""What the VMM calls the file in memory that guests' memory is mapped of."""

_FIELDS = 7


async def between(
    before: AbstractAsyncContextManager[Sandbox],
    after: AbstractAsyncContextManager[Sandbox],
    exec_in: Callable[[Sandbox, ExecRequest], Awaitable[ExecSession]],
) -> Difference:
    """Return how one machine differs from another.

    Args:
        before: Gives the one, running, for as long as it is asked.
        after: Gives the other.
        exec_in: Starts a command in one of them.

    Raises:
        GuestError: A guest has no GNU find, or it failed.
        CapacityError: A guest has more than `DIFF_ENTRIES_MAX` files.
    """
    async with before as one, after as other:
        was, now = await asyncio.gather(_files(one, exec_in), _files(other, exec_in))
        apart = None
        if one.pid is not None and other.pid is not None:
            apart = await asyncio.to_thread(pages.apart, one.pid, other.pid, MEMORY_NAME)
        return compare(was, now, apart)


def check_related(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Return if two chains, base first, have a snapshot in common.

    Raises:
        Conflict: They have not, so everything would differ.
    """
    if one[0] != other[0]:
        raise Conflict(
            f"they have no common ancestor: one goes back to {one[0]}, the other to {other[0]}"
        )


@contextlib.asynccontextmanager
async def as_it_is(sandbox: Sandbox) -> AsyncGenerator[Sandbox, None]:
    """Give a sandbox that somebody else holds."""
    yield sandbox


async def _files(
    sandbox: Sandbox, exec_in: Callable[[Sandbox, ExecRequest], Awaitable[ExecSession]]
) -> dict[str, FileState]:
    """Return every file of a guest's root file system."""
    request = ExecRequest(FIND, user="root", timeout_s=FIND_TIMEOUT_S)
    listing = _Listing()
    async with await exec_in(sandbox, request) as session:
        async for event in session:
            match event:
                case Stdout(data):
                    listing.feed(data)
                case Exited(exit_code=code) if code != 0 and not listing.files:
                    raise GuestError(
                        f"find in {sandbox.id} ended with {code}; a comparison needs GNU find",
                        guest_code="exec_failed",
                    )
    return listing.files


class _Listing:
    """What find prints, in pieces of any length."""

    def __init__(self) -> None:
        self.files: dict[str, FileState] = {}
        self._rest = b""
        self._entry: str | None = None
        self._device: str | None = None

    def feed(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\0")
        for raw in whole:
            text = raw.decode(errors="replace")
            if self._entry is None:
                self._entry = text
            else:
                self._add(self._entry, text)
                self._entry = None

    def _add(self, entry: str, target: str) -> None:
        fields = entry.split("\t", _FIELDS - 1)
        if len(fields) != _FIELDS or not fields[2].isdecimal():
            raise GuestError("find printed what it was not asked for", guest_code="exec_failed")
        device, kind, size, modified, changed, access, path = fields
        self._device = self._device or device
        if device != self._device:
            return  # mounted over the root file system, such as each guest's own /etc/hostname
        if len(self.files) == DIFF_ENTRIES_MAX:
            raise CapacityError(f"a guest has more than {DIFF_ENTRIES_MAX} files")
        self.files[path] = FileState(kind, int(size), (modified, changed), access, target)
