"""Limits are set in the kernel, and a group goes with whatever is left in it."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.limits import Limits
from forkd.cgroups.tree import DAEMON, CgroupTree
from forkd.errors import HostError
from forkd.host import cgroupfs, disks
from forkd.limits import CPU_WEIGHT_DEFAULT
from tests.support.needs import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "cgroup2")

LIMITS = Limits(pids=16, memory_bytes=64 << 20, cpus=0.5, cpu_weight=50)


LIMITED_IO = replace(LIMITS, io_bytes_s=1 << 20, io_ops_s=200)

IO_MIB = 4
"""How much is written under a limit of 1 MiB/s: of it a second's worth may go at once."""

IO_AT_LEAST_S = 2.0

MUCH_MIB = 64
"""At 1 MiB/s, twice as much as is done before a process is said to survive SIGKILL."""

DEADLINE_S = 60.0


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    root = cgroupfs.CGROUP_ROOT / "forkd-test"
    yield CgroupTree(root, STATE)
    if root.exists():
        cgroupfs.remove_empty(root)


def test_every_limit_arrives_in_the_kernel(tree: CgroupTree) -> None:
    group = tree.create("one", LIMITS)

    values = {
        name: (group / name).read_text().strip()
        for name in (
            "pids.max",
            "memory.max",
            "memory.swap.max",
            "memory.oom.group",
            "cpu.max",
            "cpu.weight",
        )
    }
    assert values == {
        "pids.max": "16",
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cpu.max": "50000 100000",
        "cpu.weight": "50",
    }
    assert tree.names() == ("one",)
    tree.remove("one")
    assert tree.names() == ()


def test_a_share_that_is_the_kernels_own_is_there_in_a_new_group_and_in_one_that_was_left(
    tree: CgroupTree,
) -> None:
    group = tree.create("one", replace(LIMITS, cpu_weight=CPU_WEIGHT_DEFAULT))
    assert (group / "cpu.weight").read_text() == f"{CPU_WEIGHT_DEFAULT}\n"

    tree.limit("one", LIMITS)
    tree.create("one", replace(LIMITS, cpu_weight=CPU_WEIGHT_DEFAULT))

    assert (group / "cpu.weight").read_text() == f"{CPU_WEIGHT_DEFAULT}\n"
    tree.remove("one")


def test_removing_a_group_ends_what_runs_in_it_and_removing_it_again_is_fine(
    tree: CgroupTree,
) -> None:
    group = tree.create("one", LIMITS)
    process = subprocess.Popen(["/bin/sleep", "1000"])
    cgroupfs.write(group, "cgroup.procs", str(process.pid))

    tree.remove("one")
    tree.remove("one")

    assert process.wait(10) == -9
    assert not group.exists()


def test_a_limit_that_the_kernel_refuses_is_an_error_and_leaves_no_group(tree: CgroupTree) -> None:
    with pytest.raises(HostError, match=r"pids\.max"):
        tree.create("one", Limits(pids=-5))

    assert tree.names() == ()


def test_whoever_is_in_a_group_without_the_hierarchy_steps_aside_as_in_a_container() -> None:
    above = cgroupfs.CGROUP_ROOT / "forkd-test"  # as a container sees its own: not the hierarchy's
    cgroupfs.make(above)
    sleeper = subprocess.Popen(["/bin/sleep", "600"])
    try:
        cgroupfs.enter(above, sleeper.pid)
        inner = CgroupTree(above / "forkd", STATE)
        inner.create("one", LIMITS)

        assert cgroupfs.processes(above / DAEMON) == {sleeper.pid}
        inner.remove("one")
        inner.close()
    finally:
        sleeper.kill()
        sleeper.wait()
        cgroupfs.end(above / DAEMON, DEADLINE_S)
        cgroupfs.remove_empty(above)


def test_a_host_with_cgroup_v2_is_usable(tree: CgroupTree) -> None:
    assert tree.usable()
    assert not CgroupTree(Path("/nowhere/forkd")).usable()


@pytest.fixture
def target() -> Iterator[Path]:
    """Where to write on the disk."""
    with tempfile.TemporaryDirectory(prefix="forkd-io-", dir=STATE) as folder:
        yield Path(folder) / "file"


@pytest.mark.needs("io")
def test_limits_of_io_arrive_in_the_kernel_change_and_are_taken_back(tree: CgroupTree) -> None:
    group, disk = tree.create("one", LIMITED_IO), disks.disk_of(STATE)
    assert (group / "io.max").read_text() == (
        f"{disk} rbps=1048576 wbps=1048576 riops=200 wiops=200\n"
    )

    tree.limit("one", replace(LIMITS, io_ops_s=300))
    assert (group / "io.max").read_text() == f"{disk} rbps=max wbps=max riops=300 wiops=300\n"

    tree.hurry("one")
    assert (group / "io.max").read_text() == ""
    tree.remove("one")


@pytest.mark.needs("io")
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        pytest.param(LIMITED_IO, ("if=/dev/zero", "bs=64k", "oflag=direct"), id="writes"),
        pytest.param(LIMITED_IO, ("if=/dev/zero", "bs=64k", "conv=fsync"), id="cached"),
        pytest.param(LIMITED_IO, ("of=/dev/null", "bs=64k", "iflag=direct"), id="reads"),
        pytest.param(
            replace(LIMITS, io_ops_s=256),
            ("if=/dev/zero", "bs=4k", "oflag=direct"),
            id="operations",
        ),
    ],
)
def test_io_past_its_limit_waits_and_that_of_others_does_not(
    tree: CgroupTree, target: Path, limits: Limits, words: tuple[str, ...]
) -> None:
    count = {"bs=64k": IO_MIB << 4, "bs=4k": IO_MIB << 8}[words[1]]
    reads = words[0].startswith("of")

    took_s = []
    for name, each in (("limited", limits), ("other", LIMITS)):
        group, file = tree.create(name, each), target.with_name(name)
        if reads:  # what is written is counted for who wrote to a file first
            file.write_bytes(bytes(IO_MIB << 20))
        end = f"if={file}" if reads else f"of={file}"
        began_s = time.monotonic()
        process = in_group(group, "dd", end, f"count={count}", *words)
        assert process.wait(DEADLINE_S) == 0
        took_s.append(time.monotonic() - began_s)
        tree.remove(name)

    limited_s, other_s = took_s
    assert limited_s > IO_AT_LEAST_S
    assert other_s < limited_s


@pytest.mark.needs("io")
def test_what_waits_for_its_io_ends_at_once_when_its_group_does(
    tree: CgroupTree, target: Path
) -> None:
    group = tree.create("one", replace(LIMITED_IO, memory_bytes=4 * MUCH_MIB << 20))
    words = ("if=/dev/zero", f"bs={MUCH_MIB}M", "count=1", "oflag=direct")
    process = in_group(group, "dd", f"of={target}", *words)
    until_s = time.monotonic() + DEADLINE_S
    while not re.search(r"wbytes=[1-9]", (group / "io.stat").read_text()):
        assert time.monotonic() < until_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it has ended: {process.wait(0.1)}")

    tree.remove("one")

    assert process.wait(DEADLINE_S) == -9
    assert not group.exists()


def in_group(group: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a program in a group."""
    script = f'echo $$ > {group}/cgroup.procs && exec "$@"'
    return subprocess.Popen(["/bin/sh", "-c", script, "sh", *command])  # noqa: S603 - ours
