"""Gates at which processes wait until they are in their cgroups.

A process that may be hostile cannot be given the file by which it would enter its cgroup: the
kernel asks who opened that file, and whoever has it moves any process of the host.  So it gets one
end of a socket, writes to it, and goes on when it reads from it.  With what it wrote the kernel
says which process that was, so that nobody has another one moved.

    gates.add(group) ── handed over ──► the process writes, and waits
    serve() ◄── who wrote: moved to `group` ──► the process goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from typing import TYPE_CHECKING, Self

from forkd.errors import ForkdError
from forkd.host import cgroupfs
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable
    from pathlib import Path
    from types import TracebackType

_CREDENTIALS = struct.Struct("iII")
"""`struct ucred` of unix(7): process, user, group."""

log = logging.getLogger(__name__)


class Gates:
    """Gates, each of one process; closed when left by `with`, and who still waits then fails.

    Args:
        users: Who may pass them; None for the user that we are.
    """

    def __init__(self, users: Collection[int] | None = None) -> None:
        self._users = frozenset([os.geteuid()] if users is None else users)
        self._ours: dict[socket.socket, Path] = {}
        self._waiting: asyncio.Queue[tuple[socket.socket, int]] = asyncio.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for ours in self._ours:
            ours.close()

    def add(self, group: Path) -> int:
        """Return what the process that belongs in a cgroup gets; it is the caller's to close.

        Raises:
            CapacityError: There are too many open files.
            HostError: The kernel refused.
        """
        with kernel_call("make a gate of a cgroup"):
            ours, theirs = socket.socketpair()
            self._ours[ours] = group
            ours.setblocking(False)  # noqa: FBT003 - as the library has it
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        return theirs.detach()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncGenerator[None, None]:
        """Move who comes to a gate, and let them go on, for the block."""
        loop = asyncio.get_running_loop()
        for ours in self._ours:
            loop.add_reader(ours, self._arrive, ours)
        serving = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            for ours in self._ours:
                loop.remove_reader(ours)
            serving.cancel()
            await asyncio.wait([serving])

    def _arrive(self, ours: socket.socket) -> None:
        pid = self._who(ours)
        if pid is None:
            asyncio.get_running_loop().remove_reader(ours)
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        else:
            self._waiting.put_nowait((ours, pid))

    def _who(self, ours: socket.socket) -> int | None:
        """Return the process that came to a gate; None if it is none that may pass."""
        try:
            said, about, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
        except OSError:
            return None
        for level, kind, credentials in about:
            if said and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                pid, uid, _ = _CREDENTIALS.unpack(credentials)
                return pid if pid > 0 and uid in self._users else None
        return None

    async def _serve(self) -> None:
        while True:
            come = [await self._waiting.get()]
            while not self._waiting.empty():
                come.append(self._waiting.get_nowait())
            await asyncio.to_thread(self._let_through, come)

    def _let_through(self, come: Iterable[tuple[socket.socket, int]]) -> None:
        for ours, pid in come:
            try:
                cgroupfs.enter(self._ours[ours], pid)
                with kernel_call("open a gate of a cgroup"):
                    ours.send(b"\0")
            except ForkdError as error:  # who waits there fails, and says so
                log.warning("process not moved", extra={"pid": pid, "error": str(error)})
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
