"""Fail a functional test that leaves something of forkd behind on the host.

An *inventory* lists what is there: processes that we started, network
namespaces and interfaces, cgroups, mounts, nftables tables, files in the
places that forkd uses, and the open files of the test process.  It is taken
when a test's wider fixtures stand and its own do not, and again when its own
are gone; what is new then is a leak.

Processes may take a moment to end after they were told to.  Those are awaited,
as an event, until `processes.ENDING_S`; everything else must be gone by then.

To find processes however they were started, the test process carries a mark in
its environment, which they inherit.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import uuid
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support import processes

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKED_FOLDERS = ("functional", "security", "upgrade")
"""Folders of tests/ whose tests are checked."""

MARK = "FORKD_TEST_RUN"
"""Environment variable by which a process is known to be ours."""

FILE_PATTERNS = (
    *("/tmp/forkd*", "/run/forkd*", "/run/forkd/*", "/dev/shm/forkd*"),
    *("/dev/initctl", "/dev/log", "/dev/mqueue", "/dev/hugepages"),
)
"""Where forkd may put files outside the folders that a test gives it, and a systemd of a test."""

SHARED_FILES = frozenset({"/run/forkd-places"})
"""Files of all daemons of this host together: another suite may be building an image now."""

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a test could leave behind, by kind; each entry says what it is.

    Attributes:
        processes: Of this test run, beside the test process itself.
        namespaces: Named network namespaces.
        interfaces: Network interfaces.
        cgroups: Folders of the cgroup2 tree that bear forkd's name.
        mounts: Mount points.
        tables: nftables tables.
        files: In the places that forkd uses.
        descriptors: Open files of the test process; a target open twice is there twice.
    """

    processes: frozenset[str] = frozenset()
    namespaces: frozenset[str] = frozenset()
    interfaces: frozenset[str] = frozenset()
    cgroups: frozenset[str] = frozenset()
    mounts: frozenset[str] = frozenset()
    tables: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    descriptors: frozenset[str] = frozenset()


def leaked(before: Inventory, after: Inventory) -> list[str]:
    """Return a line for each thing in `after` that is not in `before`."""
    return [
        f"{field.name}: {entry}"
        for field in fields(Inventory)
        for entry in sorted(getattr(after, field.name) - getattr(before, field.name))
    ]


def take_own() -> Inventory:
    """Return what is this test run's own, while another one changes the host."""
    return Inventory(
        processes=frozenset(f"{pid} {words}" for pid, words in our_processes().items()),
        descriptors=_descriptors(),
    )


def take() -> Inventory:
    """Return what is there now; also what is only open because it was not collected yet."""
    return replace(
        take_own(),
        namespaces=_names(Path("/run/netns")),
        interfaces=_names(Path("/sys/class/net")),
        cgroups=frozenset(str(path) for path in CGROUPS.glob("**/forkd*") if path.is_dir()),
        mounts=_mounts(),
        tables=_tables(),
        files=frozenset(str(path) for pattern in FILE_PATTERNS
                        for path in Path("/").glob(pattern.removeprefix("/"))) - SHARED_FILES,
    )  # fmt: skip


def our_processes() -> dict[int, str]:
    """Return the processes of this test run by number, with their command lines."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0") or _is_zombie_child(folder):
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = words.strip() or "(zombie)"
        except OSError:
            continue  # it ended while we looked, or is somebody else's
    return found


def await_ending(known: frozenset[str]) -> None:
    """Wait until no process of ours is left but the `known`, or the deadline passes."""
    processes.surviving(
        pid for pid, words in our_processes().items() if f"{pid} {words}" not in known
    )


def _is_zombie_child(folder: Path) -> bool:
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state == "Z" and int(parent) == os.getpid()


def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.name for path in folder.iterdir()) if folder.is_dir() else frozenset()


def _mounts() -> frozenset[str]:
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[4] for line in lines)


def _tables() -> frozenset[str]:
    nft = shutil.which("nft")
    if nft is None or os.geteuid() != 0:
        return frozenset()
    listed = subprocess.run([nft, "list", "tables"], capture_output=True, text=True, check=False)  # noqa: S603 - a constant
    return frozenset(listed.stdout.splitlines())


def _descriptors() -> frozenset[str]:
    """Return what is open, numbered among equals, so that a second one shows."""
    seen: Counter[str] = Counter()
    entries = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue  # the descriptor by which the folder itself is read
        if target.startswith("/proc/"):
            continue
        name = target if target.startswith("/") else target.partition("[")[0]
        seen[name] += 1
        entries.append(f"{name} ({seen[name]})")
    return frozenset(entries)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allow-leaks", action="store_true", help="do not compare inventories (shared hosts)"
    )


def pytest_configure() -> None:
    os.environ.setdefault(MARK, uuid.uuid4().hex)


def pytest_collection_finish() -> None:
    """Let each inventory's garbage collection pass over all that was there before the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare the inventories around a test of the checked folders."""
    folder = request.path.parent.name
    if folder not in CHECKED_FOLDERS or request.config.getoption("--allow-leaks"):
        yield
        return
    look = take_own if request.config.getoption("--leaving-host") else take
    before = look()
    yield
    await_ending(before.processes)
    leaks = leaked(before, look())
    if leaks:  # collecting takes as long as all the rest, and is needed after few tests only
        gc.collect()
        leaks = leaked(before, look())
    if leaks:
        pytest.fail("this test left behind " + "\n  ".join(leaks), pytrace=False)
