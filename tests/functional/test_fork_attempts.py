"""A fork whose guest is reset before its agent answers is made again, and no other is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.configs import ChildConfig
from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET, VSOCK_SOCKET, ZYGOTE_SOCKET, end_listener
from forkd.engine.replies import ChildFailed, ChildReady
from tests.support.real_host import REAL
from tests.support.vmm_bench import FORK_DEADLINE_S, bench_of, identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.real_host import RealHost
    from tests.support.vmm_bench import Bench

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PORT = 7777

RESET, POWER_OFF, GO_ON = b"b", b"o", b"-"
"""What the hook of a child is told; the first two are what Linux' magic key does."""

HOOK = f"""
import socket, threading
with socket.socket(socket.AF_VSOCK) as host:
    host.connect((2, {PORT}))
    told = host.recv(1)
if told != {GO_ON!r}:
    with open("/proc/sysrq-trigger", "wb") as key:
        key.write(told)
    threading.Event().wait()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(real_host: RealHost) -> AsyncIterator[Bench]:
    async with bench_of(real_host) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seed(bench: Bench) -> AsyncIterator[Path]:
    """The seed of a machine, the hook of whose forks asks the host what to do."""
    async with bench.forked(bench.root) as (source,):
        with source.guest() as guest:
            await guest.ask("configure", {"post_fork": HOOK})
        async with bench.branched(source) as (folder, _):
            yield folder


async def forked(
    seed: Path, directory: Path, told: list[bytes]
) -> tuple[ChildReady | ChildFailed, int]:
    """Fork a child, each attempt of which is told the next of `told`; and how many were not."""
    left = list(told)

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))
        await writer.drain()
        writer.close()

    outcomes: list[ChildReady | ChildFailed] = []
    child = ChildConfig("sb-a", directory, identity("a"))
    host = await asyncio.start_unix_server(tell, directory / f"{VSOCK_SOCKET}_{PORT}")
    async with host, await Control.connect(seed / ZYGOTE_SOCKET) as control:
        await control.fork([child], deadline_s=FORK_DEADLINE_S, on_outcome=outcomes.append)
    (directory / f"{VSOCK_SOCKET}_{PORT}").unlink(missing_ok=True)
    (outcome,) = outcomes
    return outcome, len(left)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.soak(only=True)
async def test_a_child_whose_guest_is_reset_is_forked_again_and_says_so(
    bench: Bench, seed: Path
) -> None:
    folder = bench.folder()
    try:
        ready, _ = await forked(seed, folder, [RESET, GO_ON])

        assert isinstance(ready, ChildReady)
        assert ready.attempts == 2
        assert "Resetting" in (folder / "console.log.attempt-1").read_text()
    finally:
        await end_listener(folder / CONTROL_SOCKET)


@pytest.mark.soak(only=True)
async def test_a_child_whose_guest_is_reset_each_time_has_failed_and_leaves_nothing(
    bench: Bench, seed: Path
) -> None:
    folder = bench.folder()

    failed, untold = await forked(seed, folder, [RESET] * 4)

    assert isinstance(failed, ChildFailed)
    assert (failed.stage, failed.attempts, untold) == ("agent", 3, 1)
    assert "the guest reset itself" in failed.message
    assert names_in(folder) == set()


async def test_a_child_whose_guest_powers_off_is_not_forked_again(bench: Bench, seed: Path) -> None:
    folder = bench.folder()

    failed, untold = await forked(seed, folder, [POWER_OFF, GO_ON])

    assert isinstance(failed, ChildFailed)
    assert (failed.stage, failed.attempts, untold) == ("agent", 1, 1)
    assert names_in(folder) == set()
