"""Limits say what they mean to the kernel, and one that cannot be set is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.limits import Limits, settings
from forkd.cgroups.tree import CgroupTree
from forkd.errors import HostError
from forkd.model.sandbox import ForkOptions
from forkd.service.allowance import limits_of

if TYPE_CHECKING:
    from pathlib import Path


def test_a_memory_limit_takes_swap_away_and_ends_the_whole_group() -> None:
    assert settings(Limits(pids=64, memory_bytes=1 << 29)) == (
        ("pids.max", "64"),
        ("cpu.weight", "100"),
        ("memory.max", "536870912"),
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),
    )


@pytest.mark.parametrize(("cpus", "quota"), [(0.5, "50000"), (2, "200000"), (0.0001, "1000")])
def test_a_cpu_limit_is_a_share_of_a_period(cpus: float, quota: str) -> None:
    assert ("cpu.max", f"{quota} 100000") in settings(Limits(pids=64, cpus=cpus))


def test_a_cpu_weight_is_the_kernels_unless_one_is_asked_for() -> None:
    assert ("cpu.weight", "100") in settings(Limits(pids=64))
    assert ("cpu.weight", "1") in settings(limits_of(ForkOptions(cpu_weight=1)) or Limits(pids=0))


def test_without_a_limit_there_is_no_group_and_with_one_threads_are_limited_too() -> None:
    assert limits_of(ForkOptions()) is None
    assert limits_of(ForkOptions(memory_limit_mib=64)) == Limits(pids=64, memory_bytes=64 << 20)


def test_a_host_without_the_controllers_refuses_every_limit(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path / "forkd")

    assert not tree.usable()
    with pytest.raises(HostError, match="cgroup v2 with cpu, memory, pids"):
        tree.create("sb-1", Limits(pids=64))
    assert tree.names() == ()
