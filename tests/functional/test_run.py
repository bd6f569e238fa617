"""`forkd run` against a whole daemon over the fake VMM: however it ends, no sandbox is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.served_host import served_host
from tests.support.service_host import until

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost

TTL_S = 3.0
"""Time to live of a sandbox whose `forkd run` is gone."""


@contextlib.asynccontextmanager
async def running(host: FakeHost, *args: str) -> AsyncIterator[tuple[Served, Process]]:
    """Run a command, and go on once it has answered; then no sandbox may be left."""
    host = replace(host, settings=replace(host.settings, sandbox_ttl_s=TTL_S))
    async with served_host(host) as served:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forkd", "run", "python", "--", *args),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "FORKD_URL": served.url},
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"hello\n")
            assert await process.stdout.readexactly(6) == b"hello\n"
            assert len(await served.sandboxes()) == 1
            yield served, process
            await until(lambda: host.left_over() == [])
            assert await served.sandboxes() == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


async def only(served: Served) -> dict[str, Any]:
    """Return the one sandbox that there is."""
    (found,) = (await served.http.get("/v2/sandboxes")).json()
    return dict(found)


async def test_a_sandbox_lives_while_its_run_does_and_ends_when_that_is_killed(
    fake_host: FakeHost,
) -> None:
    async with running(fake_host, "cat") as (served, process):
        first = await only(served)
        now = first
        while now["expires_at_unix"] == first["expires_at_unix"]:
            await asyncio.sleep(0.05)
            now = await only(served)

        process.kill()
        while now["exit_reason"] is None:
            await asyncio.sleep(0.05)
            now = await only(served)
        assert (now["status"], now["exit_reason"]) == ("exited", "ttl")
        await served.http.delete(f"/v2/sandboxes/{now['id']}")


async def test_a_run_ends_with_its_program(fake_host: FakeHost) -> None:
    async with running(fake_host, "cat") as (_, process):
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0


async def test_a_run_that_gets_a_signal_passes_it_on_and_removes_its_sandbox(
    fake_host: FakeHost,
) -> None:
    async with running(fake_host, "cat") as (served, process):
        process.terminate()
        assert await process.wait() == 128 + signal.SIGTERM
        assert await served.sandboxes() == []
