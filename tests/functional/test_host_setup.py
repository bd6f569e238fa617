"""`forkd host setup` on a real host, and `undo`: the host is as it was, byte by byte.

Groups, units and files of this host are those of a root of its own, over this host's; settings of
the kernel are this host's own, for a moment.  In the helper machine everything is.
"""

from __future__ import annotations

import json
import pty
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd.host import parts, tuning
from forkd.host.parts import Kind, Part
from tests.support.docs import ROOT
from tests.support.host_state import STATE
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.systemd_root import SystemdRoot

pytestmark = pytest.mark.timeout(180)
IN_A_ROOT = pytest.mark.needs("root", "systemd")

SHARED = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
FORKD = f"{sys.executable} -m forkd.cli host"

MAPPINGS = "vm.max_map_count"
BAD = f"{MAPPINGS}=65000"
"""A value that set-up changes, and that is bad for nobody in the meantime."""

BY_HAND = "# mine\nvm.swappiness = 60\n"

KILLER = """\
#!/bin/sh
kill -9 $PPID
"""
"""Stands for a program that set-up runs, and ends whoever runs it as a crash would."""


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """This host's settings; they are as before when the test ends, whatever it did."""
    paths = {each.name: tuning.ROOT / each.path for each in tuning.SETTINGS}
    before = {name: value for name in paths if (value := tuning.value(name)) is not None}
    yield
    for name, value in before.items():
        if tuning.value(name) != value:
            paths[name].write_text(value, encoding="ascii")


@pytest.fixture
def host() -> Iterator[SystemdRoot]:
    """A host with a user, a file of settings that was written by hand, and a bad value."""
    with (
        tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name,
        systemd_root(Path(name), SHARED) as host,
    ):
        parents = sorted({str(each) for path in SHARED for each in path.parents})
        host.run(
            f"mount -o remount,rw /sys && chmod a+rx {' '.join(parents)} &&"
            " useradd --create-home ada && mkdir -p /etc/sysctl.d &&"
            f" printf '{BY_HAND}' >/etc/sysctl.d/90-forkd.conf &&"
            f" chmod 640 /etc/sysctl.d/90-forkd.conf && sysctl -qw {BAD}"
        )
        yield host


def said(host: SystemdRoot, line: str) -> Any:  # noqa: ANN401 - JSON
    return json.loads(host.run(f"{FORKD} {line} --json", check=False))


@IN_A_ROOT
def test_a_host_is_as_it_was_before(host: SystemdRoot) -> None:
    before = host.run(STATE)

    checked = said(host, "check --user ada")
    done = said(host, "setup --yes --user ada")
    assert done["refused"] == {}
    assert done["done"] == [each["part"] for each in checked["changes"]]
    assert {"the group forkd", "ada in the group forkd", MAPPINGS} <= set(done["done"])
    assert "forkd" in host.run("id -nG ada").split()
    assert said(host, "check --user ada")["ready"]
    assert said(host, "setup --yes --user ada")["changes"] == []
    assert host.run(STATE) != before

    undone = said(host, "undo --yes")
    assert (undone["refused"], undone["left"]) == ({}, {})
    assert host.run(STATE) == before


@IN_A_ROOT
def test_what_was_changed_by_hand_since_stays_and_is_named(host: SystemdRoot) -> None:
    host.run(f"SUDO_USER=ada {FORKD} setup --yes && useradd bob && gpasswd -a bob forkd")
    host.run("echo '# more' >>/etc/sysctl.d/90-forkd.conf && sysctl -qw vm.max_map_count=70000")

    left = host.run(f"{FORKD} undo --yes")

    assert "left: the group forkd: it was changed since\n" in left
    assert "left: /etc/sysctl.d/90-forkd.conf: it was changed since\n" in left
    assert f"left: {MAPPINGS}: it was changed since\n" in left
    assert "ada" not in host.run("getent group forkd")
    assert host.run(f"sysctl -n {MAPPINGS}") == "70000\n"
    assert host.run(f"{FORKD} undo --yes").startswith("nothing to undo")


@IN_A_ROOT
def test_a_host_half_set_up_before_keeps_what_it_had(host: SystemdRoot) -> None:
    """By hand, by an older version, or by a set-up that a crash has ended half way."""
    host.run("groupadd --system forkd && gpasswd -a ada forkd")
    host.run("mkdir -p /etc/tmpfiles.d && echo '# theirs' >/etc/tmpfiles.d/forkd.conf")
    before = host.run(STATE)
    host.run(f"printf '{KILLER}' >/tmp/kill && chmod +x /tmp/kill")
    host.run("groupdel forkd && mount --bind /tmp/kill /usr/bin/gpasswd")

    crashed = host.run(f"{FORKD} setup --yes --user ada", check=False)
    assert "set up" not in crashed
    host.run("umount /usr/bin/gpasswd")
    assert host.run("getent group forkd")
    assert said(host, "undo --dry-run")["changes"]
    assert said(host, "setup --yes --user ada")["refused"] == {}
    assert said(host, "check --user ada")["ready"]
    undone = said(host, "undo --yes")

    assert (undone["refused"], undone["left"]) == ({}, {})
    host.run("groupadd --system forkd && gpasswd -a ada forkd")
    assert host.run(STATE) == before


@IN_A_ROOT
def test_who_is_not_root_may_look_and_is_told(host: SystemdRoot) -> None:
    as_ada = f"cd / && runuser -u ada -- {FORKD}"
    before = host.run(STATE)

    checked = json.loads(host.run(f"{as_ada} check --json", check=False))
    refused = host.run(f"{as_ada} setup --yes", check=False)

    assert "ada in the group forkd" in [each["part"] for each in checked["changes"]]
    assert refused.endswith(
        "error: `forkd host setup` changes this host, which needs root: run it by sudo (host)\n"
    )
    assert "(host)" in host.run(f"{as_ada} undo", check=False)
    assert host.run(STATE) == before


@pytest.mark.needs("root")
@pytest.mark.parametrize("answer", ["n", "y"])
def test_who_is_at_the_terminal_is_asked_once(tmp_path: Path, answer: str) -> None:
    """Set-up of the root of an image, which is asked for in the same way."""
    bad = f"sysctl -qw {BAD} && exec {FORKD} setup --dir {tmp_path}"
    ours, theirs = pty.openpty()
    with (
        open(ours, "r+b", buffering=0) as terminal,  # noqa: PTH123 - a descriptor
        subprocess.Popen(["/bin/sh", "-c", bad], stdin=theirs, stdout=subprocess.PIPE) as asked,  # noqa: S603 - our own
        open(theirs, "rb"),  # noqa: PTH123 - as above
    ):
        terminal.write(f"{answer}\n".encode())
        text = asked.communicate()[0].decode()

    assert text.count("[y/N]") == 1
    assert (tmp_path / "etc/sysctl.d/90-forkd.conf").exists() is (answer == "y")
    assert ("nothing was changed" in text) is (answer == "n")


WORSE = f"""\
set -eu
chown 0:0 /dev/kvm
chmod 600 /dev/kvm
sysctl -qw {BAD} kernel.pid_max=30000
echo never >/sys/kernel/mm/transparent_hugepage/shmem_enabled
id ada >/dev/null 2>&1 || useradd --create-home ada
"""
"""Makes the helper machine a host on which a lot is wrong."""

BETTER = f"""\
{FORKD} undo --yes
chown 0:0 /dev/kvm
chmod 666 /dev/kvm
userdel --remove ada
"""
"""Makes it what it was."""


def shell(script: str) -> str:
    done = subprocess.run(  # noqa: S603 - a test's own
        ["/bin/sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done
    return done.stdout


@pytest.mark.soak(only=True)
@pytest.mark.timeout(600)
@pytest.mark.needs("root", "kvm", "helper", "cgroup2")
def test_devices_cgroups_and_settings_of_the_kernel_are_as_before() -> None:
    favors = Part(Kind.MOUNT_OPTION, "favordynmods:/sys/fs/cgroup")
    favored = parts.read(favors)
    shell(WORSE)
    try:
        parts.write(favors, None)
        assert "favordynmods" not in shell("grep cgroup2 /proc/self/mounts")
        makes_forks_wait = tuning.favordynmods(tuning.look()) is False
        before = shell(STATE)
        done = json.loads(shell(f"{FORKD} setup --yes --user ada --json"))
        assert {
            "the group forkd",
            "ada in the group forkd",
            "ada in the group kvm",
            "the group of /dev/kvm",
            "the mode of /dev/kvm",
            MAPPINGS,
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        } <= set(done["done"])
        assert ("favordynmods of /sys/fs/cgroup" in done["done"]) is makes_forks_wait
        is_on = "favordynmods" in shell("grep cgroup2 /proc/self/mounts")
        assert is_on is makes_forks_wait
        shell("cd / && runuser -u ada -- sh -c ': <>/dev/kvm'")
        assert json.loads(shell(f"{FORKD} check --user ada --json"))["changes"] == []

        undone = json.loads(shell(f"{FORKD} undo --yes --json"))
        assert (undone["refused"], undone["left"]) == ({}, {})
        assert shell(STATE) == before
    finally:
        parts.write(favors, favored)
        shell(BETTER)
