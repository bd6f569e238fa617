"""Learn when a VMM process ends, at the cost of no task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Self

from forkd.engine.channel import connected
from forkd.engine.frames import FrameDecoder, Kind
from forkd.engine.replies import MachineExited
from forkd.errors import EngineError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.model.json import JsonObject

NO_REASON = "its process ended without giving a reason"


class Watch(asyncio.Protocol):
    """A connection that is told when a VMM process ends.

    Ten thousand of these are open at once on a full host, so it is a protocol
    with a callback and not a task with a stream.
    """

    def __init__(self, on_end: Callable[[str], None]) -> None:
        self._on_end = on_end
        self._decoder = FrameDecoder()
        self._reason = NO_REASON
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
            CapacityError: There are too many open files, or too little memory.
        """
        loop = asyncio.get_running_loop()
        sock = await connected(path)
        try:
            with kernel_call(f"watch {path}"):
                _, watch = await loop.create_unix_connection(lambda: cls(on_end), sock=sock)
        except BaseException:
            sock.close()
            raise
        return watch

    def close(self) -> None:
        """Stop watching; `on_end` is not called any more."""
        self._on_end = _ignore
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport (called by the event loop)."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Look for the reason of the end (called by the event loop)."""
        try:
            for frame in self._decoder.feed(data):
                if frame.kind is Kind.EVENT:
                    self._note(frame.members())
        except EngineError as error:
            self._reason = str(error)
            if self._transport is not None:
                self._transport.close()  # it breaks the contract: the machine counts as gone

    def _note(self, members: JsonObject) -> None:
        if members.get("event") == "exited":
            said = MachineExited.read(members, "watch")
            self._reason = f"{said.reason}: {said.message}" if said.message else said.reason

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell of the end (called by the event loop)."""
        on_end, self._on_end = self._on_end, _ignore
        on_end(self._reason if exc is None else f"{self._reason} ({exc})")


def _ignore(_reason: str) -> None:
    return
