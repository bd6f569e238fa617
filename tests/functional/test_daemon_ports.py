"""Programs that listen in a guest are reached through a daemon, over real sockets.

The fake VMM's agent connects to ports of this host, where these tests listen.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from websockets.asyncio.client import unix_connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus

from forkd.daemon.clients import UNIX
from forkd.errors import CapacityError
from forkd.limits import PORT_CONNECTIONS_MAX, PORT_CONNECTIONS_PER_SANDBOX_MAX
from forkd.model.ids import parse_sandbox_id
from tests.support.callers import CALLER
from tests.support.served_host import Served, served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.client import connect as Connection  # noqa: N812 - a class

    from tests.support.service_host import FakeHost

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = pytest.mark.timeout(60)

LIMITS = replace(UNIX, read_timeout_s=0.5)

MORE_THAN_IS_HELD = 64 << 20
"""Far more than sockets, frames and messages between a program and its client hold."""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say what is said, piece by piece, until it ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def program(serve: Serve) -> AsyncIterator[int]:
    """Have a program listen within the block, which gets its port."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def daemon(host: FakeHost) -> AsyncIterator[tuple[Served, str]]:
    """Serve one sandbox; nothing is left of it, nor of connections to it."""
    async with served_host(host, limits=LIMITS) as served:
        (sandbox,) = await served.fork()
        yield served, sandbox
        await until(lambda: served.service.guests.ports.used == 0)
        await served.http.delete(f"/v2/sandboxes/{sandbox}")
        assert host.left_over() == []


def connect(served: Served, sandbox: str, port: object) -> Connection:
    path = f"ws://forkd/v2/sandboxes/{sandbox}/ports/{port}"
    return unix_connect(served.url.removeprefix("unix://"), path, compression=None)


async def status(served: Served, sandbox: str, port: object) -> tuple[int, str]:
    """Return what refuses a connection."""
    with pytest.raises(InvalidStatus) as refused:
        await connect(served, sandbox, port)
    return refused.value.response.status_code, (refused.value.response.body or b"").decode()


async def broken(socket: ClientConnection) -> tuple[int, str]:
    """Return with what the daemon closes a connection, after whatever else it sends."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()
    await socket.wait_closed()
    return socket.close_code or 0, socket.close_reason or ""


async def all_of(socket: ClientConnection) -> bytes:
    """Return what comes until the empty message."""
    data = b""
    while piece := await socket.recv(decode=False):
        data += piece
    return data


async def test_each_direction_ends_by_itself(fake_host: FakeHost) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1) == b"?":  # the client ends first
            writer.write(await reader.read())
            writer.close()
        else:  # the program ends first
            writer.write(b"hello")
            writer.write_eof()
            heard.append(await reader.read())
            writer.close()

    heard: list[bytes] = []
    async with daemon(fake_host) as (served, sandbox), program(serve) as port:
        async with connect(served, sandbox, port) as socket:
            await socket.send(b"?" + b"x" * 300_000)
            await socket.send(b"")
            assert await all_of(socket) == b"x" * 300_000
            with pytest.raises(ConnectionClosedOK):
                await socket.recv()
        async with connect(served, sandbox, port) as socket:
            await socket.send(b"!")
            assert await all_of(socket) == b"hello"
            await socket.send(b"late")
            await socket.send(b"")
            with pytest.raises(ConnectionClosedOK):
                await socket.recv()
        assert heard == [b"late"]


async def test_what_cannot_be_connected_is_refused_before_the_websocket_begins(
    fake_host: FakeHost,
) -> None:
    async with program(echo) as closed:
        pass
    async with daemon(fake_host) as (served, sandbox), program(echo) as port:
        code, said = await status(served, sandbox, closed)
        assert (code, '"conflict"' in said) == (409, True)
        assert f"nothing listens on port {closed} " in said
        for wrong in (0, 65_536, "http", "-1", "9" * 40):
            code, said = await status(served, sandbox, wrong)
            assert (code, '"field":"port"' in said.replace(" ", "")) == (400, True), said
        unknown = await status(served, "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa", port)
        await served.http.post(f"/v2/sandboxes/{sandbox}/pause")
        paused = await status(served, sandbox, port)
        await served.http.post(f"/v2/sandboxes/{sandbox}/resume")
        assert unknown[0] == 404
        assert (paused[0], "is paused: resume it first" in paused[1]) == (409, True)


async def test_a_message_that_is_text_or_comes_after_the_end_breaks_the_connection(
    fake_host: FakeHost,
) -> None:
    async with daemon(fake_host) as (served, sandbox), program(echo) as port:
        for sent, reason in (
            ("text", "messages are binary"),
            (b"late", "the end of what is sent was sent already"),
        ):
            async with connect(served, sandbox, port) as socket:
                if sent == b"late":
                    await socket.send(b"")
                await socket.send(sent)
                assert await broken(socket) == (1008, reason)


async def test_a_client_that_goes_resets_the_programs_connection(fake_host: FakeHost) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.readexactly(4))
        try:
            await reader.read()
        except ConnectionResetError:
            reset.set()
        writer.close()

    said: list[bytes] = []
    reset = asyncio.Event()
    async with daemon(fake_host) as (served, sandbox), program(serve) as port:
        async with connect(served, sandbox, port) as socket:
            await socket.send(b"half")
        await asyncio.wait_for(reset.wait(), 10)
        assert said == [b"half"]


async def test_a_sandbox_that_ends_ends_its_connections_and_says_why(fake_host: FakeHost) -> None:
    async with served_host(fake_host) as served, program(echo) as port:
        (sandbox,) = await served.fork()
        async with connect(served, sandbox, port) as socket:
            await socket.send(b"begun")
            assert await socket.recv(decode=False) == b"begun"

            await served.http.delete(f"/v2/sandboxes/{sandbox}")

            code, reason = await broken(socket)
        assert (code, sandbox in reason) == (1008, True), reason
        assert served.service.guests.ports.used == 0


async def test_a_client_that_does_not_read_holds_its_program_back_until_it_is_cut_off(
    fake_host: FakeHost,
) -> None:
    async def spew(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while sent[0] < MORE_THAN_IS_HELD:
                writer.write(bytes(65536))
                await writer.drain()
                sent[0] += 65536
        ended.set()
        writer.close()

    sent, ended = [0], asyncio.Event()
    async with (
        daemon(fake_host) as (served, sandbox),
        program(spew) as port,
        connect(served, sandbox, port) as socket,
    ):
        socket.transport.pause_reading()
        await asyncio.wait_for(ended.wait(), 30)
        assert sent[0] < MORE_THAN_IS_HELD
        socket.transport.abort()


async def test_a_program_that_does_not_read_holds_its_client_back(fake_host: FakeHost) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it
        await go_on.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        heard.append(len(await reader.read()))
        writer.close()

    async def fill() -> None:
        while sum(sent) < MORE_THAN_IS_HELD:
            await socket.send(bytes(65536))
            sent.append(65536)

    heard: list[int] = []
    sent: list[int] = []
    go_on = asyncio.Event()
    async with daemon(fake_host) as (served, sandbox), program(serve) as port:
        async with connect(served, sandbox, port) as socket:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(fill(), 0.5)
            go_on.set()
            await socket.send(b"")
            await all_of(socket)
        assert heard[0] >= sum(sent)


async def test_one_connection_more_than_a_sandbox_may_have_is_refused_until_one_ends(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.service.guests.PORT_CONNECTIONS_PER_SANDBOX_MAX", 2)
    async with daemon(fake_host) as (served, sandbox), program(echo) as port:
        (other,) = await served.fork()
        async with connect(served, sandbox, port), contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(connect(served, sandbox, port))
            code, said = await status(served, sandbox, port)
            assert (code, '"busy"' in said, "may have no more" in said) == (503, True, True)
            async with connect(served, other, port):
                pass
            await stack.aclose()
            await until(lambda: served.service.guests.ports.used == 1)
            async with connect(served, sandbox, port):
                pass
        await served.http.delete(f"/v2/sandboxes/{other}")


async def test_one_connection_more_than_a_host_may_have_is_refused(fake_host: FakeHost) -> None:
    assert PORT_CONNECTIONS_PER_SANDBOX_MAX < 512, "what an agent serves at most"
    async with daemon(fake_host) as (served, sandbox), program(echo) as port:
        guests, sandbox_id = served.service.guests, parse_sandbox_id(sandbox)
        with contextlib.ExitStack() as others:
            for _ in range(PORT_CONNECTIONS_MAX - 1):
                others.enter_context(guests.ports.take(CALLER))
            async with await guests.connect(CALLER, sandbox_id, port):
                with pytest.raises(CapacityError, match="one more of connections to ports"):
                    await guests.connect(CALLER, sandbox_id, port)
