"""A client has what its address gives it, and so long; the others notice nothing.

Each test listens on sockets of its own, with limits so small that they are reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.daemon.clients import TCP, UNIX
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from forkd.host import sockets
from tests.support.no_records import no_tokens
from tests.support.raw_http import DEADLINE_S, WEBSOCKET, Answer, RawClient, ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.types import Message, Receive, Scope, Send

SOON_S = 0.05
"""A time that has passed before anybody notices."""

GET = "GET {path} HTTP/1.1\nHost: localhost\n{more}\n"
PUT = "PUT /read HTTP/1.1\nHost: localhost\nContent-Length: {length}\n\n"


class App:
    """Answers by path: `/` at once, `/wait` when told to, `/read` what it read, `/endless`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Queue[str]()
        self.ended = asyncio.Queue[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        self.begun.put_nowait(path)
        try:
            await getattr(self, path.strip("/") or "at_once")(receive, send)
        finally:
            self.ended.put_nowait(path)

    async def at_once(self, _: Receive, send: Send) -> None:
        await answer(send, b"well")

    healthz = at_once

    async def wait(self, _: Receive, send: Send) -> None:
        await self.go.wait()
        await answer(send, b"well")

    async def read(self, receive: Receive, send: Send) -> None:
        await self.go.wait()
        length = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            length += len(message["body"])
            if not message["more_body"]:
                await answer(send, b"%d" % length)
                return

    async def endless(self, _: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})

    async def socket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (await receive())["type"] != "websocket.disconnect":
            pass

    async def endless_socket(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        with contextlib.suppress(OSError):
            while True:
                await send({"type": "websocket.send", "bytes": bytes(65536)})


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    messages: list[Message] = [
        {"type": "http.response.start", "status": 200, "headers": headers},
        {"type": "http.response.body", "body": body, "more_body": False},
    ]
    for each in messages:
        await send(each)


class Daemon:
    """What a test needs: the URL of the Unix socket, that of TCP with its token, and the app."""

    def __init__(self, urls: list[str], token: str, app: App) -> None:
        self.url, self.tcp_url = urls
        self.authorized = f"Authorization: Bearer {token}\n"
        self.app = app


@contextlib.asynccontextmanager
async def served(folder: Path, **limits: Any) -> AsyncIterator[Daemon]:  # noqa: ANN401 - of `ClientLimits`
    app = App()
    settings = Settings(socket=folder / "forkd.sock", bind=Bind("127.0.0.1", 0), state_dir=folder)
    unix, tcp = replace(UNIX, **limits), replace(TCP, **limits)
    async with listening(app, settings, no_tokens(), unix=unix, tcp=tcp) as urls:
        try:
            yield Daemon(urls, (folder / "token").read_text(), app)
        finally:
            app.go.set()


def refused(given: Answer, status: int, code: str) -> str:
    """Return the words of a refusal that is as every error is, and after which it is over."""
    said = given.json()
    assert (given.status, said["code"], given.headers["connection"]) == (status, code, "close")
    return str(said["error"])


@pytest.mark.parametrize("begun", ["", "G", "GET / HTTP/1.1\nHost: loc"])
async def test_a_client_that_does_not_finish_its_first_header_is_told_and_cut(
    tmp_path: Path, begun: str
) -> None:
    async with (
        served(tmp_path, first_header_timeout_s=SOON_S) as daemon,
        RawClient(daemon.url) as client,
    ):
        client.say(begun)

        assert "header" in refused(await client.answer(), 408, "request")
        assert await client.rest() == b""


async def test_a_client_that_does_not_finish_a_later_header_is_told_and_cut(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, header_timeout_s=SOON_S) as daemon, RawClient(daemon.url) as client:
        client.say(GET.format(path="/", more=""))
        assert (await client.answer()).body == b"well"
        client.say("GET / HT")

        assert "header" in refused(await client.answer(), 408, "request")
        assert await client.rest() == b""


async def test_a_client_that_does_not_finish_its_body_is_told_and_its_request_ends(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, body_timeout_s=SOON_S) as daemon, RawClient(daemon.url) as client:
        daemon.app.go.set()
        client.say(PUT.format(length=10) + "01234")

        assert "body" in refused(await client.answer(), 408, "request")
        assert await client.rest() == b""
        assert await daemon.app.ended.get() == "/read"


async def test_a_client_is_not_blamed_when_it_is_we_who_do_not_read(tmp_path: Path) -> None:
    length = 4 << 20  # more than is held on the way
    async with (
        served(tmp_path, body_timeout_s=SOON_S) as daemon,
        RawClient(daemon.url) as patient,
        RawClient(daemon.url) as slow,
    ):
        patient.say(PUT.format(length=length).encode().replace(b"\n", b"\r\n") + bytes(length))
        assert await daemon.app.begun.get() == "/read"
        slow.say(PUT.format(length=10))
        refused(await slow.answer(), 408, "request")  # so the other's time is up, too

        daemon.app.go.set()

        assert (await patient.answer()).body == b"%d" % length


async def test_a_connection_too_many_is_told_when_to_come_back_and_closed(tmp_path: Path) -> None:
    async with (
        served(tmp_path, connections_max=2) as daemon,
        RawClient(daemon.url) as first,
        RawClient(daemon.url),
        RawClient(daemon.url) as c,
    ):
        refusal = await c.answer()
        assert "connections" in refused(refusal, 503, "capacity")
        assert refusal.headers["retry-after"] == "1"
        assert await c.rest() == b""

        first.say(GET.format(path="/", more="Connection: close\n"))
        assert (await first.answer()).body == b"well"
        assert await first.rest() == b""
        assert (await ask(daemon.url, GET.format(path="/", more=""))).status == 200


async def test_who_fills_tcp_leaves_the_unix_socket_as_it_is(tmp_path: Path) -> None:
    async with (
        served(tmp_path, connections_max=2) as daemon,
        RawClient(daemon.tcp_url),
        RawClient(daemon.tcp_url),
    ):
        refused(await ask(daemon.tcp_url, ""), 503, "capacity")

        assert (await ask(daemon.url, GET.format(path="/", more=""))).body == b"well"


async def test_a_request_too_many_is_told_when_to_come_back(tmp_path: Path) -> None:
    wait = GET.format(path="/wait", more="")
    async with served(tmp_path, requests_max=1) as daemon, RawClient(daemon.url) as first:
        first.say(wait)
        assert await daemon.app.begun.get() == "/wait"

        refusal = await ask(daemon.url, wait)
        health = await ask(daemon.url, GET.format(path="/healthz", more=""))
        over_tcp = await ask(daemon.tcp_url, GET.format(path="/", more=daemon.authorized))
        daemon.app.go.set()

        assert "requests" in refused(refusal, 503, "capacity")
        assert refusal.headers["retry-after"] == "1"
        assert (health.status, over_tcp.status) == (200, 200)
        assert (await first.answer()).body == b"well"
        assert (await ask(daemon.url, wait)).body == b"well"


async def test_requests_without_a_token_take_nothing_from_those_who_have_it(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, requests_max=0) as daemon:
        denied = await ask(daemon.tcp_url, GET.format(path="/", more=""))

    assert (denied.status, denied.json()["code"]) == (401, "denied")


async def test_a_websocket_too_many_is_refused_and_takes_no_request(tmp_path: Path) -> None:
    handshake = WEBSOCKET.format(path="/socket", more="")
    async with served(tmp_path, websockets_max=1) as daemon, RawClient(daemon.url) as first:
        first.say(handshake)
        assert (await first.answer()).status == 101

        refusal = await ask(daemon.url, handshake)

        assert "WebSockets" in refused(refusal, 503, "capacity")
        assert (await ask(daemon.url, GET.format(path="/", more=""))).status == 200


async def test_descriptors_are_kept_that_no_client_can_take(tmp_path: Path) -> None:
    lowest = os.dup(0)
    os.close(lowest)
    bound = lowest + 32
    share = (bound + 0.5) / sockets.descriptors_max()
    async with served(tmp_path, descriptors_share_max=share) as daemon:
        async with RawClient(daemon.url) as client:
            client.say(GET.format(path="/", more="Connection: close\n"))
            assert (await client.answer()).status == 200
            assert await client.rest() == b""
        with contextlib.ExitStack() as taken:
            while (number := os.dup(0)) < bound:
                taken.callback(os.close, number)
            taken.callback(os.close, number)

            assert "connections" in refused(await ask(daemon.url, ""), 503, "capacity")
        assert (await ask(daemon.url, GET.format(path="/", more=""))).status == 200


async def test_a_stream_that_is_not_read_breaks_off_and_its_request_ends(tmp_path: Path) -> None:
    async with served(tmp_path, read_timeout_s=SOON_S) as daemon, RawClient(daemon.url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it
        client.say(GET.format(path="/endless", more=""))

        async with asyncio.timeout(DEADLINE_S):
            assert await daemon.app.ended.get() == "/endless"

        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        assert not (await client.rest()).endswith(b"0\r\n\r\n")


async def test_a_websocket_that_is_not_read_is_closed_with_a_reason(tmp_path: Path) -> None:
    limits = {"read_timeout_s": SOON_S, "linger_timeout_s": DEADLINE_S}
    async with served(tmp_path, **limits) as daemon, RawClient(daemon.url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it
        client.say(WEBSOCKET.format(path="/endless_socket", more=""))

        async with asyncio.timeout(DEADLINE_S):
            assert await daemon.app.ended.get() == "/endless_socket"

        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        reason = b"nothing was read for 0.05 s"
        closing = bytes([0x88, 2 + len(reason)]) + struct.pack("!H", 1008) + reason
        assert (await client.rest()).endswith(closing)


async def test_a_websocket_that_is_never_read_is_cut_off(tmp_path: Path) -> None:
    limits = {"read_timeout_s": SOON_S, "linger_timeout_s": SOON_S}
    async with served(tmp_path, **limits) as daemon, RawClient(daemon.url) as client:
        async with RawClient(daemon.url) as later:
            for each in (client, later):
                each.writer.transport.pause_reading()  # type: ignore[attr-defined]  # as above
                each.say(WEBSOCKET.format(path="/endless_socket", more=""))
                # The other's time begins when this one's is over, so it ends after this is cut off.
                async with asyncio.timeout(DEADLINE_S):
                    assert await daemon.app.ended.get() == "/endless_socket"

        client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above
        assert b"nothing was read" not in (await client.rest())[-64:]


async def test_strangers_of_one_address_lock_nobody_out(tmp_path: Path) -> None:
    async with (
        served(tmp_path, strangers_max=2, connections_max=4) as daemon,
        RawClient(daemon.tcp_url) as known,
        RawClient(daemon.tcp_url),
    ):
        known.say(GET.format(path="/", more=daemon.authorized))
        assert (await known.answer()).body == b"well"  # and so it is no stranger any more
        async with RawClient(daemon.tcp_url):
            refusal = refused(await ask(daemon.tcp_url, ""), 503, "capacity")
            assert "without a token from this address" in refusal

            known.say(GET.format(path="/", more=daemon.authorized))
            assert (await known.answer()).body == b"well"
            assert (await ask(daemon.url, GET.format(path="/", more=""))).status == 200
        again = await ask(daemon.tcp_url, GET.format(path="/", more=daemon.authorized))
        assert again.status == 200


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [("/healthz", "", 200), ("/", "", 401), ("/", "Origin: http://evil.example\n", 403)],
)
async def test_who_has_shown_no_token_keeps_no_connection(
    tmp_path: Path, path: str, more: str, status: int
) -> None:
    async with served(tmp_path) as daemon, RawClient(daemon.tcp_url) as stranger:
        stranger.say(GET.format(path=path, more=more))
        given = await stranger.answer()

        assert (given.status, given.headers["connection"]) == (status, "close")
        assert await stranger.rest() == b""


async def test_a_websocket_is_counted_until_its_connection_ends(tmp_path: Path) -> None:
    async with served(tmp_path, strangers_max=1, connections_max=2) as daemon:
        for _ in range(3):
            async with RawClient(daemon.tcp_url) as client:
                client.say(WEBSOCKET.format(path="/socket", more=daemon.authorized))
                assert (await client.answer()).status == 101
                other = await ask(daemon.tcp_url, GET.format(path="/", more=daemon.authorized))
                assert other.status == 200
                client.writer.close()
                assert await daemon.app.begun.get() == "/socket"
                assert await daemon.app.begun.get() == "/"
                assert {await daemon.app.ended.get(), await daemon.app.ended.get()} == {
                    "/",
                    "/socket",
                }
