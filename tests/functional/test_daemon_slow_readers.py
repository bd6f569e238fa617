"""A client that does not read is cut off with an error, and what wrote for it ends.

The daemon serves the fake VMM's host over a real socket, with a time to read that soon is over.
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.clients import UNIX
from forkd.limits import OUTPUTS_BYTES_MAX
from forkd.wire.v2 import Kind
from tests.support.raw_http import DEADLINE_S, WEBSOCKET, RawClient
from tests.support.served_host import REQUEST, Served, descriptors, served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

LIMITS = replace(UNIX, read_timeout_s=0.1, linger_timeout_s=DEADLINE_S)

MORE_THAN_SOCKETS_HOLD = 8 << 20


@contextlib.asynccontextmanager
async def daemon(fake_host: FakeHost) -> AsyncIterator[tuple[Served, str]]:
    """Serve one sandbox; nothing is left of it, and no output is kept any more."""
    async with served_host(fake_host, limits=LIMITS) as served:
        (sandbox,) = await served.fork()
        yield served, f"/v2/sandboxes/{sandbox}"
        await served.http.delete(f"/v2/sandboxes/{sandbox}")
        await until(lambda: served.app.state.outputs.free_bytes == OUTPUTS_BYTES_MAX)
        assert fake_host.left_over() == []


def stop_reading(client: RawClient) -> None:
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it


def read_again(client: RawClient) -> None:
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]  # as above


async def test_the_program_of_a_websocket_is_ended_and_its_client_told(
    fake_host: FakeHost,
) -> None:
    async with daemon(fake_host) as (served, sandbox), RawClient(served.url) as client:
        client.say(WEBSOCKET.format(path=f"{sandbox}/exec/stream", more=""))
        assert (await client.answer()).status == 101
        stop_reading(client)
        client.say(frame(bytes([Kind.REQUEST]) + json.dumps({"args": ["spew"]}).encode()))

        await until(lambda: "spew ended" in served.console(sandbox.rpartition("/")[2]))

        read_again(client)
        reason = b"nothing was read for 0.1 s"
        closing = bytes([0x88, 2 + len(reason)]) + struct.pack("!H", 1008) + reason
        assert (await client.rest()).endswith(closing)


def frame(message: bytes) -> bytes:
    """Return a short binary frame as clients send it, masked with nothing."""
    return bytes([0x82, 0x80 | len(message)]) + bytes(4) + message


async def test_a_follower_of_a_log_is_cut_off(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as (served, sandbox):
        before = descriptors()
        path = fake_host.settings.sandboxes_dir / sandbox.rpartition("/")[2] / "console.log"
        async with RawClient(served.url) as client:
            stop_reading(client)
            client.say(get(f"{sandbox}/logs?follow=true"))
            await until(lambda: descriptors() > before + 1)
            with path.open("ab") as console:
                console.write(b"x" * MORE_THAN_SOCKETS_HOLD)

            await until(lambda: descriptors() <= before + 1)

            read_again(client)
            assert broken_off(await client.rest())


async def test_who_does_not_read_a_file_keeps_no_connection_to_the_guest(
    fake_host: FakeHost,
) -> None:
    async with daemon(fake_host) as (served, sandbox):
        path = f"{sandbox}/files?path=/big"
        await served.http.put(path, content=bytes(MORE_THAN_SOCKETS_HOLD))
        before = descriptors()
        async with RawClient(served.url) as client:
            stop_reading(client)
            client.say(get(path))
            await until(lambda: descriptors() > before + 1)

            await until(
                lambda: descriptors() <= before
            )  # that to the guest was kept from the upload

            read_again(client)
            assert broken_off(await client.rest())


async def test_an_output_that_is_not_read_is_kept_no_longer(fake_host: FakeHost) -> None:
    async with daemon(fake_host) as (served, sandbox), RawClient(served.url) as client:
        outputs = served.app.state.outputs
        stop_reading(client)
        body = json.dumps({"args": ["cat"], "stdin": "x" * 500_000}).encode()
        more = f"Content-Length: {len(body)}\r\n\r\n"
        head = REQUEST.format(method="POST", path=f"{sandbox}/exec", more=more)
        client.say(head.encode() + body)
        await until(lambda: outputs.free_bytes < OUTPUTS_BYTES_MAX - 400_000)

        await until(lambda: outputs.free_bytes == OUTPUTS_BYTES_MAX)

        read_again(client)
        assert broken_off(await client.rest())


def get(path: str) -> bytes:
    return REQUEST.format(method="GET", path=path, more="\r\n").encode()


def broken_off(answer: bytes) -> bool:
    """Whether an answer began and lacks its last chunk."""
    return answer.startswith(b"HTTP/1.1 200") and not answer.endswith(b"0\r\n\r\n")
