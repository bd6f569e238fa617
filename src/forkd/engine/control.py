"""Ask a VMM process: a machine, a zygote or a seed.

One request at a time on each connection, by contract; `watch` has the connection that is told of
the process' end.  protocol/control/PROTOCOL.md says what each kind of process can be asked.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.engine.channel import Channel, deadline
from forkd.engine.configs import members as as_members
from forkd.engine.faults import control_fault
from forkd.engine.frames import Kind
from forkd.engine.replies import (
    Branched,
    ChildFailed,
    ChildReady,
    Derived,
    Empty,
    MachineStatus,
    Metrics,
    Reply,
    Retired,
    Saved,
    Timed,
)
from forkd.errors import EngineError
from forkd.host.urgency import urgent
from forkd.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from forkd.engine.configs import (
        BranchConfig,
        ChildConfig,
        DeriveConfig,
        Identity,
        LinkConfig,
    )
    from forkd.engine.frames import Frame
    from forkd.engine.replies import SavedFile
    from forkd.model.json import JsonObject, JsonValue

FILES_AT_ONCE_MAX = 253
"""Most descriptors with one message: the kernel's `SCM_MAX_FD`."""

REQUEST_TIMEOUT_S = 30.0
"""How long a VMM may take for what needs no guest and little disk."""

SAVE_TIMEOUT_S = 600.0
"""How long writing a snapshot may take: 1 GiB at the 2 MiB/s of a bad disk."""

DERIVE_TIMEOUT_S = 300.0
"""How long a zygote may take to read and verify a delta, and to listen with it."""

CLONE_PATIENCE_S = 1.0
"""How long each child of a fork may make those behind it wait."""


R = TypeVar("R", bound=Reply)


class Control:
    """A connection for requests to one VMM process, one after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @classmethod
    async def connect(cls, path: Path) -> Self:
        """Connect to a machine's or a zygote's socket.

        Raises:
            EngineExited: Nobody listens there.
        """
        return cls(await Channel.connect(path))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def peer_pid(self) -> int:
        """Return the pid of the VMM process, as the kernel knows it."""
        return self._channel.peer_pid()

    async def request(
        self,
        op: str,
        members: Mapping[str, JsonValue] = MappingProxyType({}),
        reply: type[R] = Empty,  # type: ignore[assignment]  # mypy knows no default of a type variable
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> R:
        """Ask for `op` and return the reply; for modules of this package.

        Raises:
            EngineTimeout: No reply within `timeout_s`.
            EngineExited: The process ended.
            EngineError: The answer is not a valid `reply`.
            ForkdError: It refused; `forkd.engine.faults` has the classes.
        """
        with tracing.span(f"vmm {op}"):
            return await self._ask(op, members, reply, timeout_s)

    async def _ask(
        self, op: str, members: Mapping[str, JsonValue], reply: type[R], timeout_s: float
    ) -> R:
        async with deadline(timeout_s, f"the machine did not answer {op}"):
            await self._channel.send_json(Kind.REQUEST, {"op": op, **members})
            while True:
                frame = await self._channel.receive()
                if frame.kind is not Kind.EVENT:
                    return reply.read(_answer(frame), op)

    async def status(self) -> MachineStatus:
        """Return what a machine does now; as `request`."""
        return await self.request("status", reply=MachineStatus)

    async def metrics(self) -> Metrics:
        """Return what a machine has counted since it began; as `request`."""
        return await self.request("metrics", reply=Metrics)

    async def stop(self) -> None:
        """End the process, without asking a guest; as `request`."""
        await self.request("stop")

    async def pause(self) -> None:
        """Pause a machine; idempotent, as `request`."""
        await self.request("pause")

    async def resume(self) -> None:
        """Have a paused machine go on; idempotent, as `request`."""
        await self.request("resume")

    async def save(self, directory: Path) -> Saved:
        """Have a paused machine written to `directory`; as `request`."""
        return await self._save({"directory": str(directory)})

    async def save_disk(self, directory: Path, above: int) -> Path:
        """Have what the disk of a paused machine has above its lowest layers written down.

        Args:
            directory: Where; exists and is empty.
            above: How many lowest layers are not written.

        Returns:
            The layer's file.

        Raises:
            ForkdError: As `save_link`.
        """
        saved = await self._save({"directory": str(directory), "disk_above": above})
        match saved.files:
            case [file]:
                return directory / file.name
        raise EngineError("the answer to save names more than one file")

    async def save_link(self, config: LinkConfig) -> tuple[SavedFile, ...]:
        """Have a zygote, or a seed, write what it holds; it goes on serving meanwhile.

        Raises:
            HostError: It could not be written, for one because the disk is full.
            ForkdError: As `request`.
        """
        return tuple((await self._save(as_members(config))).files)

    async def _save(self, request: JsonObject) -> Saved:
        return await self.request("save", request, Saved, timeout_s=SAVE_TIMEOUT_S)

    async def branch(self, config: BranchConfig) -> Branched:
        """Have a machine fork a seed of itself, which serves `fork` and `save` like a zygote.

        Whoever calls owns the seed: it lives until it is told to stop.  The machine's threads come
        first meanwhile, where the kernel lets us.

        Raises:
            ForkdError: As `request`; the machine goes on as if nothing had been asked.
        """
        with urgent(self.peer_pid()):
            return await self.request("branch", as_members(config), Branched)

    async def hand(self, files: Mapping[str, int]) -> None:
        """Have a zygote open files by these names instead of paths, over this connection.

        The descriptors stay ours as well.

        Raises:
            ForkdError: As `request`.
        """
        names = list(files)
        for start in range(0, len(names), FILES_AT_ONCE_MAX):
            some = names[start : start + FILES_AT_ONCE_MAX]
            request: JsonObject = {"op": "files", "names": list(some)}
            async with deadline(REQUEST_TIMEOUT_S, "the zygote did not take files"):
                await self._channel.send_files(
                    Kind.REQUEST, request, [files[name] for name in some]
                )
                while (frame := await self._channel.receive()).kind is Kind.EVENT:
                    pass
            _answer(frame)

    async def derive(self, config: DeriveConfig) -> int:
        """Have a zygote fork another that holds a delta over its memory; return its process id.

        Whoever calls owns the new zygote: it lives until it is told to stop.

        Raises:
            StoreError: A file of the delta is damaged, too new, or for another CPU.
            ForkdError: As `request`.
        """
        request = as_members(config)
        return (await self.request("derive", request, Derived, timeout_s=DERIVE_TIMEOUT_S)).pid

    async def retire(self) -> int:
        """Have a zygote serve nobody any more, and end when nobody needs what it holds.

        Returns:
            With how many children it ends, the last of them; 0 if it ends at once.

        Raises:
            ForkdError: As `request`.
        """
        return (await self.request("retire", reply=Retired)).children

    async def reset(self, identity: Identity, *, deadline_s: float) -> float:
        """Take a machine back to its fork point; return how long that took, in milliseconds.

        Connections to its guest end.  If it fails after the machine began, the machine ends.

        Args:
            identity: The machine's from now on.
            deadline_s: For its agent's answer.

        Raises:
            Conflict: It has no fork point, since it was booted, or the seed that held it was
                ended; the machine goes on.
            ForkdError: As `request`.
        """
        return await self._become("reset", identity, {"deadline_s": deadline_s})

    async def identify(self, sandbox: str, identity: Identity, *, deadline_s: float) -> float:
        """Give a running machine's guest another identity; return how long, in milliseconds.

        The handshake is that of a fork: random generators are reseeded, and the clock is checked
        and set right.  Connections to the guest and what runs in it go on.

        Args:
            sandbox: Id that the guest is told.
            identity: The machine's from now on.
            deadline_s: For its agent's answer.

        Raises:
            Conflict: The machine is paused, another identity is under way, or a reset came.
            GuestError: The agent refused or did not answer.  The machine goes on; its guest may
                have taken a part of the identity.
            ForkdError: As `request`.
        """
        return await self._become("identify", identity, {"id": sandbox, "deadline_s": deadline_s})

    async def _become(self, op: str, identity: Identity, more: Mapping[str, str | float]) -> float:
        """Give a machine an identity; one that an earlier forkd started gets no memory limit."""
        request = {**as_members(identity), **more}
        timeout_s = float(more["deadline_s"]) + REQUEST_TIMEOUT_S
        try:
            return (await self.request(op, request, Timed, timeout_s=timeout_s)).ms
        except EngineError as error:
            if not _can_do_without(error, [request]):
                raise
        return (await self.request(op, request, Timed, timeout_s=timeout_s)).ms

    async def fork(
        self,
        children: Sequence[ChildConfig],
        *,
        deadline_s: float,
        on_outcome: Callable[[ChildReady | ChildFailed], None],
        users: str | None = None,
    ) -> None:
        """Fork children of a zygote; returns when it has spoken of each.

        Args:
            children: At most as many as fit into one frame.
            deadline_s: For each child, from its clone until its agent has answered.
            on_outcome: Called with each child when it is ready or has failed.
            users: What the user namespace was called that a seed was handed for its children; None
                if it can have them be others, or has entered it.

        Raises:
            EngineExited: The zygote ended; children not yet reported may or may not live.
            EngineTimeout: It did not finish long after `deadline_s`.
            ForkdError: It refused the whole request.
        """
        members = [as_members(child) for child in children]
        request: JsonObject = {"op": "fork", "children": [*members], "deadline_s": deadline_s}
        if users is not None:
            request["users"] = users
        # The deadline counts from each child's clone, and clones queue up.
        patience_s = len(children) * CLONE_PATIENCE_S + deadline_s + REQUEST_TIMEOUT_S
        with tracing.span("vmm fork", children=len(children)):
            try:
                await self._fork(request, patience_s, on_outcome)
            except EngineError as error:
                if not _can_do_without(error, members):
                    raise
                await self._fork(request, patience_s, on_outcome)

    async def _fork(
        self,
        request: JsonObject,
        patience_s: float,
        on_outcome: Callable[[ChildReady | ChildFailed], None],
    ) -> None:
        async with deadline(patience_s, "the zygote did not finish a fork"):
            await self._channel.send_json(Kind.REQUEST, request)
            while (frame := await self._channel.receive()).kind is Kind.EVENT:
                outcome = _fork_event(frame.members())
                if outcome is not None:
                    on_outcome(outcome)
        _answer(frame)


def _answer(frame: Frame) -> JsonObject:
    if frame.kind is Kind.REPLY:
        return frame.members()
    if frame.kind is Kind.ERROR:
        raise control_fault(frame.members())
    raise EngineError(f"a machine answered with a {frame.kind.name} frame")


def _fork_event(members: JsonObject) -> ChildReady | ChildFailed | None:
    """Return what an event says of a child being forked; None if it is about something else."""
    match members.get("event"):
        case "ready":
            return ChildReady.read(members, "fork")
        case "failed":
            return ChildFailed.read(members, "fork")
    return None


def _can_do_without(refusal: EngineError, identities: Sequence[JsonObject]) -> bool:
    """Drop the memory limits that a process of an earlier forkd refuses; say if there were any."""
    if refusal.context.get("control_code") != "invalid_request":
        return False
    dropped = [each.pop("guest_memory_bytes", None) for each in identities]
    return any(limit is not None for limit in dropped)
