"""Limits say what they mean to the kernel, and one that cannot be set is an error."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.limits import Limits, no_io, settings
from forkd.cgroups.tree import CgroupTree
from forkd.errors import HostError
from forkd.host import disks
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


@pytest.mark.parametrize(
    ("asked", "written"),
    [
        (Limits(pids=64, io_bytes_s=1 << 20), "rbps=1048576 wbps=1048576 riops=max wiops=max"),
        (Limits(pids=64, io_ops_s=100), "rbps=max wbps=max riops=100 wiops=100"),
        (Limits(pids=64, io_bytes_s=2, io_ops_s=3), "rbps=2 wbps=2 riops=3 wiops=3"),
    ],
)
def test_io_is_limited_each_way_and_set_last(asked: Limits, written: str) -> None:
    assert asked.has_io
    assert settings(asked, "254:0")[-1] == ("io.max", f"254:0 {written}")


def test_io_that_is_not_limited_is_not_written() -> None:
    assert not Limits(pids=64).has_io
    assert "io.max" not in dict(settings(Limits(pids=64)))


def test_what_limits_io_is_taken_back_for_each_disk() -> None:
    io_max = "254:0 rbps=1 wbps=1 riops=max wiops=max\n8:16 rbps=max wbps=max riops=9 wiops=9\n"

    nothing = "rbps=max wbps=max riops=max wiops=max"
    assert no_io(io_max) == (f"254:0 {nothing}", f"8:16 {nothing}")
    assert no_io("") == ()


def test_limits_of_io_are_of_mib_and_operations() -> None:
    options = ForkOptions(io_limit_mib_s=20, io_limit_ops=500)
    assert limits_of(options) == Limits(pids=64, io_bytes_s=20 << 20, io_ops_s=500)


def test_io_cannot_be_limited_without_the_controller_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    tree = CgroupTree(tmp_path / "forkd", tmp_path)

    tree.check(Limits(pids=64))
    for ask in (tree.check, partial(tree.create, "sb-1")):
        with pytest.raises(HostError, match=r"cgroup v2 with io at .*, which this host lacks"):
            ask(Limits(pids=64, io_ops_s=100))
    assert not tree.root.exists()


def test_io_cannot_be_limited_on_a_file_system_without_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    monkeypatch.setattr(disks, "BLOCK_DEVICES", tmp_path / "no devices")
    tree = CgroupTree(tmp_path / "forkd", tmp_path)

    for ask in (tree.check, partial(tree.create, "sb-1")):
        with pytest.raises(HostError, match=f"the file system of {tmp_path} is on no one disk"):
            ask(Limits(pids=64, io_bytes_s=1 << 20))
    assert not tree.root.exists()


def test_a_group_that_was_left_is_given_every_limit_and_a_new_one_goes_if_it_lacks_a_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    tree = CgroupTree(tmp_path / "forkd")
    left = tree.path("left")
    left.mkdir(parents=True)
    for folder in (tmp_path, tree.root):
        (folder / "cgroup.subtree_control").touch()
    for file in ("pids.max", "cpu.weight"):
        (left / file).write_text("17")

    tree.create("left", Limits(pids=64))
    assert ((left / "pids.max").read_text(), (left / "cpu.weight").read_text()) == ("64", "100")
    with pytest.raises(HostError, match=r"cannot set .*/new/pids\.max to 64: No such file"):
        tree.create("new", Limits(pids=64))
    assert tree.names() == ("left",)


def test_what_was_read_and_written_is_that_of_the_one_disk(
    tmp_path: Path,
) -> None:
    tree = CgroupTree(tmp_path)
    assert tree.io("sb-1", "254:0") is None

    group = tree.path("sb-1")
    group.mkdir()
    line = "rbytes=1 wbytes=2 rios=3 wios=4 dbytes=0 dios=0\n"
    (group / "io.stat").write_text(f"8:0 {line.replace('=', '=9')}254:0 {line}254:16\n")
    assert tree.io("sb-1", "254:0") == {
        "rbytes": 1,
        "wbytes": 2,
        "rios": 3,
        "wios": 4,
        "dbytes": 0,
        "dios": 0,
    }
    (group / "io.stat").write_text("")
    assert tree.io("sb-1", "254:0") == {}


def test_without_a_limit_there_is_no_group_and_with_one_threads_are_limited_too() -> None:
    assert limits_of(ForkOptions()) is None
    assert limits_of(ForkOptions(memory_limit_mib=64)) == Limits(pids=64, memory_bytes=64 << 20)


def test_a_host_without_the_controllers_refuses_every_limit(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path / "forkd")

    assert not tree.usable()
    with pytest.raises(HostError, match="cgroup v2 with cpu, memory, pids"):
        tree.create("sb-1", Limits(pids=64))
    assert tree.names() == ()
