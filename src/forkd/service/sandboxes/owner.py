"""One task per sandbox, which alone changes the sandbox's state.

Everyone else sends it a message and reads what it last published.  It hears of the
machine's end from the kernel, by a pidfd: a connection to each of a thousand new machines
would cost more than forking them.

What takes several steps, or several sandboxes, borrows the sandbox with `held`: until that
block ends the task does nothing by itself, and whoever holds it owns the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.engine.guest import Guest
from forkd.engine.process import CONTROL_SOCKET, VSOCK_SOCKET, end, last_words
from forkd.errors import Conflict, EngineError, ForkdError, NotFound
from forkd.host.spawn import Process
from forkd.model.sandbox import SandboxState
from forkd.service.lifecycle import LifeEvent, next_state
from forkd.store.database import SandboxRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.network.plan import Slot
    from forkd.service.resources import Resources
    from forkd.store.database import Database

NO_REASON = "its process ended without a word"

REASON_TTL = "ttl"
"""Why a sandbox ended that has lived as long as it was given."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The machine's process is gone."""


@dataclass(frozen=True, slots=True)
class _Delete:
    """Somebody wants the sandbox gone, and waits for it."""

    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Expire:
    """The sandbox has lived as long as it was given."""


@dataclass(frozen=True, slots=True)
class _Hold:
    """Somebody wants to own the sandbox for a while."""

    held: asyncio.Future[None]
    released: asyncio.Event = field(default_factory=asyncio.Event)


_Message = _Ended | _Delete | _Expire | _Hold


@dataclass(frozen=True, slots=True)
class OwnerTools:
    """What owners share.

    Attributes:
        database: Where they write what they publish.
        resources: Where they give back what the sandbox had.
        freed: Called with a link that a sandbox has given back.
        gone: Called when a sandbox is deleted and nothing of it is left.
        exited: Called when a sandbox has ended by itself.
    """

    database: Database
    resources: Resources
    freed: Callable[[Slot], None]
    gone: Callable[[SandboxOwner], None]
    exited: Callable[[SandboxOwner], None]


class SandboxOwner:
    """Owns one sandbox, from ready to gone.

    Attributes:
        sandbox: What was last published.
        slot: Its link; None without a network.
        place: Under which id its folder and cgroup were made.
        renaming: Its guest may not know yet who it is.
        guest: Its agent.
    """

    def __init__(self, row: SandboxRow, slot: Slot | None, tools: OwnerTools) -> None:
        self.sandbox = row.sandbox
        self.slot = slot
        self.place: SandboxId = row.place
        self.renaming = row.renaming
        self.directory = tools.resources.directory(row.place)
        self.guest = Guest(self.directory / VSOCK_SOCKET)
        self._tools = tools
        self._inbox: asyncio.Queue[_Message] = asyncio.Queue()
        self._process: Process | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def control(self) -> Path:
        """The machine's control socket."""
        return self.directory / CONTROL_SOCKET

    @property
    def row(self) -> SandboxRow:
        """How the sandbox is remembered."""
        slot = self.slot
        return SandboxRow(
            self.sandbox,
            network_index=None if slot is None else slot.index,
            place=self.place,
            tap_index=None if slot is None else slot.tap_index,
            renaming=self.renaming,
        )

    async def delete(self) -> None:
        """Have the sandbox ended; returns when nothing of it is left.

        Raises:
            ForkdError: Something could not be taken back; it is tried again at the next
                start, or when this is called again.
        """
        done = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(_Delete(done))
        await done

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncGenerator[Sandbox, None]:
        """Own the sandbox for as long as the block takes; gives what was last published.

        Messages wait meanwhile, those of the machine's end and of the sandbox's included, so
        a block must end in a bounded time.

        Raises:
            NotFound: The sandbox was deleted before its turn came.
        """
        hold = _Hold(asyncio.get_running_loop().create_future())
        self._inbox.put_nowait(hold)
        try:
            await hold.held
            yield self.sandbox
        finally:
            hold.released.set()

    def watch_expiry(self) -> None:
        """Have the sandbox ended when its time has come, which may have changed."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        expires_at = self.sandbox.expires_at
        if expires_at is not None and self.sandbox.state is SandboxState.RUNNING:
            left_s = (expires_at - datetime.now(UTC)).total_seconds()
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(max(0.0, left_s), self._inbox.put_nowait, _Expire())

    async def run(self) -> None:
        """Own the sandbox until it is deleted; the task's whole life."""
        gone = False
        try:
            self._watch()
            self.watch_expiry()
            while not gone:
                gone = await self._handle(await self._inbox.get())
        finally:
            self._close()
            while not self._inbox.empty():
                self._answer_late(self._inbox.get_nowait(), gone=gone)

    def _answer_late(self, message: _Message, *, gone: bool) -> None:
        """Answer who asked while the last message was being handled."""
        let_go = Conflict(f"{self.sandbox.id} is being let go of")
        match message:
            case _Delete(done) if not done.done() and gone:
                done.set_result(None)
            case _Delete(done) if not done.done():
                done.set_exception(let_go)
            case _Hold(held) if not held.done():
                held.set_exception(
                    NotFound(f"no sandbox {self.sandbox.id}", sandbox=self.sandbox.id)
                    if gone
                    else let_go
                )

    def _watch(self) -> None:
        if self.sandbox.state is not SandboxState.RUNNING or self.sandbox.pid is None:
            return
        self._process = Process.open(self.sandbox.pid)
        if self._process is None:
            self._note_end()
        else:
            self._process.watch(self._note_end)

    def _note_end(self) -> None:
        self._inbox.put_nowait(_Ended())

    async def _handle(self, message: _Message) -> bool:
        """Carry out one message; returns whether the sandbox is gone."""
        match message:
            case _Ended():
                await self._exit()
            case _Expire():
                await self._expire()
            case _Hold():
                if not message.held.done():
                    message.held.set_result(None)
                await message.released.wait()
            case _Delete():
                return await self._answer_delete(message)
        return False

    async def _answer_delete(self, message: _Delete) -> bool:
        try:
            await self._delete()
        except ForkdError as error:
            if not message.done.done():
                message.done.set_exception(error)
            return False
        if not message.done.done():
            message.done.set_result(None)
        return True

    async def _expire(self) -> None:
        expires_at, now = self.sandbox.expires_at, datetime.now(UTC)
        if self.sandbox.state is not SandboxState.RUNNING or expires_at is None:
            return
        if now < expires_at:  # the clock was set back, or the sandbox was given more time
            self.watch_expiry()
            return
        self._close()
        try:
            await stop_machine(self.control, self.sandbox.pid)
        except EngineError as error:
            log.warning("sandbox not ended", extra={"sandbox": self.sandbox.id, "error": error})
        await self._exit(REASON_TTL)

    async def _exit(self, reason: str | None = None) -> None:
        if self.sandbox.state is not SandboxState.RUNNING:
            return
        if reason is None:
            reason = await asyncio.to_thread(last_words, self.directory) or NO_REASON
        self._publish(LifeEvent.ENDED)
        self.sandbox = replace(self.sandbox, pid=None, exit_reason=reason)
        log.info("sandbox exited", extra={"sandbox": self.sandbox.id, "reason": reason})
        self._close()
        try:
            await self._release(keep_console=True)
            await asyncio.to_thread(self._tools.database.put, [self.row])
        except ForkdError as error:
            log.warning("sandbox not cleaned", extra={"sandbox": self.sandbox.id, "error": error})
        self._tools.exited(self)

    async def _delete(self) -> None:
        pid = self.sandbox.pid
        if self.sandbox.state is not SandboxState.STOPPING:
            self._publish(LifeEvent.DELETE)
            await self._remember_deletion()
        self._close()
        if pid is not None:
            await stop_machine(self.control, pid)
        await self._release(keep_console=False)
        await asyncio.to_thread(self._tools.database.remove, [self.sandbox.id])
        log.info("sandbox deleted", extra={"sandbox": self.sandbox.id})
        self._tools.gone(self)

    async def _remember_deletion(self) -> None:
        """Have the next start finish what a daemon that is killed from now on leaves undone."""
        try:
            await asyncio.to_thread(self._tools.database.put, [self.row])
        except ForkdError as error:
            # A sandbox can be ended on a full disk, too; one that is not finished has exited then.
            log.warning("deletion not noted", extra={"sandbox": self.sandbox.id, "error": error})

    async def _release(self, *, keep_console: bool) -> None:
        await asyncio.to_thread(
            self._tools.resources.release,
            self.place,
            self.slot,
            keep_console=keep_console,
        )
        slot, self.slot = self.slot, None
        if slot is not None:
            self._tools.freed(slot)

    def _publish(self, event: LifeEvent) -> None:
        self.sandbox = replace(self.sandbox, state=next_state(self.sandbox.state, event))

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        self.guest.close()


async def stop_machine(control: Path, pid: int | None) -> None:
    """End the machine that listens at `control`, which must be process `pid` if that is known.

    A machine that is gone is fine.  The process is held while the connection proves
    that it lives, so a pid that means another process by now is never killed.

    Raises:
        EngineError: It survives SIGKILL.
    """
    try:
        connection = await Control.connect(control)
    except EngineError:
        return
    async with connection:
        peer = connection.peer_pid()
        if pid is not None and peer != pid:
            raise EngineError(f"{control} is not held by process {pid}", pid=pid)
        process = Process.open(peer)
        if process is None:
            return
        with process:
            await end(process, connection.stop)
