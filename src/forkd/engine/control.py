"""Ask a VMM process, and learn when it ends.

Two kinds of connection, because the contract allows one request at a time on each:
a `Control` for a request, and a `Watch` that sends nothing and hears of the end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from forkd.engine.channel import CONNECT_TIMEOUT_S, Channel, deadline
from forkd.engine.configs import members as as_members
from forkd.engine.faults import control_fault
from forkd.engine.frames import FrameDecoder, Kind
from forkd.errors import EngineError, EngineExited
from forkd.model.sandbox import SpawnTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from forkd.engine.configs import (
        BranchConfig,
        ChildConfig,
        DeriveConfig,
        LinkConfig,
        ResetConfig,
    )
    from forkd.model.json import JsonObject, JsonValue

REQUEST_TIMEOUT_S = 30.0
"""How long a VMM may take for what needs no guest and little disk."""

SAVE_TIMEOUT_S = 600.0
"""How long writing a snapshot may take: 1 GiB at the 2 MiB/s of a bad disk."""

DERIVE_TIMEOUT_S = 300.0
"""How long a zygote may take to read and verify a delta, and to listen with it."""

CLONE_PATIENCE_S = 1.0
"""How long each child of a fork may make those behind it wait."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file of a snapshot: its name, its length and the BLAKE3 digest of its body."""

    name: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Branched:
    """A seed that listens, and for how long the machine stood still for it.

    Attributes:
        pid: The seed's process.
        pause_ms: From the first vCPU that stopped to the last one that ran again; 0 for a machine
            that was paused already.
    """

    pid: int
    pause_ms: float


@dataclass(frozen=True, slots=True)
class ChildReady:
    """A child whose agent has answered."""

    id: str
    pid: int
    times: SpawnTimes


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """A child of which nothing remains."""

    id: str
    stage: str
    code: str
    message: str


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
        *,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> JsonObject:
        """Ask for `op` and return the reply.

        Raises:
            EngineTimeout: No reply within `timeout_s`.
            EngineExited: The process ended.
            ForkdError: It refused; `forkd.engine.faults` has the classes.
        """
        async with deadline(timeout_s, f"the machine did not answer {op}"):
            await self._channel.send_json(Kind.REQUEST, {"op": op, **members})
            while True:
                frame = await self._channel.receive()
                if frame.kind is not Kind.EVENT:
                    return self._answer(frame.kind, frame.members())

    async def save(self, directory: Path) -> tuple[SavedFile, ...]:
        """Have a paused machine written to `directory`; as `request`."""
        reply = await self.request("save", {"directory": str(directory)}, timeout_s=SAVE_TIMEOUT_S)
        return _saved_files(reply)

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
        request: JsonObject = {"directory": str(directory), "disk_above": above}
        reply = await self.request("save", request, timeout_s=SAVE_TIMEOUT_S)
        match _saved_files(reply):
            case (file,):
                return directory / file.name
        raise EngineError("the reply to save does not name one file")

    async def save_link(self, config: LinkConfig) -> tuple[SavedFile, ...]:
        """Have a zygote, or a seed, write what it holds; it goes on serving meanwhile.

        Raises:
            HostError: It could not be written, for one because the disk is full.
            ForkdError: As `request`.
        """
        return _saved_files(
            await self.request("save", as_members(config), timeout_s=SAVE_TIMEOUT_S)
        )

    async def branch(self, config: BranchConfig) -> Branched:
        """Have a machine fork a seed of itself, which serves `fork` and `save` like a zygote.

        Whoever calls owns the seed: it lives until it is told to stop.

        Raises:
            ForkdError: As `request`; the machine goes on as if nothing had been asked.
        """
        reply = await self.request("branch", as_members(config))
        match reply:
            case {"pid": int(pid), "pause_ms": int() | float() as pause_ms}:
                return Branched(pid, float(pause_ms))
        raise EngineError("the reply to branch names no process")

    async def derive(self, config: DeriveConfig) -> int:
        """Have a zygote fork another that holds a delta over its memory; return its process id.

        Whoever calls owns the new zygote: it lives until it is told to stop.

        Raises:
            StoreError: A file of the delta is damaged, too new, or for another CPU.
            ForkdError: As `request`.
        """
        reply = await self.request("derive", as_members(config), timeout_s=DERIVE_TIMEOUT_S)
        match reply:
            case {"pid": int(pid)}:
                return pid
        raise EngineError("the reply to derive names no process")

    async def retire(self) -> int:
        """Have a zygote serve nobody any more, and end when nobody needs what it holds.

        Returns:
            With how many children it ends, the last of them; 0 if it ends at once.

        Raises:
            ForkdError: As `request`.
        """
        match await self.request("retire"):
            case {"children": int(children)}:
                return children
        raise EngineError("the reply to retire names no number of children")

    async def reset(self, config: ResetConfig, *, deadline_s: float) -> float:
        """Take a machine back to its fork point; return how long that took, in milliseconds.

        Connections to its guest end.  If it fails after the machine began, the machine ends.

        Args:
            config: Who it is from now on.
            deadline_s: For its agent's answer.

        Raises:
            Conflict: It has no fork point, since it was booted, or the seed that held it was
                ended; the machine goes on.
            ForkdError: As `request`.
        """
        request = {**as_members(config), "deadline_s": deadline_s}
        reply = await self.request("reset", request, timeout_s=deadline_s + REQUEST_TIMEOUT_S)
        match reply:
            case {"ms": int() | float() as spent_ms}:
                return float(spent_ms)
        raise EngineError("the reply to reset names no time")

    async def fork(
        self,
        children: Sequence[ChildConfig],
        *,
        deadline_s: float,
        on_outcome: Callable[[ChildReady | ChildFailed], None],
    ) -> None:
        """Fork children of a zygote; returns when it has spoken of each.

        Args:
            children: At most as many as fit into one frame.
            deadline_s: For each child, from its clone until its agent has answered.
            on_outcome: Called with each child when it is ready or has failed.

        Raises:
            EngineExited: The zygote ended; children not yet reported may or may not live.
            EngineTimeout: It did not finish long after `deadline_s`.
            ForkdError: It refused the whole request.
        """
        request = {
            "op": "fork",
            "children": [as_members(child) for child in children],
            "deadline_s": deadline_s,
        }
        # The deadline counts from each child's clone, and clones queue up.
        patience_s = len(children) * CLONE_PATIENCE_S + deadline_s + REQUEST_TIMEOUT_S
        async with deadline(patience_s, "the zygote did not finish a fork"):
            await self._channel.send_json(Kind.REQUEST, request)
            while (frame := await self._channel.receive()).kind is Kind.EVENT:
                outcome = _fork_event(frame.members())
                if outcome is not None:
                    on_outcome(outcome)
        self._answer(frame.kind, frame.members())

    def _answer(self, kind: Kind, members: JsonObject) -> JsonObject:
        if kind is Kind.REPLY:
            return members
        if kind is Kind.ERROR:
            raise control_fault(str(members.get("code")), str(members.get("message")))
        raise EngineError(f"a machine answered with a {kind.name} frame")


def _saved_files(reply: JsonObject) -> tuple[SavedFile, ...]:
    files = reply.get("files")
    if not isinstance(files, list):
        raise EngineError("the reply to save names no files")
    return tuple(_saved_file(file) for file in files)


def _saved_file(value: JsonValue) -> SavedFile:
    match value:
        case {"name": str(name), "bytes": int(size), "digest": str(digest)}:
            return SavedFile(name, size, digest)
    raise EngineError("the reply to save describes a file badly")


def _fork_event(members: JsonObject) -> ChildReady | ChildFailed | None:
    """Return what an event says of a child being forked; None if it says nothing of one."""
    match members:
        case {"event": "ready", "id": str(id_), "pid": int(pid), "ms": dict(ms)}:
            return ChildReady(id_, pid, _times(ms))
        case {"event": "failed", "id": str(id_)}:
            stage, code = str(members.get("stage")), str(members.get("code"))
            return ChildFailed(id_, stage, code, str(members.get("message")))
    return None


def _times(ms: JsonObject) -> SpawnTimes:
    def number(name: str) -> float:
        value = ms.get(name)
        return float(value) if isinstance(value, int | float) else 0.0

    return SpawnTimes(
        clone_ms=number("clone"),
        build_ms=number("build"),
        resume_ms=number("resume"),
        agent_ms=number("agent"),
        total_ms=number("total"),
    )


class Watch(asyncio.Protocol):
    """A connection that tells when a VMM process ends, at the cost of no task.

    Ten thousand of these are open at once on a full host, so it is a protocol
    with a callback and not a task with a stream.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._reason = "its process ended without a word"
        self._transport: asyncio.BaseTransport | None = None

    @classmethod
    async def open(cls, path: Path, on_end: Callable[[str], None]) -> Self:
        """Watch the process that listens at `path`.

        Args:
            path: A machine's or a zygote's socket.
            on_end: Called once with the reason when the process is gone, unless
                `close` was called before.

        Raises:
            EngineExited: Nobody listens there.
            EngineTimeout: Nobody accepts there.
        """
        loop = asyncio.get_running_loop()
        try:
            async with deadline(CONNECT_TIMEOUT_S, f"{path.name} accepted no connection"):
                _, watch = await loop.create_unix_connection(lambda: cls(on_end), str(path))
        except OSError as error:
            raise EngineExited(f"nobody listens at {path}: {error.strerror}") from error
        return watch

    def close(self) -> None:
        """Stop watching; `on_end` is not called any more."""
        self._on_end = _nothing
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport (called by the event loop)."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Look for the reason of the end (called by the event loop)."""
        try:
            events = [f.members() for f in self._decoder.feed(data) if f.kind is Kind.EVENT]
        except EngineError as error:
            self._reason = str(error)
            self.close_badly()
            return
        for event in events:
            if event.get("event") == "exited":
                message = event.get("message")
                reason = str(event.get("reason"))
                self._reason = f"{reason}: {message}" if message else reason

    def close_badly(self) -> None:
        """End a connection that breaks the contract; the machine counts as gone."""
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end (called by the event loop)."""
        on_end, self._on_end = self._on_end, _nothing
        on_end(self._reason if exc is None else f"{self._reason} ({exc})")


def _nothing(_reason: str) -> None:
    return
