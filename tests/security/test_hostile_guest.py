"""A guest that attacks every device of its machine harms nobody: neither host, nor siblings.

`tests/guest/hostile.py` takes the devices away from the guest's drivers, and does with them what
comes out of its dice, on all processors at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET, LOG_FILE, log_tail
from forkd.errors import EngineExited
from forkd.model.sandbox import ForkOptions, SandboxState
from tests.support.callers import CALLER
from tests.support.real_host import (
    BAKES_LARGE,
    LARGE_VCPUS,
    REAL_IN_SOAK,
    baked_host,
    large,
    value,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.engine.replies import Metrics
    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [*REAL_IN_SOAK, BAKES_LARGE, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[1] / "guest" / "hostile.py"

GUEST_PATH = "/opt/hostile.py"

ATTACK_S, SOAK_ATTACK_S = 10, 60
"""How long each guest attacks."""

ROUNDS, SOAK_ROUNDS = 2, 60
"""How many do, one after the other: in a soak for an hour."""

EXITS_MIN = 1_000
"""So often at least a round comes to a device of ours."""

ORDERLY = (
    "the guest powered off",
    "the guest halted",
    "the guest reset itself",
    "the guest's kernel panicked",
    "its agent was killed",
    "the guest's processor gave up (triple fault)",
)
"""How a machine may end whose guest attacks it; what devices write may hit the guest's kernel."""

START = """
import subprocess
command = ["python3", {path!r}, {seed!r}, {seconds!r}, {workers!r}]
subprocess.Popen(command, start_new_session=True).pid
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(bakes: Bakes, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealHost]:
    recipe = large(tmp_path_factory.mktemp("recipe") / "large")
    async with baked_host(bakes, recipe) as made:
        yield made


async def start(host: RealHost, sandbox: Sandbox, seed: int, seconds: int) -> None:
    """Have a sandbox attack its machine; its agent is not heard of any more."""

    async def pieces() -> AsyncIterator[bytes]:
        yield PROGRAM.read_bytes()

    await host.service.guests.write_file(CALLER, sandbox.id, GUEST_PATH, pieces())
    code = START.format(
        path=GUEST_PATH, seed=str(seed), seconds=str(seconds), workers=str(LARGE_VCPUS)
    )
    assert await value(host, sandbox.id, code) > 0


async def counted(host: RealHost, sandbox: Sandbox) -> Metrics | None:
    """Return what a machine has counted; None if it has ended."""
    socket = host.settings.sandboxes_dir / sandbox.id / CONTROL_SOCKET
    try:
        async with await Control.connect(socket) as control:
            return await control.metrics()
    except EngineExited:
        return None


async def test_a_guest_that_attacks_all_its_devices_ends_alone_and_in_order(
    host: RealHost, soak: Soak
) -> None:
    dice = soak.dice()
    ends: list[tuple[str | None, Metrics]] = []
    async with host.forked(1, ForkOptions()) as (sibling,):
        for _ in range(soak.count(ROUNDS, SOAK_ROUNDS)):
            seed = dice.getrandbits(32)
            async with host.forked(1, replace(ForkOptions(), disk_limit_mib=64)) as (hostile,):
                await start(host, hostile, seed, soak.count(ATTACK_S, SOAK_ATTACK_S))
                counts, found = None, hostile
                while found.state is SandboxState.RUNNING:
                    # All the while the daemon, the machine's control socket and a sibling answer.
                    counts = await counted(host, hostile) or counts
                    assert await value(host, sibling.id, "1 + 1") == 2
                    found = await host.service.sandboxes.get(CALLER, hostile.id)
                console = await host.service.sandboxes.console_log(CALLER, hostile.id)
                story = f"seed {seed}: {found}; {counts}; {console[-2000:]!r}"
                assert found.exit_reason in ORDERLY, story
                assert b"hostile: failed" not in console, story
                assert counts is not None, story
                assert counts.exits > EXITS_MIN, story
                ends.append((found.exit_reason, counts))
    assert all(each in _rejecting(ends) for each in ("bus", "block", "net", "rng", "vsock")), ends
    for log in host.settings.run_dir.glob(f"z/*/{LOG_FILE}"):
        assert "panicked" not in log_tail(log)


def _rejecting(ends: list[tuple[str | None, Metrics]]) -> set[str]:
    """Return which devices have refused something."""
    return {name for _, counts in ends for name, count in counts.rejected.items() if count}
