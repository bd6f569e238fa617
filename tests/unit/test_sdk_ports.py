"""Ports of sandboxes in both flavours of the SDK, connected to and forwarded from this host.

The fake guests connect to ports of this host, where these tests listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient, Client
from forkd.errors import Conflict, ForkdError, InvalidRequest, TransportError
from forkd.limits import PORT_MAX
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from forkd import AsyncSandbox, Sandbox
    from tests.support.daemon import RunningDaemon

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

CROWD = 200

MORE_THAN_IS_HELD = 64 << 20
"""Far more than sockets, messages and queues between a program and its client hold."""

RESETS = (ConnectionResetError, BrokenPipeError)


@pytest.fixture
def sandbox(daemon: RunningDaemon) -> Iterator[Sandbox]:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        yield client.sandbox("warm")


@contextlib.asynccontextmanager
async def async_sandbox(daemon: RunningDaemon) -> AsyncIterator[AsyncSandbox]:
    daemon.service.stored = some_snapshots("warm")
    async with AsyncClient(daemon.url) as client:
        yield await client.sandbox("warm")


async def capitals(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say in capitals what was said, once it has ended."""
    writer.write((await reader.read()).upper())
    writer.close()


@contextlib.asynccontextmanager
async def program(serve: Serve) -> AsyncIterator[int]:
    """Have a program listen within the block, which gets its port."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0, backlog=CROWD) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
def listening() -> Iterator[int]:
    """A port where `capitals` listens, in another thread."""
    ready: asyncio.Queue[int] = asyncio.Queue()
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with program(capitals) as port:
            ready.put_nowait(port)
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    yield asyncio.run_coroutine_threadsafe(ready.get(), loop).result(10)
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
    return port


def test_a_connection_is_written_to_and_iterated(sandbox: Sandbox, listening: int) -> None:
    with sandbox.connect_port(listening) as port:
        port.send(b"hello " * 50_000)
        port.send(b"you")
        port.send_end()
        assert b"".join(port) == b"HELLO " * 50_000 + b"YOU"
        assert port.receive() == b""


async def test_so_is_an_asynchronous_one(daemon: RunningDaemon) -> None:
    async with (
        async_sandbox(daemon) as sandbox,
        program(capitals) as port,
        sandbox.connect_port(port) as connection,
    ):
        await connection.send(b"hello")
        await connection.send_end()
        assert [each async for each in connection] == [b"HELLO"]


def test_what_cannot_be_connected_raises_when_it_is_entered(
    sandbox: Sandbox, daemon: RunningDaemon, listening: int
) -> None:
    with pytest.raises(TransportError, match="enter its context first"):
        sandbox.connect_port(listening).send(b"x")
    port = closed_port()
    with pytest.raises(Conflict, match=f"nothing listens on port {port} "):
        sandbox.connect_port(port).__enter__()
    for wrong in (0, PORT_MAX + 1):
        with pytest.raises(InvalidRequest, match=f"port must be 1 to 65535, not {wrong}"):
            sandbox.connect_port(wrong)
        with pytest.raises(InvalidRequest, match=f"port must be 1 to 65535, not {wrong}"):
            sandbox.forward(wrong)
    next(iter(daemon.service.running.values())).too_old = True
    with pytest.raises(Conflict, match="too old for this; bake the snapshot again"):
        sandbox.connect_port(listening).__enter__()


def test_a_forwarded_port_is_one_of_this_host(sandbox: Sandbox, listening: int) -> None:
    with sandbox.forward(listening) as forward:
        assert forward.address == f"127.0.0.1:{forward.port}"
        assert forward.guest_port == listening
        for _ in range(2):
            with socket.create_connection((forward.host, forward.port), timeout=10) as client:
                client.sendall(b"hello")
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b"HELLO"
                assert client.recv(100) == b""
    forward.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((forward.host, forward.port))
    assert not [each for each in threading.enumerate() if each.name == "forkd-forward"]


def test_a_forward_that_ends_resets_what_is_left(sandbox: Sandbox, listening: int) -> None:
    with sandbox.forward(listening) as forward:
        client = socket.create_connection((forward.host, forward.port), timeout=10)
        client.sendall(b"half")
        # It is passed on: a second one gets its answer only through the same loop.
        with socket.create_connection((forward.host, forward.port), timeout=10) as other:
            other.sendall(b"x")
            other.shutdown(socket.SHUT_WR)
            assert other.recv(1) == b"X"
    with client, pytest.raises(RESETS):
        client.recv(1)


async def test_two_hundred_connections_are_forwarded_at_once(daemon: RunningDaemon) -> None:
    met = asyncio.Barrier(CROWD)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = await reader.readexactly(8)
        async with asyncio.timeout(30):
            await met.wait()  # all of them are open at once
        writer.write(said * 1_000)
        writer.close()

    async with (
        async_sandbox(daemon) as sandbox,
        program(serve) as port,
        sandbox.forward(port) as forward,
    ):

        async def ask(number: int) -> bool:
            reader, writer = await asyncio.open_connection(forward.host, forward.port)
            said = number.to_bytes(8)
            writer.write(said)
            answer = await reader.read()
            while piece := await reader.read():
                answer += piece
            writer.close()
            return answer == said * 1_000

        assert all(await asyncio.gather(*map(ask, range(CROWD))))


async def test_each_direction_of_a_forwarded_connection_ends_by_itself(
    daemon: RunningDaemon,
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.write_eof()
        heard.append(await reader.read())
        writer.close()
        done.set()

    heard: list[bytes] = []
    done = asyncio.Event()
    async with (
        async_sandbox(daemon) as sandbox,
        program(serve) as port,
        sandbox.forward(port) as forward,
    ):
        reader, writer = await asyncio.open_connection(forward.host, forward.port)
        assert await reader.read() == b"hello"
        writer.write(b"late")
        writer.write_eof()
        await asyncio.wait_for(done.wait(), 10)
        assert heard == [b"late"]
        writer.close()


async def test_a_client_that_does_not_read_holds_its_program_back(daemon: RunningDaemon) -> None:
    async def spew(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while sum(sent) < MORE_THAN_IS_HELD:
                writer.write(bytes(65536))
                async with asyncio.timeout(0.5):
                    await writer.drain()
                sent.append(65536)
        held.set()
        await go_on.wait()
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()

    sent: list[int] = []
    held, go_on = asyncio.Event(), asyncio.Event()
    async with (
        async_sandbox(daemon) as sandbox,
        program(spew) as port,
        sandbox.forward(port) as forward,
    ):
        reader, writer = await asyncio.open_connection(forward.host, forward.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it
        await asyncio.wait_for(held.wait(), 20)
        assert sum(sent) < MORE_THAN_IS_HELD
        go_on.set()
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        got = 0
        while piece := await reader.read(1 << 20):
            got += len(piece)
        assert got == sum(sent) + 65536
        writer.close()


async def test_a_refused_connection_is_reset_and_its_reason_told(daemon: RunningDaemon) -> None:
    told: list[ForkdError] = []
    port = closed_port()
    async with (
        async_sandbox(daemon) as sandbox,
        sandbox.forward(port, on_error=told.append) as forward,
    ):
        reader, writer = await asyncio.open_connection(forward.host, forward.port)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
    assert [type(each) for each in told] == [Conflict]
    assert f"nothing listens on port {port} " in str(told[0])


def test_an_address_that_cannot_be_listened_on_is_named(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict, match=f"port {port} of 127.0.0.1 is in use by process"):
            sandbox.forward(80, host_port=port).__enter__()
    for host, words in (
        ("example.com", "is not an address to listen on"),
        ("192.0.2.1", "cannot listen on 192.0.2.1"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refused:
            sandbox.forward(80, host=host).__enter__()
        assert refused.value.context["field"] == "host"
    with pytest.raises(InvalidRequest, match="host_port must be 0 to 65535, not 65536"):
        sandbox.forward(80, host_port=PORT_MAX + 1).__enter__()

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", denied)
    with pytest.raises(InvalidRequest, match="port 80 needs root on this host"):
        sandbox.forward(80, host_port=80).__enter__()
