"""Whatever is said where an agent should be is an answer or one clear error, in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from typing import TYPE_CHECKING

import pytest

from forkd.engine.frames import FRAME_PAYLOAD_MAX, Kind, encode
from forkd.engine.guest import Guest
from forkd.engine.guest_bake import WarmUpPlan, warm
from forkd.engine.guest_exec import GuestExec
from forkd.errors import EngineError, EngineTimeout, ForkdError
from forkd.limits import EVAL_OUTPUT_BYTES_MAX
from forkd.model.exec import ExecRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

GREETING = b"OK 1024\n"
PING = {"version": "0", "pid": 1, "uptime_s": 1.0, "runtime": "ready"}


def reply(text: str | bytes) -> bytes:
    payload = text.encode() if isinstance(text, str) else text
    return encode(Kind.REPLY, payload)


def pong(name: str, value: str) -> bytes:
    members = {**PING, name: "HERE"}
    return reply(json.dumps(members).replace('"HERE"', value))


@contextlib.asynccontextmanager
async def agent(folder: Path, answer: bytes, *, endless: bool = False) -> AsyncIterator[Guest]:
    """Serve `answer` to whoever connects, again and again if it is endless."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(answer)
            while endless:
                await writer.drain()
                writer.write(answer.removeprefix(GREETING))
            while await reader.read(4096):
                pass
        except OSError:
            pass  # nobody listens any more
        finally:
            writer.transport.abort()
            gone.set()

    gone = asyncio.Event()

    server = await asyncio.start_unix_server(serve, folder / "vsock.sock")
    guest = Guest(folder / "vsock.sock")
    try:
        yield guest
    finally:
        guest.close()
        server.close()
        await gone.wait()


@pytest.mark.parametrize(
    "said",
    [
        b"NO\n",
        b"x" * 1000,
        b"\xff\n",
        GREETING + struct.pack("<IB3s", FRAME_PAYLOAD_MAX + 1, 2, bytes(3)),
        GREETING + struct.pack("<IB3s", 0xFFFF_FFFF, 2, bytes(3)),
        GREETING + struct.pack("<IB3s", 1, 99, bytes(3)) + b"x",
        GREETING + struct.pack("<IB3s", 1, 2, b"abc") + b"x",
        GREETING + encode(Kind.STDOUT, b"not asked for"),
        GREETING + reply("[]"),
        GREETING + reply("{"),
        GREETING + reply(b"\xff\xfe{}"),
        GREETING + reply("[" * (FRAME_PAYLOAD_MAX - 8)),
        GREETING + reply('{"a":' * 100_000),
        GREETING + pong("uptime_s", "9" * 10_000),
        GREETING + pong("uptime_s", "NaN"),
        GREETING + pong("pid", "Infinity"),
        GREETING + pong("pid", "1e999"),
        GREETING + pong("pid", '"1"'),
        GREETING + pong("runtime", '"rooted"'),
        GREETING + encode(Kind.ERROR, b"{}"),
        GREETING + encode(Kind.ERROR, b'{"code": {}, "message": []}'),
    ],
    ids=lambda said: said[:12].hex(),
)
async def test_what_is_no_answer_is_an_error_of_ours(said: bytes, tmp_path: Path) -> None:
    async with agent(tmp_path, said) as guest, asyncio.timeout(20):
        with pytest.raises(ForkdError) as caught:
            await guest.ping()

    assert not isinstance(caught.value, EngineTimeout)
    assert len(str(caught.value)) < 1000


async def test_half_an_answer_ends_with_the_deadline(tmp_path: Path) -> None:
    async with agent(tmp_path, GREETING + reply('{"data": "x"}')[:-1]) as guest:
        with pytest.raises(EngineTimeout):
            await guest.ask("echo", timeout_s=0.2)


async def test_text_that_cannot_be_said_on_is_replaced(tmp_path: Path) -> None:
    async with agent(tmp_path, GREETING + reply(r'{"data": "a\ud800b\u00e9"}')) as guest:
        assert await guest.echo("") == "a?bé"


async def test_output_without_an_end_is_kept_up_to_its_limit_and_ends_with_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("guest", "guest_bake"):
        monkeypatch.setattr(f"forkd.engine.{module}.GRACE_S", 0.5)
    kept = 0

    def note(data: bytes) -> None:
        nonlocal kept
        kept += len(data)

    flood = GREETING + encode(Kind.STDOUT, bytes(FRAME_PAYLOAD_MAX))
    async with agent(tmp_path, flood, endless=True) as guest:
        with pytest.raises(EngineTimeout):
            await guest.eval("1", 0.5)
        with pytest.raises(EngineTimeout):
            await warm(guest, WarmUpPlan(None, "", None, 0.5), note)
    assert kept > EVAL_OUTPUT_BYTES_MAX


async def test_a_command_that_never_starts_or_starts_twice_is_an_error(tmp_path: Path) -> None:
    started = encode(Kind.EVENT, b'{"event": "started", "pid": 7}')

    async def run(guest: Guest) -> None:
        async with await GuestExec.start(guest, ExecRequest(("true",))) as running:
            async for _ in running:
                pass

    for said in (encode(Kind.EVENT, b'{"event": "started"}'), reply("{}"), started + started):
        async with agent(tmp_path, GREETING + said) as guest, asyncio.timeout(20):
            with pytest.raises(EngineError):
                await run(guest)
