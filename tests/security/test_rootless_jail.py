"""What is left to machines of a daemon that is not root, as the kernel shows it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.cgroups.tree import DAEMON
from forkd.errors import ForkdError
from forkd.host import cgroupfs
from forkd.sdk import Client
from tests.support import captives
from tests.support.memory import TAKE_BACK
from tests.support.real_host import RECIPE, ROOT, TAG
from tests.support.rootless_daemon import (
    HOME_FILE,
    USER,
    as_user,
    delegated_group,
    in_group,
    running_rootless_daemon,
    without_user_namespaces,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.rootless_daemon import RootlessDaemon

REAL = pytest.mark.needs("kvm", "root", "binaries", "cgroup2")
SOAK = pytest.mark.soak(only=True)
"""The user's daemon bakes a snapshot of its own, as root's leads to images that it cannot read."""

pytestmark = pytest.mark.timeout(600)

NAMESPACES = ("user", "mnt", "net", "ipc", "uts")
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
CAPTIVE = ROOT / "build/bin/forkd-captive"
SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user may execute: that of the tests may be in the home folder of root."""

UP_AND_DOWN = """
import json, sys
from pathlib import Path
from forkd import Client
from forkd.machine import lifecycle

home = Path(sys.argv[1])
try:
    daemon = lifecycle.up(home, progress=lambda step: print(step, file=sys.stderr))
    with Client(daemon.url) as client:
        host = client.host()
finally:
    ended = lifecycle.down(home)
print(json.dumps([daemon.mode, host.kvm, host.jail, host.network, ended]))
"""

MIB = 1 << 20
LIMIT_MIB = 256


@pytest.fixture(scope="module")
def daemon(bakes: Bakes) -> Iterator[RootlessDaemon]:
    """A daemon that has baked a snapshot, and has a zygote of it."""
    bakes.of(RECIPE)  # makes its image, which this user cannot
    with running_rootless_daemon() as made:
        with Client(made.url) as client:
            client.snapshots.create(TAG, RECIPE)
            client.fork(TAG)[0].kill()
        yield made


@pytest.fixture
def client(daemon: RootlessDaemon) -> Iterator[Client]:
    with Client(daemon.url) as made:
        yield made


@pytest.fixture
def sandbox(client: Client) -> Iterator[Sandbox]:
    with client.fork(TAG)[0] as made:
        yield made


def status(pid: int, name: str, thread: int | None = None) -> list[str]:
    """Return the words of a line of a process's status."""
    lines = Path(f"/proc/{pid}/task/{thread or pid}/status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith(f"{name}:"))


def threads(pid: int) -> list[int]:
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]


def namespace(pid: int | str, kind: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def group_of(pid: int) -> Path:
    (line,) = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return cgroupfs.CGROUP_ROOT / line.removeprefix("0::/")


def pid_of(sandbox: Sandbox) -> int:
    pid = sandbox.refresh().pid
    assert pid is not None
    return pid


@REAL
@SOAK
def test_up_of_an_ordinary_user_runs_on_this_host_and_down_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as folder:
        os.chown(folder, USER, USER)
        env = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(  # noqa: S603 - our own
            as_user([SYSTEM_PYTHON, "-c", UP_AND_DOWN, f"{folder}/forkd"]),
            check=True, stdout=subprocess.PIPE, env=env, cwd="/", timeout=120,
        )  # fmt: skip

        mode, kvm, jail, network, ended = json.loads(done.stdout)
        assert (mode, kvm, jail, network, ended) == ("native", True, True, False, True)
        assert not (Path(folder) / "forkd" / "run").exists()


@REAL
@SOAK
def test_a_machine_is_the_daemons_user_without_any_right(sandbox: Sandbox) -> None:
    pid = pid_of(sandbox)
    for thread in threads(pid):
        assert set(status(pid, "Uid", thread)) == {str(USER)}
        assert {
            each: int(status(pid, each, thread)[0], 16) for each in CAPABILITIES
        } == dict.fromkeys(CAPABILITIES, 0)
        assert status(pid, "NoNewPrivs", thread) == ["1"]
        assert status(pid, "Seccomp", thread) == ["2"]
    assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["0", str(USER), "1"]


@REAL
@SOAK
def test_a_machine_sees_its_folders_and_neither_home_nor_network(
    daemon: RootlessDaemon, sandbox: Sandbox
) -> None:
    pid = pid_of(sandbox)
    for kind in NAMESPACES:
        assert namespace(pid, kind) != namespace(daemon.pid, kind), kind
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    folders = {str(each) for each in daemon.settings.jail_dirs}
    for words in mounts:
        options = set(words[5].split(","))
        assert {"nosuid", "nodev", "noexec"} <= options, words
        if words[4] not in folders:
            assert words[4].startswith("/proc"), words
            assert "ro" in options, words
    root = Path(f"/proc/{pid}/root")
    assert {each.name for each in root.iterdir()} == {"proc"} | {
        Path(each).parts[1] for each in folders
    }
    assert (daemon.home / HOME_FILE).exists()
    assert not (root / (daemon.home / HOME_FILE).relative_to("/")).exists()
    devices = Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]
    assert [line.split(":")[0].strip() for line in devices] == ["lo"]


@REAL
@SOAK
def test_a_zygote_has_no_right(daemon: RootlessDaemon, sandbox: Sandbox) -> None:
    (zygote,) = daemon.vmm_processes() - {pid_of(sandbox)}
    assert set(status(zygote, "Uid")) == {str(USER)}
    assert int(status(zygote, "CapPrm")[0], 16) == 0
    assert int(status(zygote, "CapBnd")[0], 16) == 0
    assert status(zygote, "NoNewPrivs") == ["1"]
    for kind in NAMESPACES:
        assert namespace(zygote, kind) == namespace(pid_of(sandbox), kind)


@REAL
@SOAK
def test_siblings_are_jailed_as_their_source_compared_and_reset(
    client: Client, sandbox: Sandbox
) -> None:
    sandbox.eval("x = 7")
    (sibling,) = sandbox.branch(1)
    with sibling:
        pid = pid_of(sibling)
        assert int(status(pid, "CapPrm")[0], 16) == 0
        assert namespace(pid, "mnt") == namespace(pid_of(sandbox), "mnt")
        sibling.eval("open('/root/new', 'w').write('x'); x = 8")
        paths = [each.path for each in client.diff(sandbox.id, sibling.id).changes]
        assert "/root/new" in paths
        sibling.reset()
        assert sibling.eval("x").value == 7
        assert sibling.usage() is not None


@REAL
@SOAK
def test_what_a_jailed_machine_leaves_is_stored_and_forked_from(
    client: Client, sandbox: Sandbox
) -> None:
    sandbox.eval("x = 9")
    sandbox.snapshot("rootless-delta")
    try:
        with client.fork("rootless-delta")[0] as child:
            assert child.eval("x").value == 9
    finally:
        client.snapshots.delete("rootless-delta", cascade=True)


@REAL
@SOAK
@pytest.mark.parametrize("place", ["machine", "zygote", "seed"])
def test_what_a_captured_process_gets_is_said_and_nothing_else(
    daemon: RootlessDaemon, sandbox: Sandbox, place: str
) -> None:
    sandbox.eval("open('/dev/console', 'w').write('there is a console')")
    above = "" if place == "machine" else captives.ABOVE
    (zygote,) = daemon.settings.zygotes_dir.iterdir()
    others = f"{above}{sandbox.id}:{zygote.name}"
    tries = daemon.captured(CAPTIVE, TAG, others, seed=place == "seed")

    assert {(each["group"], each["try"]) for each in tries} == captives.tries()
    got = {(each["group"], each["try"]): each["got"] for each in tries if "got" in each}
    assert set(got) == captives.got(f"{place} without root"), got
    assert sandbox.eval("1 + 1").value == 2


@REAL
@SOAK
def test_machines_are_in_groups_below_the_one_that_was_delegated(
    client: Client, daemon: RootlessDaemon, sandbox: Sandbox
) -> None:
    host = client.host()
    assert (host.jail, host.cgroups) == (True, True)
    sandboxes = daemon.group / daemon.names.cgroup_root.name
    limit_mib = sandbox.refresh().memory_limit_mib
    assert limit_mib is not None
    assert (sandboxes / sandbox.id / "memory.max").read_text() == f"{limit_mib * MIB}\n"
    (sibling,) = sandbox.branch(1)
    with sibling:
        assert group_of(pid_of(sandbox)) == sandboxes / sandbox.id
        assert group_of(pid_of(sibling)) == sandboxes / sibling.id
        ours = {group_of(pid) for pid in daemon.vmm_processes()}
    assert group_of(daemon.pid) == daemon.group / DAEMON
    assert ours == {daemon.group / DAEMON, sandboxes / sandbox.id, sandboxes / sibling.id}
    assert not (sandboxes / sibling.id).exists()


@REAL
@SOAK
def test_a_guest_past_its_limit_ends_alone(client: Client, sandbox: Sandbox) -> None:
    with client.fork(TAG, memory_limit_mib=LIMIT_MIB)[0] as hungry:
        assert hungry.exec(["sh", "-c", TAKE_BACK]).exit_code == 0
        with pytest.raises(ForkdError):
            hungry.eval(f"len(b'x' * {(LIMIT_MIB + 64) * MIB})")

        for _ in hungry.follow_logs():
            pass
        assert hungry.refresh().exit_reason == "killed, out of memory: its own limit had no more"
    assert sandbox.eval("1 + 1").value == 2


DELEGATED = "from forkd.cgroups import tree; print(tree.delegated())"


@pytest.mark.needs("root", "cgroup2")
def test_a_group_is_delegated_that_is_the_users_and_has_no_other_process() -> None:
    def found(group: Path) -> str:
        words = in_group(group, as_user([sys.executable, "-c", DELEGATED]))
        return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()  # noqa: S603 - our own

    with delegated_group("forkd-test-other-unit") as group, contextlib.ExitStack() as stack:
        assert found(group) == str(group)
        assert found(cgroupfs.CGROUP_ROOT) == "None"
        words = in_group(group, as_user(["/bin/sh", "-c", "echo here; exec sleep infinity"]))
        other = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))  # noqa: S603 - our own
        stack.callback(other.kill)
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        assert found(group) == "None"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the user's, which it can reach."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as made:
        os.chown(made, USER, USER)
        yield Path(made)


@pytest.fixture
def spare() -> Iterator[Path]:
    """A folder to mount something on."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as made:
        yield Path(made)


def daemon_command(folder: Path, *words: str) -> list[str | Path]:
    return [sys.executable, "-m", "forkd.daemon", *words, "--state-dir", folder / "state"]


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own
        words, check=False, capture_output=True, text=True, timeout=120, cwd=ROOT,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)},
    )  # fmt: skip


def jail_check(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return next(each for each in json.loads(done.stdout) if each["name"] == "jail")


@pytest.mark.needs("root", "binaries")
def test_an_ordinary_user_is_jailed_without_being_anybodys_root(folder: Path) -> None:
    tried = run(as_user([programs.find(programs.VMM), "jail", folder]), folder)

    assert json.loads(tried.stdout)["event"] == "jailed", tried


@pytest.mark.needs("root", "binaries")
def test_root_cannot_have_the_jail_of_an_ordinary_user(folder: Path) -> None:
    tried = run([str(programs.find(programs.VMM)), "jail", str(folder)], folder)

    assert "root's machines are users of their own" in json.loads(tried.stdout)["message"]


@pytest.mark.needs("root", "binaries")
def test_the_doctor_says_what_such_a_jail_lacks(folder: Path) -> None:
    found = jail_check(run(as_user(daemon_command(folder, "doctor", "--json")), folder))

    assert found["status"] == "WARN"
    assert "missing: users of their own, a /proc of their own" in found["found"]


@pytest.mark.needs("root", "binaries")
def test_a_daemon_whose_host_refuses_user_namespaces_does_not_start_and_says_what_to_set(
    folder: Path, spare: Path
) -> None:
    places = ("--socket", str(folder / "forkd.sock"), "--run-dir", str(folder / "run"))
    command = daemon_command(folder, "serve", *places)
    ended = run(without_user_namespaces(command, spare), folder)

    assert ended.returncode == 1
    assert "machines cannot be jailed here: make a user namespace" in ended.stderr
    assert "FORKD_JAIL=off" in ended.stderr
    doctor = daemon_command(folder, "doctor", "--json")
    found = jail_check(run(without_user_namespaces(doctor, spare), folder))
    assert found["status"] == "WARN"
    assert "make a user namespace" in found["found"]
