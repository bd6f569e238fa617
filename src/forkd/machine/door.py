"""Let clients into the helper machine: the listener in front of QEMU's port forwarding.

QEMU's user-mode network listens with a backlog of one.  A crowd loses connections there: the
kernel tells a client that it is connected, drops the other half because the queue is full, and
resets the connection a minute later.  So this process listens instead, with a backlog of its own,
and connects to QEMU for its clients, one after the other.

It also watches QEMU's monitor.  QEMU stops the machine when the host's disk is full.  From then on
new requests are answered 503, with what to do, and the machine is continued once there is room.

    python -m forkd.machine.door FOLDER FD:PORT …

FOLDER is the machine's state folder, FD a listening socket that we inherit, PORT where QEMU
forwards.  The program returns when the door serves, having printed its process id; the door ends
with QEMU.  A forwarded port speaks HTTP: a refusal is an HTTP answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

MONITOR = "qmp.sock"
"""QEMU's monitor, in the state folder."""

BACKLOG = 4096
"""Clients whom the kernel holds for us while we are busy; it may hold fewer (somaxconn)."""

CONNECTIONS_MAX = 1024
"""Clients at a time; further ones are answered 503.  The daemon itself takes 1,280."""

DESCRIPTORS_RESERVED = 64
"""Descriptors that are not for clients; each of those takes two."""

CONNECT_DEADLINE_S = 30.0
"""How long a client may wait for its turn to be connected to QEMU."""

ATTEMPT_S = 0.05
"""How long QEMU's listener may take; it answers at once unless its queue is full."""

PIECE_BYTES = 1 << 16
"""Most that is read at once, and about what is held of a client whose peer does not read."""

REFUSED_BYTES_MAX = 1 << 20
"""Most that is read of a refused request, so that its client sees the answer."""

REFUSED_S = 5.0
"""How long a refused client may take to read the answer."""

RETRY_AFTER_S = 1
"""When a refused client may try again."""

ROOM_BYTES = 64 << 20
"""Free space on the host's disk with which a stopped machine is continued."""

ROOM_PERIOD_S = 1.0
"""How often the host's disk is looked at while the machine is stopped."""


@dataclass(slots=True)
class Door:
    """What the door knows.

    Attributes:
        folder: The machine's state folder.
        connections_max: Clients at a time.
        stopped: Why the machine is stopped; None while it runs.
    """

    folder: Path
    connections_max: int = CONNECTIONS_MAX
    stopped: str | None = None
    _serving: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """Connect a client to QEMU's `port`, or refuse it."""
        if self.stopped is not None:
            await _refuse(reader, writer, self.stopped)
        elif self._serving >= self.connections_max:
            said = f"the helper machine serves {self.connections_max} connections already"
            await _refuse(reader, writer, said)
        else:
            self._serving += 1
            try:
                await self._splice(reader, writer, port)
            finally:
                self._serving -= 1

    async def _splice(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                inner_reader, inner_writer = await self._connect(port)
        except (OSError, TimeoutError):
            said = self.stopped or "the helper machine does not take connections"
            await _refuse(reader, writer, said)
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, inner_writer))
                both.create_task(_pump(inner_reader, writer))
        except* OSError:
            _reset(writer)
        finally:
            await _closed(inner_writer, writer)

    async def _connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to QEMU when it is our turn.

        One handshake at a time never meets a queue that another one fills meanwhile.  While the
        queue is full the kernel ignores a handshake, so we let go and try again.
        """
        async with self._turn:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ATTEMPT_S):
                        return await asyncio.open_connection("127.0.0.1", port, limit=PIECE_BYTES)

    async def watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follow the machine's monitor until QEMU ends; continue the machine once there is room."""
        _command(writer, "qmp_capabilities")
        _command(writer, "query-status")
        resuming: asyncio.Task[None] | None = None
        try:
            while line := await reader.readline():
                if is_disk_full(json.loads(line)) and (resuming is None or resuming.done()):
                    self.stopped = full_disk(self.folder)
                    resuming = asyncio.create_task(self._resume(writer))
        finally:
            if resuming is not None:
                resuming.cancel()

    async def _resume(self, writer: asyncio.StreamWriter) -> None:
        # No event of the kernel's says that a file system has room again.
        while _free_bytes(self.folder) < ROOM_BYTES:  # noqa: ASYNC110
            await asyncio.sleep(ROOM_PERIOD_S)
        self.stopped = None
        _command(writer, "cont")


def is_disk_full(message: dict[str, Any]) -> bool:
    """Whether the monitor says that the machine is stopped because a write found no room."""
    if message.get("event") == "BLOCK_IO_ERROR":
        data = message.get("data", {})
        return bool(data.get("nospace")) and data.get("action") == "stop"
    said = message.get("return")
    return isinstance(said, dict) and said.get("status") == "io-error"


def full_disk(folder: Path) -> str:
    """Say that the host's disk is full, and what to do."""
    return (
        f"the helper machine is paused: the disk with {folder} is full. "
        f"Free {ROOM_BYTES >> 20} MiB, and it goes on by itself"
    )


def refusal(message: str) -> bytes:
    """Return an HTTP answer that says why a connection is refused at the moment."""
    said = {"error": message, "code": "capacity", "context": {"retry_after_s": RETRY_AFTER_S}}
    body = json.dumps(said).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: str) -> None:
    """Answer, and read on for a while: a close with unread bytes would destroy the answer."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(REFUSED_S):
            writer.write(refusal(message))
            await writer.drain()
            writer.write_eof()
            left = REFUSED_BYTES_MAX
            while left > 0 and (data := await reader.read(PIECE_BYTES)):
                left -= len(data)
    await _closed(writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until their end, and then pass that on, too."""
    while data := await reader.read(PIECE_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _closed(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Have the client see a broken connection, not the end of an answer."""
    with contextlib.suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


def _command(writer: asyncio.StreamWriter, name: str) -> None:
    writer.write(json.dumps({"execute": name}).encode() + b"\n")


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def connections_max(descriptors: int) -> int:
    """Return how many clients fit into so many descriptors, two for each."""
    return max(1, min(CONNECTIONS_MAX, (descriptors - DESCRIPTORS_RESERVED) // 2))


def raise_descriptors(pid: int = 0) -> int:
    """Let a process have as many descriptors as it may; return how many those are."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    return most


async def run(folder: Path, ways: list[tuple[int, int]], ready: int) -> None:
    """Serve until QEMU ends.

    Args:
        folder: The machine's state folder.
        ways: Listening sockets, by descriptor, each with the port to which its clients go.
        ready: Descriptor that is closed when the door serves, a byte written to it.
    """
    door = Door(folder, connections_max(raise_descriptors()))
    # By a descriptor, because a socket's path may have 107 bytes only.
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    monitor = await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}/{MONITOR}")
    os.close(descriptor)
    async with contextlib.AsyncExitStack() as stack:
        for number, port in ways:
            listener = socket.socket(fileno=number)
            serve = partial(door.serve, port=port)
            server = await asyncio.start_server(
                serve, sock=listener, limit=PIECE_BYTES, backlog=BACKLOG
            )
            stack.callback(server.close)
        os.write(ready, b"1")
        os.close(ready)
        await door.watch(*monitor)
    os._exit(0)  # connections to a machine that is gone are not waited for


def main() -> int:
    """Serve what the command line names, in a process of its own; return when it serves."""
    ways = [(int(fd), int(port)) for fd, _, port in (each.partition(":") for each in sys.argv[2:])]
    heard, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(heard)
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        asyncio.run(run(Path(sys.argv[1]), ways, ready))
        return 0
    os.close(ready)
    if not os.read(heard, 1):
        return 1
    sys.stdout.write(f"{pid}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
