"""Ask the agent in a guest, through the machine's `vsock.sock`.

`Guest` is cheap: it connects when first asked and keeps a few idle connections,
so that an evaluation costs one round trip.  A connection that was left in the
middle of an operation is closed, which is how the agent learns of a cancellation;
so every method here may be cancelled at any point.

`protocol/guest/PROTOCOL.md` is the contract, `replies` the types of the answers.  Operations
that stream, or that only a bake needs, have modules of their own: `guest_files`, `guest_exec`,
`guest_bake`, `guest_watch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from forkd.engine.channel import Channel, deadline
from forkd.engine.faults import guest_fault
from forkd.engine.frames import Kind
from forkd.engine.replies import Echo, Empty, Evaluated, GuestTime, Pong, Reply
from forkd.errors import Busy, Conflict, EngineError, EngineExited
from forkd.limits import EVAL_OUTPUT_BYTES_MAX, EVAL_WAIT_S_MAX, EVAL_WAITING_MAX, SHORT_RETRY_S
from forkd.model.exec import EvalFault, EvalForms, EvalResult, Stderr, Stdout
from forkd.model.guest import GuestStatus
from forkd.model.output import Kept
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping
    from pathlib import Path

    from forkd.engine.channel import Explain
    from forkd.engine.frames import Frame
    from forkd.model.exec import OnOutput
    from forkd.model.json import JsonObject, JsonValue

PYTHON = "python"
"""The warm runtime that every agent knows."""

AGENT_PORT = 1024
"""The vsock port on which every agent listens."""

ANSWER_TIMEOUT_S = 60.0
"""How long an agent may take for what needs no program of the user's, on a slow host."""

GRACE_S = 30.0
"""How much longer than the agent's own deadline we wait for it to keep that deadline."""

FREEZE_TIMEOUT_S = 600.0
"""How long a guest may take to write out what is in its caches."""

CLOCK_TIMEOUT_S = 10.0
"""How long an agent may take to read its clock, or to move it."""

CLOCK_TOLERANCE_NS = 20_000_000
"""How far a guest's clock may be off the host's, as after a fork."""

CLOCK_TRIES_MAX = 8
"""How often a guest's clock is corrected until it is right."""

IDLE_CHANNELS_MAX = 4
"""Most idle connections kept per guest; more at once are opened and closed as needed."""

OWN_OPERATIONS = frozenset({"adjust_time", "limit", "ping", "watch"})
"""What the daemon asks of its own accord, and a liveness probe: nobody uses the guest by that."""

STREAMS: Mapping[Kind, type[Stdout | Stderr]] = MappingProxyType(
    {Kind.STDOUT: Stdout, Kind.STDERR: Stderr}
)
"""What code writes, by the kind of the frame."""

_HANDSHAKE_BYTES_MAX = 64

R = TypeVar("R", bound=Reply)


class Guest:
    """The agent of one machine.

    Attributes:
        vsock: The machine's socket.
        used_at: When the last operation of a user has ended, by the event loop.

    Args:
        vsock: The machine's socket.
        connect_timeout_s: How long the agent may take to accept a connection.
        explain: Returns what to raise when the machine is gone, once it knows why.
    """

    def __init__(
        self,
        vsock: Path,
        *,
        connect_timeout_s: float = ANSWER_TIMEOUT_S,
        explain: Explain | None = None,
    ) -> None:
        self.vsock = vsock
        self._explain = explain
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Channel] = []
        self._in_use = 0
        self._users = 0
        self.used_at = 0.0
        self._evaluation = asyncio.Lock()
        self._evals_waiting = 0

    @property
    def idle_since(self) -> float | None:
        """When the last operation of a user has ended, by the event loop; None while one runs."""
        return None if self._users else self.used_at

    @contextlib.contextmanager
    def used(self) -> Generator[None, None, None]:
        """Count the block as use of the guest."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.used_at = asyncio.get_running_loop().time()

    @property
    def in_use(self) -> int:
        """How many operations are under way."""
        return self._in_use

    def close(self) -> None:
        """Close the idle connections; those in use are their users' to close."""
        while self._idle:
            self._idle.pop().close()

    @contextlib.asynccontextmanager
    async def operation(
        self, op: str, members: Mapping[str, JsonValue]
    ) -> AsyncGenerator[Channel, None]:
        """Begin an operation; the block reads and writes the rest of it.

        The connection is kept only if the block ends well, so a block must end
        only when the operation is over.  Members that are None are left out.

        Raises:
            EngineExited: The machine is gone, or its agent does not listen.
            Busy: The agent has too many connections.
        """
        using = contextlib.nullcontext() if op in OWN_OPERATIONS else self.used()
        with tracing.span(f"agent {op}"), using:
            async with self._lent() as channel:
                request = {name: value for name, value in members.items() if value is not None}
                try:
                    await channel.send_json(Kind.REQUEST, {"op": op, **request})
                except EngineExited:
                    # An agent that has too many connections says so before it closes one.
                    answer(await channel.receive())
                    raise
                yield channel

    @contextlib.asynccontextmanager
    async def _lent(self) -> AsyncGenerator[Channel, None]:
        self._in_use += 1
        try:
            channel = await self._borrow()
            try:
                yield channel
            except BaseException:
                channel.close()
                raise
            self._give_back(channel)
        finally:
            self._in_use -= 1

    async def ask(
        self,
        op: str,
        members: Mapping[str, JsonValue] = MappingProxyType({}),
        reply: type[R] = Empty,  # type: ignore[assignment]  # mypy knows no default of a type variable
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> R:
        """Carry out an operation that has one frame of answer; for modules of this package.

        Raises:
            EngineTimeout: It did not come within `timeout_s`.
            EngineExited: The machine is gone.
            EngineError: The answer is not a valid `reply`.
            ForkdError: The agent refused; `forkd.engine.faults` has the classes.
        """
        async with (
            deadline(timeout_s, f"the agent did not answer {op}"),
            self.operation(op, members) as channel,
        ):
            return reply.read(answer(await channel.receive()), op)

    async def ping(self) -> GuestStatus:
        """Return the state of the agent; raises as `ask`."""
        pong = await self.ask("ping", reply=Pong)
        return GuestStatus(pong.version, pong.pid, pong.uptime_s, pong.runtime)

    async def echo(self, data: str) -> str:
        """Have `data` returned; raises as `ask`."""
        return (await self.ask("echo", {"data": data}, Echo)).data

    async def follow_clock(self) -> float:
        """Have the guest's wall clock be right; its monotonic clock goes on as it was.

        The clock is moved by a difference, which does not age on its way to the guest.

        Returns:
            How far it was moved, in seconds.

        Raises:
            EngineError: It is wrong after `CLOCK_TRIES_MAX` corrections, or as `ask`.
        """
        moved_ns = 0
        for _ in range(CLOCK_TRIES_MAX):
            began_ns = time.time_ns()
            read = await self._adjust_time(0)
            took_ns = time.time_ns() - began_ns
            off_ns = began_ns + took_ns // 2 - read.realtime_ns
            if abs(off_ns) <= max(CLOCK_TOLERANCE_NS, took_ns):
                return moved_ns / 1e9
            await self._adjust_time(off_ns)
            moved_ns += off_ns
        raise EngineError(f"the guest's clock is wrong after {CLOCK_TRIES_MAX} corrections")

    async def _adjust_time(self, offset_ns: int) -> GuestTime:
        members = {"offset_ns": offset_ns}
        return await self.ask("adjust_time", members, GuestTime, timeout_s=CLOCK_TIMEOUT_S)

    async def freeze(self) -> None:
        """Write the root file system out and freeze it: writers wait for ever; raises as `ask`."""
        await self.ask("freeze", timeout_s=FREEZE_TIMEOUT_S)

    async def limit(self, memory_bytes: int | None) -> None:
        """Change what the guest may use of its memory; None for all; raises as `ask`."""
        await self.ask("limit", {} if memory_bytes is None else {"memory_bytes": memory_bytes})

    async def eval(  # noqa: PLR0913 - what a caller may ask
        self,
        code: str,
        timeout_s: float,
        kept: tuple[Kept, Kept] | None = None,
        *,
        runtime: str | None = None,
        context: str | None = None,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> EvalResult:
        """Run `code` in the warm runtime; what it raises is data.

        Evaluations of one guest take turns here, in their order, so that no deadline runs while
        another's code does.

        Args:
            code: What to run.
            timeout_s: How long it may take, from when its turn has come.
            kept: What takes its outputs; None to keep them for the result alone.
            runtime: Refuse it if the warm runtime has another name; None: whatever it is.
            context: Whose names and folder it has, and makes if it is the first; None: those
                of the warm-up.
            env: Variables of the environment, as long as it runs.
            on_output: Called with each piece of output as it comes; the result has none then, and
                `kept` takes none.

        Raises:
            Conflict: The guest has no runtime, or another one, or one that knows no contexts or
                no variables.
            Busy: Too many wait, or its turn has not come in time; the code did not run.
            EngineTimeout: Neither an answer nor an interruption after `timeout_s`.
            ForkdError: As `ask`.
        """
        stdout, stderr = kept or (Kept(EVAL_OUTPUT_BYTES_MAX), Kept(EVAL_OUTPUT_BYTES_MAX))

        async def keep(output: Stdout | Stderr) -> None:
            (stdout if isinstance(output, Stdout) else stderr).add(output.data)

        members: JsonObject = {"code": code, "timeout_s": timeout_s, "runtime": runtime}
        members |= {"context": context, "env": dict(env) if env else None}
        async with self._turn():
            try:
                reply = await self._eval(members, timeout_s, on_output or keep)
            except Conflict as error:
                if runtime != PYTHON or error.context.get("field") != "runtime":
                    raise
                # The agent is older than the member: Python is all that it has.
                reply = await self._eval(members | {"runtime": None}, timeout_s, on_output or keep)
        dropped = stdout.truncated or stderr.truncated
        return _eval_result(reply, stdout.text(), stderr.text(), output_truncated=dropped)

    async def _eval(self, members: JsonObject, timeout_s: float, take: OnOutput) -> Evaluated:
        async with (
            deadline(timeout_s + GRACE_S, "the agent did not finish an evaluation"),
            self.operation("eval", members) as channel,
        ):
            while (output := STREAMS.get((frame := await channel.receive()).kind)) is not None:
                await take(output(frame.payload))
            return Evaluated.read(answer(frame), "eval")

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
        """Have the interpreter for the block, after all who asked before."""
        if self._evaluation.locked() or self._evals_waiting > 0:
            await self._wait_for_turn()
        else:
            await self._evaluation.acquire()  # at once, and without a timer
        try:
            yield
        finally:
            self._evaluation.release()

    async def _wait_for_turn(self) -> None:
        if self._evals_waiting >= EVAL_WAITING_MAX:
            raise _busy(f"{EVAL_WAITING_MAX} evaluations wait already")
        self._evals_waiting += 1
        try:
            async with asyncio.timeout(EVAL_WAIT_S_MAX):
                await self._evaluation.acquire()
        except TimeoutError:
            raise _busy(f"others have run for {EVAL_WAIT_S_MAX:g} s") from None
        finally:
            self._evals_waiting -= 1

    async def _borrow(self) -> Channel:
        while self._idle:
            channel = self._idle.pop()
            if channel.idle:
                return channel
            channel.close()
        channel = await Channel.connect(self.vsock, self._explain)
        try:
            async with deadline(self._connect_timeout_s, "the agent took no connection"):
                greeting = await channel.line(f"CONNECT {AGENT_PORT}", _HANDSHAKE_BYTES_MAX)
            _check_greeting(greeting)
        except BaseException:
            channel.close()
            raise
        return channel

    def _give_back(self, channel: Channel) -> None:
        if channel.idle and len(self._idle) < IDLE_CHANNELS_MAX:
            self._idle.append(channel)
        else:
            channel.close()


def _busy(why: str) -> Busy:
    return Busy(
        f"the sandbox evaluates one thing at a time, and {why}: this code did not run; try again",
        guest_code="busy",
        retry_after_s=SHORT_RETRY_S,
    )


def _check_greeting(line: str) -> None:
    if not line.startswith("OK "):
        raise EngineError(f"a machine answered CONNECT with {line[:40]!r}")


def answer(frame: Frame) -> JsonObject:
    """Return what a REPLY holds.

    Raises:
        EngineError: The frame is neither REPLY nor ERROR.
        ForkdError: It is an ERROR; `forkd.engine.faults` has the classes.
    """
    if frame.kind is Kind.REPLY:
        return frame.members()
    if frame.kind is Kind.ERROR:
        raise guest_fault(frame.members())
    raise EngineError(f"an agent answered with a {frame.kind.name} frame")


def _eval_result(
    reply: Evaluated, stdout: str, stderr: str, *, output_truncated: bool
) -> EvalResult:
    error = reply.error
    return EvalResult(
        has_value=reply.has_value,
        repr=reply.repr,
        value=reply.value,
        value_is_json=reply.value_is_json,
        stdout=stdout,
        stderr=stderr,
        output_truncated=output_truncated,
        error=None if error is None else EvalFault(error.type, error.message, error.traceback),
        timed_out=reply.timed_out,
        results=[EvalForms(each.is_main, each.data, each.omitted) for each in reply.results],
        more_results=reply.more_results,
    )
