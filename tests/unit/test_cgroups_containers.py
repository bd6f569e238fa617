"""A root daemon in a container has its sandboxes in the container's group, whatever it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.cgroups import tree
from forkd.host import cgroupfs, proc

if TYPE_CHECKING:
    from pathlib import Path

POD = "kubepods.slice/pod1.slice/cri-containerd-1.scope"

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the top of the cgroups that a root daemon sees."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemAvailable: {4 << 20} kB\n")
    top = tmp_path / "cgroup"
    top.mkdir()
    monkeypatch.setattr(cgroupfs, "CGROUP_ROOT", top)
    monkeypatch.setattr(cgroupfs, "PROC", tmp_path)
    monkeypatch.setattr(proc, "_PROC", tmp_path)
    monkeypatch.setattr(proc, "is_root", lambda: True)
    return top


def place(groups: Path, daemon: str, first: str) -> None:
    """Have the daemon and the first process be in groups."""
    for process, name in (("self", daemon), ("1", first)):
        folder = groups.parent / process
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text(f"1:name=systemd:/else\n0::/{name}\n")
        (groups / name).mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("name", [POD, f"{POD}/{tree.DAEMON}"])
def test_the_group_of_a_container_that_sees_those_above_it_is_found(
    groups: Path, name: str
) -> None:
    place(groups, name, name)

    assert tree.delegated() == groups / POD


@pytest.mark.parametrize("name", ["", tree.DAEMON])
def test_a_container_that_sees_only_its_own_group_has_it_as_the_top(
    groups: Path, name: str
) -> None:
    place(groups, name, name)

    assert tree.delegated() is None


def test_a_service_of_a_service_manager_is_in_no_container(groups: Path) -> None:
    place(groups, "system.slice/forkd.service", "init.scope")

    assert tree.delegated() is None


def test_the_limits_of_a_container_and_its_pod_hold_where_groups_above_are_seen(
    groups: Path,
) -> None:
    place(groups, POD, POD)
    for group, limit, used in ((groups / POD, "max", 0), ((groups / POD).parent, 3 * GIB, GIB)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 1\n")

    assert proc.memory_bytes() == (3 * GIB, 2 * GIB)
