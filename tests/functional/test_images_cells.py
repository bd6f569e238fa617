"""Builds in cells: nothing is left of one that is ended, and what it says is not believed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.cgroups.tree import CgroupTree
from forkd.errors import CapacityError, ForkdError, InvalidRequest
from forkd.host.cgroupfs import CGROUP_ROOT
from forkd.host.process import Cancel
from forkd.images import apart
from forkd.images.builder import build_rootfs
from forkd.images.layout import PARTIAL_PREFIX, Cache
from forkd.images.recipe import parse_recipe
from forkd.images.steps import Build
from forkd.limits import (
    BUILD_MEMORY_BYTES_MAX,
    BUILD_PIDS_MAX,
    BUILD_UIDS,
    BUILD_UIDS_DEFAULT,
    BUILDS_MAX,
    PACKS_MAX,
    UIDS_DEFAULT,
)
from forkd.service import doctor
from forkd.service.cells import PLACES, UIDS_MIN, Cells
from forkd.service.jail import UidRange
from tests.support.hostile_package import cells

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.images.recipe import Recipe

pytestmark = [pytest.mark.needs("root", "binaries"), pytest.mark.timeout(120)]

DEADLINE_S = 100.0
LIMITS = {
    "pids.max": f"{BUILD_PIDS_MAX}\n",
    "memory.max": f"{BUILD_MEMORY_BYTES_MAX}\n",
    "memory.swap.max": "0\n",
}
STAYS = "forkd-test-stays"

ENDLESS = f"""#!/bin/sh
mount -t tmpfs forkd-test "$TMPDIR"
for _ in 1 2 3; do setsid sh -c 'sleep 3600; : {STAYS}' > /dev/null 2>&1 & done
sh -c ': {STAYS}; echo "I: installing essential packages..."; sleep 3600'
"""
"""Stands in for mmdebstrap: it mounts, leaves processes behind, and does not end."""

BUILDER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from forkd.images import apart
from tests.functional.test_images_cells import ENDLESS, run_endless
apart.TOOLS["mmdebstrap"] = ENDLESS
run_endless(Path({folder!r}))
"""


def recipe(folder: Path) -> Recipe:
    table = {"name": "endless", "image": {"debian": {}}, "machine": {"disk_mib": 64}}
    return parse_recipe(table, folder=folder)


def killed_cells() -> Cells:
    """Return cells of users that no other build has, so that only we tidy after them."""
    vmm = programs.find(programs.VMM)
    return Cells(vmm, UidRange(2_143_000_000, UIDS_MIN), None, None)


def run_endless(folder: Path) -> None:
    cache = Cache.open(folder / "cache")
    build_rootfs(recipe(folder), cache, Build(), killed_cells().build)


def staying() -> set[int]:
    """Return the processes that the stand-in has started."""
    found = set()
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdecimal() and STAYS.encode() in (each / "cmdline").read_bytes():
                found.add(int(each.name))
    return found


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(apart, "TOOLS", {**apart.TOOLS, "mmdebstrap": ENDLESS})
    assert staying() == set()
    yield
    assert staying() == set()


def owner(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def group(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text().strip()


@contextlib.contextmanager
def building(folder: Path, given: apart.Cells) -> Iterator[Cache]:
    """Have an endless build under way in the block, and cancel it then."""
    cache, said = Cache.open(folder / "cache"), list[Exception]()

    def run() -> None:
        try:
            build_rootfs(recipe(folder), cache, Build(cancel=cancel), given)
        except ForkdError as error:
            said.append(error)

    with Cancel() as cancel:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            until_started()
            yield cache
        finally:
            cancel.set()
            thread.join(DEADLINE_S)
    assert "cancelled" in str(said[0])


def until_started() -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(staying()) < 4:
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.usefixtures("endless")
def test_a_build_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    with building(tmp_path, cells()) as cache:
        owners = {owner(pid) for pid in staying()}

    assert owners == {UidRange.parse(BUILD_UIDS_DEFAULT).first}
    assert staying() == set()
    assert list(cache.images.iterdir()) == []
    assert "forkd-test" not in Path("/proc/mounts").read_text()


@pytest.mark.soak(only=True)
@pytest.mark.needs("cgroup2")
@pytest.mark.usefixtures("endless")
def test_a_build_has_a_cgroup_that_ends_with_it(tmp_path: Path) -> None:
    tree = CgroupTree(CGROUP_ROOT / f"forkd-test-{os.getpid()}")
    with cells()() as cell:
        builds = Cells(cell.vmm, UidRange.parse(BUILD_UIDS_DEFAULT), None, tree)

    with building(tmp_path, builds.build):
        groups = {group(pid) for pid in staying()}
        limits = {name: (tree.path("build-0") / name).read_text() for name in LIMITS}

    assert groups == {f"0::/{tree.root.name}/build-0"}
    assert limits == LIMITS
    assert tree.names() == ()
    tree.close()
    assert not tree.root.exists()


@pytest.mark.usefixtures("endless")
@pytest.mark.needs("nft")
def test_a_build_whose_daemon_is_killed_ends_and_the_next_one_removes_what_it_left(
    tmp_path: Path,
) -> None:
    root = str(Path(__file__).parents[2])
    script = BUILDER.format(root=root, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script]) as builder:  # noqa: S603 - our own
        until_started()
        builder.send_signal(signal.SIGKILL)
    while staying():
        os.sched_yield()
    cache = Cache.open(tmp_path / "cache")
    (left,) = (each.name for each in cache.images.iterdir())

    cache.sweep()
    killed_cells().tidy()

    assert not list(PLACES.glob("build-2143000000"))
    assert left.startswith(PARTIAL_PREFIX)
    assert list(cache.images.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 0", "said nothing of what it made"),
        ('ln -s /etc/shadow "$1/made.json"', "said nothing of what it made|cannot"),
        ('mkfifo "$1/made.json"', "said nothing of what it made|no file|cannot"),
        ('head -c 9000000 /dev/zero > "$1/made.json"', "or too much"),
        ('echo "{}" > "$1/made.json"', "makes no sense"),
        ('echo "$GOOD" > "$1/made.json"', "rootfs.ext4"),
        ('echo "$GOOD" > "$1/made.json"; ln -s /dev/vda "$1/rootfs.ext4"', "no file of its own"),
        ('echo "$GOOD" > "$1/made.json"; mkfifo "$1/rootfs.ext4"', "no file of its own"),
        ('echo "$GOOD" > "$1/made.json"; echo > "$1/rootfs.ext4"', "is no ext4"),
        ('echo \'{"event":"failed","code":"x","message":"all of it"}\'; exit 1', "all of it"),
        ("exit 3", "ended with status 3"),
    ],
)
def test_what_comes_out_of_a_cell_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    good = '{"config":{"env":{},"cwd":"/","user":"root","post_fork_command":[]},"packages":{}}'
    builder = tmp_path / "builder"
    builder.write_text(f"#!/bin/sh\nshift 4\nGOOD='{good}'\nset -- \"$2\"\n{script}\n")
    builder.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(builder))
    cache = Cache.open(tmp_path / "cache")

    with pytest.raises(ForkdError, match=says):
        build_rootfs(recipe(tmp_path), cache, Build(), cells(builder))

    assert list(cache.images.iterdir()) == []


def test_as_many_builds_as_may_be_have_users_of_their_own_and_one_more_is_refused() -> None:
    uids = UidRange(2_142_000_000, UIDS_MIN)  # other builds use the default ones
    builds = Cells(Path("/vmm"), uids, None, None)
    with contextlib.ExitStack() as stack:
        firsts = [stack.enter_context(builds.build()).uid for _ in range(BUILDS_MAX)]
        with pytest.raises(CapacityError, match=f"{BUILDS_MAX} images"):
            stack.enter_context(builds.build())
        packs = [stack.enter_context(builds.pack()).uid for _ in range(PACKS_MAX)]
        with pytest.raises(CapacityError, match=f"{PACKS_MAX} packs"):
            stack.enter_context(builds.pack())
    assert firsts == [uids.first + number * BUILD_UIDS for number in range(BUILDS_MAX)]
    assert packs == list(range(uids.first + BUILDS_MAX * BUILD_UIDS, uids.first + UIDS_MIN))
    with builds.build() as cell:
        assert cell.uid == uids.first


def test_users_that_are_too_few_or_somebodys_are_refused() -> None:
    machines = UidRange.parse(UIDS_DEFAULT)
    first, count = machines.first + machines.count, UIDS_MIN
    Cells(Path("/vmm"), UidRange(first, count), machines, None).check()
    for uids, says in (
        (UidRange(first, count - 1), "must have"),
        (UidRange(first - 1, count), "overlaps FORKD_UID_RANGE"),
        (UidRange(1, count), r"FORKD_BUILD_UID_RANGE .* overlaps"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            Cells(Path("/vmm"), uids, machines, None).check()


def test_the_doctor_tries_a_cell_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids, builds = UidRange.parse(UIDS_DEFAULT), UidRange.parse(BUILD_UIDS_DEFAULT)
    places = doctor.Places(tmp_path, tmp_path, uids, builds)
    assert doctor.gather(places).cell == doctor.JailTried(ok=True, reason="")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)

    monkeypatch.setattr(doctor, "python_paths", lambda: (closed,))
    without_python = doctor.gather(places).cell
    overlapping = doctor.gather(replace(places, build_uids=uids)).cell

    assert without_python is not None
    assert not without_python.ok
    assert "No such file or directory" in without_python.reason
    assert overlapping is not None
    assert "overlaps FORKD_UID_RANGE" in overlapping.reason
    assert doctor.gather(replace(places, build_uids=None)).cell is None
