"""One task per sandbox, which alone changes the sandbox's state.

Everyone else asks it for a turn (`forkd.service.turns`) and reads what it last published.  It
hears of the machine's end from the kernel, by a pidfd: a connection to each of a thousand new
machines would cost more than forking them.

What takes several steps, or several sandboxes, has the sandbox to itself with `exclusive`: until
that block ends nothing else changes the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from forkd.engine.control import Control
from forkd.engine.guest import Guest
from forkd.engine.process import CONTROL_SOCKET, VSOCK_SOCKET, end, last_words
from forkd.engine.watch import NO_REASON
from forkd.errors import Conflict, EngineExited, ForkdError, NotFound
from forkd.host.spawn import Process
from forkd.model.event import EventKind
from forkd.model.sandbox import SandboxState
from forkd.service.sandboxes.agent_state import (
    AGENT_QUEUE_MIN,
    CHECK_TIMEOUT_S,
    AgentState,
    state_of_agent,
)
from forkd.service.sandboxes.idle import IdleWatch
from forkd.service.sandboxes.lifecycle import LifeEvent, after, paused
from forkd.service.turns import Turns
from forkd.store.database import SandboxRow

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.clock import WallClock, WallTimer
    from forkd.service.journal import Journal
    from forkd.service.leases import Lease, Leases
    from forkd.service.records import Records

REASON_TTL = "ttl"
"""Why a sandbox ended that has lived as long as it was given."""

REASON_IDLE = "idle"
"""Why a sandbox ended that nobody had used for as long as that was allowed."""

REASON_DELETED = "deleted"
"""Why a sandbox ended that somebody asked to end."""

REASON_AGENT = "its agent was killed"
"""Why a sandbox ended whose machine ran, but could no longer be used."""

REASON_TIMEOUT_S = 1.0
"""How long whoever lost a machine waits for its end to be noticed, and for why."""

RETRY_S = 5.0
"""How long after a machine's end could not be watched, or brought about, it is tried again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnerTools:
    """What owners share.

    Attributes:
        records: Where they write down what they publish.
        leases: Where they give back what the sandbox holds.
        journal: Where they note what happens to it.
        clock: By which its time comes.
        gone: Called when a sandbox is deleted and nothing of it is left.
        exited: Called when a sandbox has ended by itself.
    """

    records: Records
    leases: Leases
    journal: Journal
    clock: WallClock
    gone: Callable[[SandboxOwner], None]
    exited: Callable[[SandboxOwner], None]


class SandboxOwner:
    """Owns one sandbox, from ready to gone.

    Attributes:
        sandbox: What was last published.
        lease: What it holds of the host.
        renaming: It was promoted, and its guest may not have its new identity yet.
        guest: Its agent.
    """

    def __init__(
        self, sandbox: Sandbox, lease: Lease, tools: OwnerTools, *, renaming: bool = False
    ) -> None:
        self.sandbox = sandbox
        self.lease = lease
        self.renaming = renaming
        self.guest = Guest(lease.directory / VSOCK_SOCKET, explain=self._explain)
        self._tools = tools
        self._turns = Turns()
        self._process: Process | None = None
        self._timer: WallTimer | asyncio.TimerHandle | None = None
        due = partial(self._post, "end idle", self._end_idle)
        self._idle = IdleWatch(self.guest, lambda: self.sandbox, due)
        self._ending: str | None = None
        self._gone = False
        self._ended = asyncio.Event()
        self._explaining = 0
        self._checked: asyncio.Event | None = None
        self._agent = AgentState.ANSWERS

    @property
    def control(self) -> Path:
        """The machine's control socket."""
        return self.lease.directory / CONTROL_SOCKET

    @property
    def row(self) -> SandboxRow:
        """How the sandbox is remembered."""
        return row_of(self.sandbox, self.lease, renaming=self.renaming)

    async def run(self) -> None:
        """Own the sandbox until it is deleted; the task's whole life."""
        try:
            self._watch()
            with self.guest.used():  # by whom it was made, or left to this daemon
                self.watch_expiry()
            await self._turns.run()
        finally:
            self._close()
            self._tools.leases.leave(self.lease)

    async def delete(self) -> None:
        """End the sandbox; returns when nothing of it is left, also if somebody else ended it.

        Raises:
            ForkdError: Something could not be taken back; it is tried again at the next
                start, or when this is called again.
        """
        with contextlib.suppress(NotFound):
            await self._turns.ask(f"delete {self.sandbox.id}", self._delete)

    @contextlib.asynccontextmanager
    async def exclusive(self, purpose: str) -> AsyncGenerator[Sandbox, None]:
        """Have the sandbox to oneself within the block; gives what was last published.

        Nothing else happens to it meanwhile, the end of its machine and of its time included, so
        a block must end in a bounded time.

        Args:
            purpose: What for, for the log.

        Raises:
            NotFound: The sandbox was deleted before.
        """
        with self.guest.used():
            async with self._turns.exclusive(f"{purpose} {self.sandbox.id}"):
                yield self.sandbox

    def running_guest(self) -> Guest:
        """Return the agent of the sandbox, which must run.

        Raises:
            Conflict: It does not; the message says why.
        """
        if self.sandbox.state is SandboxState.PAUSED:
            raise paused(self.sandbox)
        return self.reachable_guest()

    def reachable_guest(self) -> Guest:
        """Return the agent of the sandbox, whose machine must be there; it may be paused.

        Raises:
            Conflict: It is not; the message says why.
        """
        state, reason = self.sandbox.state, self.sandbox.exit_reason
        if not state.has_machine:
            id_ = self.sandbox.id
            if state is SandboxState.EXITED and reason:
                raise Conflict(has_exited(id_, reason), sandbox=id_, reason=reason)
            raise Conflict(f"sandbox {id_} is {state}", sandbox=id_)
        return self.guest

    async def _explain(self, error: EngineExited) -> EngineExited:
        """Return what to tell a client whose operation has lost the machine: why it has ended."""
        self._explaining += 1
        try:
            return await self._explained(error)
        finally:
            self._explaining -= 1

    async def _explained(self, error: EngineExited) -> EngineExited:
        id_ = self.sandbox.id
        if self.sandbox.state.has_machine:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REASON_TIMEOUT_S):
                    await self._ended.wait()
        if not self._gone:
            await self._wait_for_check()
        reason = self._ending or self.sandbox.exit_reason
        if reason is None and self._gone:
            reason = await self._reason()  # an operation has the sandbox: its end is noted later
        if reason is not None:
            return EngineExited(has_exited(id_, reason), sandbox=id_, reason=reason)
        if self.sandbox.state is SandboxState.RUNNING and self._process is not None:
            well = self._agent is AgentState.ANSWERS
            why = "was reset or promoted" if well else "no longer answers; it may have halted"
            words = f"sandbox {id_} ended the connection and still runs: it {why}"
            return EngineExited(words, sandbox=id_)
        return error

    async def _wait_for_check(self) -> None:
        """Have the agent looked at, unless the sandbox ends anyway."""
        if self._ending is not None or not self.sandbox.state.has_machine:
            return
        checked = self._checked
        if checked is None:
            checked = self._checked = asyncio.Event()
            self._post("check", self._check_agent)
        # Whoever has the sandbox to itself waits for a check that comes after it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await checked.wait()

    async def _check_agent(self) -> None:
        """End a sandbox whose agent died: nobody could use it any more."""
        try:
            if self.sandbox.state is SandboxState.RUNNING:
                self._agent = await state_of_agent(self.guest.vsock, self._can_tell)
                if self._agent is AgentState.GONE and not self._gone:
                    await self._end(REASON_AGENT)
        finally:
            if self._checked is not None:
                self._checked.set()
                self._checked = None

    def _can_tell(self) -> bool:
        """Return whether a refused connection may say something about the agent."""
        return not self._gone and self.guest.in_use - self._explaining < AGENT_QUEUE_MIN

    def _tell(self) -> None:
        """Let go on whoever waits to be told why the sandbox ended."""
        self._ended.set()
        if self._checked is not None:
            self._checked.set()

    def watch_expiry(self) -> None:
        """Have the sandbox ended when its time has come, which may have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expires_at = self.sandbox.expires_at
        if expires_at is not None and self.sandbox.state.has_machine:
            expire = partial(self._post, "expire", self._expire)
            self._timer = self._tools.clock.call_at(expires_at, expire)
        self._idle.arm()

    async def end_if_idle(self) -> None:
        """End the sandbox if nobody has used it for as long as that is allowed."""
        await self._turns.ask(f"end idle {self.sandbox.id}", self._end_idle)

    async def _end_idle(self) -> None:
        if self._idle.is_over() and not await self._end(REASON_IDLE):
            self._idle.arm(RETRY_S)

    def _watch(self) -> None:
        """Have the end of the machine's process noticed."""
        if not self.sandbox.state.has_machine or self.sandbox.pid is None:
            return
        try:
            self._process = Process.open(self.sandbox.pid)
            if self._process is None:
                self._note_end()
            else:
                self._process.watch(self._note_end)
        except ForkdError as error:
            log.warning("sandbox not watched", extra=_about(self.sandbox, error))
            asyncio.get_running_loop().call_later(RETRY_S, self._watch_again)

    def _watch_again(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        self._watch()

    def _note_end(self) -> None:
        self._gone = True
        self._post("exit", self._exit)

    def _post(self, what: str, work: Callable[[], Awaitable[object]]) -> None:
        self._turns.post(f"{what} {self.sandbox.id}", work)

    async def _expire(self) -> None:
        expires_at, now = self.sandbox.expires_at, self._tools.clock.now()
        if not self.sandbox.state.has_machine or expires_at is None:
            return
        if now < expires_at:  # the clock was set back, or the sandbox was given more time
            self.watch_expiry()
            return
        if not await self._end(REASON_TTL):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(RETRY_S, self._post, "expire", self._expire)

    async def _end(self, reason: str) -> bool:
        """End the sandbox by ourselves, if that is possible."""
        self._ending = reason
        try:
            await self._stop(self.sandbox.pid)
        except ForkdError as error:
            self._ending = None
            log.warning("sandbox not ended", extra=_about(self.sandbox, error))
            return False
        await self._exit(reason)
        return True

    async def _exit(self, reason: str | None = None) -> None:
        if not self.sandbox.state.has_machine:
            return
        if reason is None:
            reason = await self._reason()
        self.sandbox = replace(after(self.sandbox, LifeEvent.ENDED), pid=None, exit_reason=reason)
        self._tell()
        log.info("sandbox exited", extra={"sandbox": self.sandbox.id, "reason": reason})
        self._note(EventKind.SANDBOX_EXITED, reason=reason)
        self._close()
        try:
            await self._tools.leases.release_one(self.lease, keep_console=True)
            await self._tools.records.put([self.row])
        except ForkdError as error:
            log.warning("sandbox not cleaned", extra=_about(self.sandbox, error))
        self._tools.exited(self)

    async def _reason(self) -> str:
        """Return why the machine ended by itself."""
        wanting = await self._tools.leases.out_of_memory(self.lease)
        if wanting is not None:
            return f"killed, out of memory: {wanting} had no more"
        return await asyncio.to_thread(last_words, self.lease.directory) or NO_REASON

    async def _delete(self) -> None:
        pid = self.sandbox.pid
        self._ending = self.sandbox.exit_reason or REASON_DELETED
        self._tell()
        if self.sandbox.state is not SandboxState.STOPPING:
            self.sandbox = after(self.sandbox, LifeEvent.DELETE)
            await self._remember_deletion()
        self._close()
        if pid is not None:
            await self._stop(pid)
        await self._tools.leases.release_one(self.lease)
        self._note(EventKind.SANDBOX_DELETED)  # rather twice, if the row stays, than never
        await self._tools.records.remove([self.sandbox.id])
        log.info("sandbox deleted", extra={"sandbox": self.sandbox.id})
        self._tools.gone(self)
        self._turns.close(NotFound(f"no sandbox {self.sandbox.id}", sandbox=self.sandbox.id))

    async def _stop(self, pid: int | None) -> None:
        await self._tools.leases.hurry(self.lease, self.sandbox)
        await stop_machine(self.control, pid)

    async def _remember_deletion(self) -> None:
        """Have the next start finish what a daemon that is killed from now on leaves undone."""
        try:
            await self._tools.records.put([self.row])
        except ForkdError as error:
            # A sandbox can be ended on a full disk, too; one that is not finished has exited then.
            log.warning("deletion not noted", extra=_about(self.sandbox, error))

    def _close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._idle.close()
        self.guest.close()

    def _note(self, kind: EventKind, **detail: str) -> None:
        self._tools.journal.note(kind, self.sandbox.id, self.sandbox.owner, **detail)


def _about(sandbox: Sandbox, error: ForkdError) -> dict[str, str]:
    return {"sandbox": sandbox.id, "error": str(error)}


def has_exited(sandbox: SandboxId, reason: str) -> str:
    """Return the words in which everybody is told why a sandbox has ended."""
    return f"sandbox {sandbox} has exited: {reason}"


def row_of(sandbox: Sandbox, lease: Lease, *, renaming: bool = False) -> SandboxRow:
    """Return how a sandbox is remembered."""
    slot = lease.slot
    return SandboxRow(
        sandbox,
        lease=lease.id,
        network_index=None if slot is None else slot.index,
        tap_index=None if slot is None else slot.tap_index,
        renaming=renaming,
    )


async def stop_machine(control: Path, pid: int | None) -> None:
    """End the machine that listens at `control`.

    A machine that is gone is fine.  The kernel says which process it is; `pid`, which a VMM has
    told, may mean another by now, or from the beginning, and is never killed.

    Raises:
        EngineError: It survives SIGKILL.
        ForkdError: The kernel does not let us look.
    """
    try:
        connection = await Control.connect(control)
    except EngineExited:
        return
    async with connection:
        peer = connection.peer_pid()
        if pid is not None and peer != pid:
            log.warning("another process listens", extra={"path": str(control), "pid": peer})
        process = Process.open(peer)
        if process is None:
            return
        with process:
            await end(process, connection.stop)
