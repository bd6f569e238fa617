"""Gates at which processes wait until they are in their cgroups, with real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.host import cgroupfs
from forkd.host.gates import Gates

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(120), pytest.mark.needs("root", "cgroup2")]

DEADLINE_S = 30.0
STRANGER = 2_142_900_009

COME = """
import os, pathlib, socket, sys
gate, uid, group = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
os.setresuid(uid, uid, uid)
gate.send(b"0")
if not gate.recv(1):
    sys.exit(7)
sys.exit(0 if pathlib.Path("/proc/self/cgroup").read_text().strip().endswith(group) else 8)
"""
"""Comes to a gate: ends with 7 if it is not let through, with 8 if it is in another cgroup."""

CLAIM = """
import os, socket, struct, sys
gate, uid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
os.setresuid(uid, uid, uid)
other = struct.pack("iII", os.getppid(), uid, os.getgid())
try:
    gate.sendmsg([b"0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, other)])
except PermissionError:
    sys.exit(5)
"""
"""Says that it is its parent; ends with 5 if the kernel does not say so for it."""


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup without limits."""
    made = cgroupfs.CGROUP_ROOT / f"forkd-test-gates-{os.getpid()}"
    cgroupfs.make(made)
    yield made
    cgroupfs.end(made, DEADLINE_S)


async def status(script: str, gate: int, *words: object) -> int:
    """Return how a process ends that has a gate."""
    command = [sys.executable, "-c", script, str(gate), *map(str, words)]

    def run() -> int:
        done = subprocess.run(  # noqa: S603 - our own
            command, check=False, pass_fds=[gate], timeout=DEADLINE_S
        )
        return done.returncode

    return await asyncio.to_thread(run)


async def test_who_comes_is_moved_before_it_goes_on_and_again_if_it_is_tried_again(
    group: Path,
) -> None:
    with Gates({STRANGER}) as gates:
        gate = gates.add(group)
        async with gates.served():
            assert await status(COME, gate, STRANGER, group.name) == 0
            assert await status(COME, gate, STRANGER, group.name) == 0
        os.close(gate)


async def test_who_is_another_user_or_says_to_be_another_process_is_not_moved(
    group: Path,
) -> None:
    with Gates({STRANGER}) as gates:
        first, second = gates.add(group), gates.add(group)
        async with gates.served():
            assert await status(COME, first, STRANGER + 1, group.name) == 7
            assert await status(CLAIM, second, STRANGER) == 5
            assert cgroupfs.processes(group) == frozenset()
        os.close(first)
        os.close(second)


async def test_who_waits_for_a_cgroup_that_is_gone_does_not_go_on(group: Path) -> None:
    with Gates({STRANGER}) as gates:
        gate = gates.add(group / "gone")
        async with gates.served():
            assert await status(COME, gate, STRANGER, group.name) == 7
        os.close(gate)
