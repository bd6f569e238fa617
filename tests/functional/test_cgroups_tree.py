"""Limits are set in the kernel, and a group goes with whatever is left in it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.limits import Limits
from forkd.cgroups.tree import CgroupTree
from forkd.errors import HostError
from forkd.host import cgroupfs

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "cgroup2")

LIMITS = Limits(pids=16, memory_bytes=64 << 20, cpus=0.5, cpu_weight=50)


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    root = cgroupfs.CGROUP_ROOT / "forkd-test"
    yield CgroupTree(root)
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


def test_a_host_with_cgroup_v2_is_usable(tree: CgroupTree) -> None:
    assert tree.usable()
    assert not CgroupTree(Path("/nowhere/forkd")).usable()
