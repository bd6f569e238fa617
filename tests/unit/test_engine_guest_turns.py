"""Evaluations of one guest take turns, and whoever waits too long, or with too many, is told so."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.errors import render
from forkd.engine import guest as engine_guest
from forkd.engine.frames import FrameDecoder, Kind, encode_json
from forkd.engine.guest import Guest
from forkd.errors import Busy, Conflict, EngineTimeout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.model.exec import EvalResult

VALUE = {"has_value": True, "repr": "1", "value": 1, "value_is_json": True}


UNKNOWN = {"code": "invalid_request", "message": "unknown field `runtime`", "field": "runtime"}


class OneByOne:
    """An agent that answers an evaluation when it is told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.began = asyncio.Condition()
        self.go = asyncio.Event()
        self.serving: list[asyncio.Event] = []
        self.old = False  # it knows no names of runtimes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.serving.append(served := asyncio.Event())
        await reader.readline()
        writer.write(b"OK 1024\n")
        decoder = FrameDecoder()
        while data := await reader.read(4096):
            for frame in decoder.feed(data):
                async with self.began:
                    self.begun.append(str(frame.members()["code"]))
                    self.began.notify_all()
                await self.go.wait()
                if self.old and "runtime" in frame.members():
                    writer.write(encode_json(Kind.ERROR, UNKNOWN))
                    continue
                writer.write(encode_json(Kind.REPLY, VALUE))
        writer.close()
        served.set()

    async def has_begun(self, *codes: str) -> None:
        """Wait until just these were begun."""
        async with self.began, asyncio.timeout(10):
            await self.began.wait_for(lambda: self.begun == list(codes))


@asynccontextmanager
async def guest_of(agent: OneByOne, folder: Path) -> AsyncIterator[Guest]:
    path = folder / "vsock.sock"
    async with await asyncio.start_unix_server(agent.serve, path):
        guest = Guest(path)
        yield guest
        agent.go.set()
        guest.close()
        await asyncio.gather(*(served.wait() for served in agent.serving))


async def begun(agent: OneByOne, guest: Guest) -> asyncio.Task[EvalResult]:
    """Return an evaluation that runs until the agent may go on."""
    first = asyncio.create_task(guest.eval("first", timeout_s=60))
    await agent.has_begun("first")
    return first


async def test_time_spent_waiting_is_not_an_evaluations_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guest, "GRACE_S", 0.05)
    agent = OneByOne()
    async with guest_of(agent, tmp_path) as guest:
        first = await begun(agent, guest)
        second = asyncio.create_task(guest.eval("second", timeout_s=5))
        hasty = asyncio.create_task(guest.eval("hasty", timeout_s=0.05))

        done, _ = await asyncio.wait({second, hasty}, timeout=0.3)
        assert (done, agent.begun) == (set(), ["first"])
        agent.go.set()

        assert [each.value for each in await asyncio.gather(first, second, hasty)] == [1, 1, 1]
        assert agent.begun == ["first", "second", "hasty"]


async def test_an_agent_that_knows_python_alone_runs_python(tmp_path: Path) -> None:
    agent = OneByOne()
    agent.old = True
    agent.go.set()
    async with guest_of(agent, tmp_path) as guest:
        result = await guest.eval("here", timeout_s=5, runtime="python")
        assert result.value == 1
        with pytest.raises(Conflict, match="too old for this"):
            await guest.eval("not here", timeout_s=5, runtime="node")
    assert agent.begun == ["here", "here", "not here"]


async def test_an_evaluation_that_never_ends_has_its_own_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guest, "GRACE_S", 0.05)
    agent = OneByOne()
    async with guest_of(agent, tmp_path) as guest:
        with pytest.raises(EngineTimeout):
            await guest.eval("never", timeout_s=0.05)

        # Whoever comes next has the turn all the same.
        next_one = asyncio.create_task(guest.eval("next", timeout_s=5))
        await agent.has_begun("never", "next")
        agent.go.set()
        assert (await next_one).value == 1


async def test_so_many_may_wait_and_one_more_is_told_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guest, "EVAL_WAITING_MAX", 2)
    agent = OneByOne()
    async with guest_of(agent, tmp_path) as guest:
        first = await begun(agent, guest)
        waiting = [asyncio.create_task(guest.eval(code, timeout_s=5)) for code in ("a", "b")]
        await asyncio.sleep(0)  # both have asked

        with pytest.raises(Busy, match=r"2 evaluations wait already.*did not run") as refused:
            await guest.eval("one more", timeout_s=5)
        waiting.pop().cancel()
        await asyncio.sleep(0)  # whoever leaves gives the place back
        later = asyncio.create_task(guest.eval("later", timeout_s=5))
        agent.go.set()

        await asyncio.gather(first, *waiting, later)
        assert agent.begun == ["first", "a", "later"]
    answered = render(refused.value)
    assert (refused.value.retryable, answered.status_code) == (True, 503)
    assert answered.headers["Retry-After"] == "1"


async def test_who_waits_too_long_is_told_that_the_code_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_guest, "EVAL_WAIT_S_MAX", 0.05)
    agent = OneByOne()
    async with guest_of(agent, tmp_path) as guest:
        first = await begun(agent, guest)

        with pytest.raises(Busy, match="did not run"):
            await guest.eval("second", timeout_s=5)
        agent.go.set()

        await first
        assert agent.begun == ["first"]


async def test_an_agent_with_too_many_connections_is_busy_and_not_gone(tmp_path: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        said = encode_json(Kind.ERROR, {"code": "busy", "message": "512 connections are open"})
        writer.write(b"OK 1024\n" + said)
        writer.close()

    path = tmp_path / "vsock.sock"
    async with await asyncio.start_unix_server(refuse, path):
        for _ in range(20):  # before or after the request is sent
            with pytest.raises(Busy, match="512 connections"):
                await Guest(path).echo("x")
