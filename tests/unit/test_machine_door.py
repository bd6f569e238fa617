"""The door lets a crowd into QEMU one after the other, and says so when the machine is paused."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError
from forkd.machine import door
from forkd.machine.door import Door
from forkd.sdk._errors import from_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CROWD = 120
DEADLINE_S = 30.0


class Inner:
    """What QEMU forwards to: echoes one line; counts the clients that sent one.

    The door may let go of a connection that took too long, and make another one.
    """

    def __init__(self) -> None:
        self.served = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        self.served += line != b""
        writer.write(line)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def opened(opening: Door, inner: Inner) -> AsyncIterator[int]:
    """Serve `opening` in front of `inner`, whose queue has one place, as QEMU's has."""
    behind = await asyncio.start_server(inner.serve, "127.0.0.1", 0, backlog=1)
    port = behind.sockets[0].getsockname()[1]
    front = await asyncio.start_server(
        lambda reader, writer: opening.serve(reader, writer, port), "127.0.0.1", 0,
        backlog=door.BACKLOG,
    )  # fmt: skip
    async with behind, front:
        yield front.sockets[0].getsockname()[1]
        while opening._serving:  # noqa: ASYNC110, SLF001 - changed by other tasks of this loop
            await asyncio.sleep(0)


async def ask(port: int, line: bytes = b"hello\n") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(line)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_crowd_is_served_to_the_last_client(tmp_path: Path) -> None:
    inner = Inner()
    async with asyncio.timeout(DEADLINE_S), opened(Door(tmp_path), inner) as port:
        answers = await asyncio.gather(*(ask(port, f"{n}\n".encode()) for n in range(CROWD)))

    assert answers == [f"{n}\n".encode() for n in range(CROWD)]
    assert inner.served == CROWD


async def test_a_client_past_the_limit_is_told_to_come_back(tmp_path: Path) -> None:
    opening = Door(tmp_path, connections_max=1)
    async with asyncio.timeout(DEADLINE_S), opened(opening, Inner()) as port:
        _, first = await asyncio.open_connection("127.0.0.1", port)
        while not opening._serving:  # noqa: ASYNC110, SLF001 - set by another task of this loop
            await asyncio.sleep(0)
        refused = await ask(port)
        first.close()
        await first.wait_closed()

    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1\r\n" in refused
    error = from_answer(503, refused.partition(b"\r\n\r\n")[2])
    assert isinstance(error, CapacityError)
    assert "1 connections" in str(error)


async def test_while_the_machine_is_paused_clients_are_told_why(tmp_path: Path) -> None:
    opening = Door(tmp_path, stopped=door.full_disk(tmp_path))
    async with asyncio.timeout(DEADLINE_S), opened(opening, Inner()) as port:
        refused = await ask(port)

    error = from_answer(503, refused.partition(b"\r\n\r\n")[2])
    assert isinstance(error, CapacityError)
    assert f"the disk with {tmp_path} is full" in str(error)


async def test_a_machine_that_found_no_room_goes_on_once_there_is_some(tmp_path: Path) -> None:
    """The monitor reports a write without room; `tmp_path` has room, so `cont` follows at once."""
    asked: list[str] = []
    done = asyncio.Event()

    async def monitor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        event = {"event": "BLOCK_IO_ERROR", "data": {"nospace": True, "action": "stop"}}
        writer.write(json.dumps(event).encode() + b"\n")
        while line := await reader.readline():
            asked.append(json.loads(line)["execute"])
            if asked[-1] == "cont":
                break
        writer.close()
        await writer.wait_closed()
        done.set()

    opening = Door(tmp_path)
    async with asyncio.timeout(DEADLINE_S):
        server = await asyncio.start_unix_server(monitor, tmp_path / "qmp.sock")
        async with server:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "qmp.sock")
            await opening.watch(reader, writer)
            await done.wait()
            writer.close()
            await writer.wait_closed()

    assert asked == ["qmp_capabilities", "query-status", "cont"]
    assert opening.stopped is None


@pytest.mark.parametrize(
    ("message", "full"),
    [
        ({"event": "BLOCK_IO_ERROR", "data": {"nospace": True, "action": "stop"}}, True),
        ({"event": "BLOCK_IO_ERROR", "data": {"nospace": True, "action": "report"}}, False),
        ({"event": "BLOCK_IO_ERROR", "data": {"nospace": False, "action": "stop"}}, False),
        ({"event": "STOP"}, False),
        ({"return": {"status": "io-error", "running": False}}, True),
        ({"return": {"status": "running", "running": True}}, False),
        ({"return": {}}, False),
        ({"QMP": {"version": {}}}, False),
    ],
)
def test_what_the_monitor_says_is_understood(message: dict[str, object], *, full: bool) -> None:
    assert door.is_disk_full(message) is full


@pytest.mark.parametrize(
    ("descriptors", "clients"),
    [(1 << 20, door.CONNECTIONS_MAX), (1024, 480), (64, 1), (10, 1)],
)
def test_clients_fit_into_the_descriptors(descriptors: int, clients: int) -> None:
    assert door.connections_max(descriptors) == clients
