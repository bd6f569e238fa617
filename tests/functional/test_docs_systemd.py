"""docs/howto/run-under-systemd.md, word for word: each command of the page as it is written there.

The commands are read from the page and typed into a fresh Debian whose first process is systemd,
with the fake VMM.  tests/functional/test_deb.py and test_systemd_machines.py have real machines.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.installed import VERSION
from tests.support import fresh_root
from tests.support.debs import another_version, built_for
from tests.support.docs import ROOT, blocks, commands
from tests.support.service_host import make_host
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.systemd_root import SystemdRoot

pytestmark = [
    pytest.mark.needs("root", "systemd", "mmdebstrap", "network", "binaries", "deb", "deb13"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1800),
]

PAGE = ROOT / "docs/howto/run-under-systemd.md"
COMMANDS = commands(PAGE)

PACKAGE, PIP, UNITS = "Install the Debian package", "Install with pip", "Install the units"
SETTINGS, USER = "Change settings", "Without root"
UPDATE, UNINSTALL, UNINSTALL_USER = "Update", "Uninstall", "A unit of your own"

SYSTEM = ("ca-certificates", "dbus", "libpam-systemd", "systemd")
"""What a server has before forkd; `apt install` of ours brings the rest."""

FOR_PIP = (*SYSTEM, "e2fsprogs", "nftables", "polkitd", "python3", "python3-venv", "uidmap")

DROP_IN = """\
[Service]
Environment=FORKD_CGROUPS=off FORKD_JAIL=off FORKD_NETWORK_SLOTS=0 FORKD_DISK_RESERVE_MIB=16
Environment=FORKD_VMM={host}/fake-vmm FORKD_AGENT={host}/agent FORKD_RECIPE_DIRS={host}/recipes
"""

OTHERS = ("/var/log", "/var/cache", "/var/lib/apt", "/var/lib/dpkg")
"""Where packages of others, and systemd's journal, write whatever is installed."""

FORBIDS = (
    "printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d && chmod +x /usr/sbin/policy-rc.d"
)


class Walk:
    """A systemd whose administrator reads the page.

    Attributes:
        folder: A folder of the test's.
        where: The folder that commands are typed in.
    """

    def __init__(self, machine: SystemdRoot, folder: Path) -> None:
        self.machine = machine
        self.folder = self.where = folder

    def section(self, heading: str, replaced: dict[str, str] | None = None) -> list[str]:
        """Type the commands of a section, and `y` where one asks; return what each one says."""
        said = []
        for command in COMMANDS[heading]:
            line = command
            for text, other in (replaced or {}).items():
                line = line.replace(text, other)
            said.append(self.type(line))
        return said

    def type(self, line: str) -> str:
        """Type a command; only what installs packages has a network.

        A doctor may find something wrong with the host of these tests.
        """
        installs = re.match(r"apt(-get)? (install|update)|\S+/pip install", line) is not None
        return self.machine.typed(
            f"cd {self.where} && export DEBIAN_FRONTEND=noninteractive && {line}",
            "y\n",
            network=installs,
            check="doctor" not in line,
        )

    def logged_in(self, lines: list[str]) -> str:
        """Have a user log in and type lines, one after the other, and `y` where one asks."""
        script = self.folder / "typed"
        script.write_text("\n".join(["set -e", *lines]))
        session = "systemd-run --quiet --pty --wait --collect --uid=ada --property=PAMName=login"
        return self.machine.typed(
            f"{session} --property=WorkingDirectory=/home/ada sh {script}", "y\n"
        )

    def running(self) -> list[str]:
        """Return the sandboxes that run, as `forkd ls` lists them."""
        said = self.machine.run("forkd ls")
        return sorted(re.findall(r"^(sb-\w+) +py +running", said, re.MULTILINE))

    def processes(self) -> str:
        """Return the processes of machines and zygotes, as files of theirs."""
        return self.machine.run("grep -sl '[f]ake-vmm' /proc/[0-9]*/cmdline", check=False)

    def is_there(self, path: str) -> bool:
        return self.machine.run(f"ls -d {path}", check=False) == f"{path}\n"

    def files(self, name: str = "*") -> set[str]:
        """Return the paths of the root's files of a name, without what packages of others write."""
        pruned = " -o ".join(f"-path {each}" for each in OTHERS)
        said = self.machine.run(f"find / -xdev \\( {pruned} \\) -prune -o -name '{name}' -print")
        return set(said.splitlines())

    def are_active(self) -> list[str]:
        return [self.machine.shown(unit, "ActiveState") for unit in ("forkd.socket", "forkd")]


@contextmanager
def walk(release: str, packages: tuple[str, ...], name: str = "systemd") -> Iterator[Walk]:
    """Start a server on which forkd, once it is installed, has the fake VMM."""
    lower = fresh_root.made(f"{release}-{name}", packages, release)
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        make_host(folder, Path("/run/none")).recipe()
        (folder / "drop-in").write_text(DROP_IN.format(host=folder))
        shared = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
        with systemd_root(folder, shared, lower=lower) as machine:
            parents = sorted({str(each) for path in shared for each in path.parents})
            machine.run(f"chmod a+rx {' '.join(parents)}")
            machine.run(
                "mkdir /etc/systemd/system/forkd.service.d &&"
                f" cp {folder}/drop-in /etc/systemd/system/forkd.service.d/override.conf"
            )
            yield Walk(machine, folder)


def test_a_test_walks_every_section_that_has_commands() -> None:
    walked = {PACKAGE, PIP, UNITS, SETTINGS, USER, UPDATE, UNINSTALL, UNINSTALL_USER}

    assert set(COMMANDS) == walked


@pytest.mark.parametrize(("release", "mark"), [("bookworm", "deb12"), ("trixie", "deb13")])
def test_the_debian_package(release: str, mark: str) -> None:
    package = built_for(mark)
    with walk(release, SYSTEM) as walked:
        machine = walked.machine
        shutil.copy(package, walked.folder)
        walked.type("apt-get update")
        named = walked.files("*forkd*")

        # Where a policy forbids to start services, nothing is started, and the page says how.
        machine.run(FORBIDS)
        walked.type(f"apt install ./{package.name}")
        assert walked.are_active() == ["inactive", "inactive"]
        assert machine.run("systemctl is-enabled forkd.socket forkd") == "enabled\nenabled\n"
        machine.run("rm /usr/sbin/policy-rc.d")
        walked.type("systemctl start forkd")
        assert walked.are_active() == ["active", "active"]
        walked.type("apt purge forkd")
        assert walked.files("*forkd*") == named
        before_it = walked.files()  # what it needs is there now, and stays

        said = walked.section(PACKAGE, {f"forkd_{VERSION}+deb12_amd64.deb": package.name})
        assert walked.are_active() == ["active", "active"]
        assert "PASS  daemon: " in said[1]
        assert "Active: active (running)" in said[2]
        walked.type("forkd snapshot create py --recipe fake")
        walked.type("forkd fork py -n 2")
        before = walked.running()
        assert len(before) == 2

        # Settings of the page; another version keeps them, and the sandboxes.
        machine.run(f"printf %s {shlex.quote(settings())} >/etc/forkd/forkd.toml")
        walked.section(SETTINGS)
        assert walked.running() == before
        newer = another_version(package, "9.0.0", walked.folder)
        walked.type(f"apt install ./{newer.name}")
        assert machine.run("dpkg-query -W -f '${Version}' forkd") == "9.0.0"
        assert walked.running() == before
        assert machine.run("cat /etc/forkd/forkd.toml") == settings()

        walked.type("apt remove forkd")
        assert walked.processes() == ""
        assert walked.is_there("/var/lib/forkd/snapshots/py")
        assert walked.is_there("/etc/forkd/forkd.toml")
        walked.type("apt purge forkd")
        # A folder that settings have chosen stays, as the page says.
        assert walked.files() - before_it == {"/fast", "/fast/forkd"}
        assert not walked.is_there("/run/forkd")
        assert machine.run("getent group forkd", check=False) == ""


def test_pip_and_the_units_of_the_system_and_of_a_user() -> None:
    with walk("bookworm", FOR_PIP, "pip") as walked:
        machine = walked.machine
        walked.where = ROOT  # a built checkout
        walked.section(PIP)
        said = walked.section(UNITS)
        assert "Active: active (running)" in said[1]
        walked.type("forkd snapshot create py --recipe fake")
        walked.type("forkd fork py -n 2")
        before = walked.running()
        assert len(before) == 2

        machine.run(
            f"mkdir -p /etc/forkd && printf %s {shlex.quote(settings())} >/etc/forkd/forkd.toml"
        )
        walked.section(SETTINGS)
        assert walked.running() == before
        *_, listed = walked.section(UPDATE)
        assert all(each in listed for each in before)

        of_a_user(walked)
        assert walked.running() == before

        walked.section(UNINSTALL)
        assert walked.processes() == ""
        left = "find /etc/systemd /var/lib /run /opt /usr/local /fast -name '*forkd*'"
        assert machine.run(left) == ""


def of_a_user(walked: Walk) -> None:
    machine = walked.machine
    machine.run("useradd --create-home ada")
    units = "/home/ada/.config/systemd/user"
    drop_in = f"{units}/forkd.service.d"
    text = (walked.folder / "drop-in").read_text()
    (walked.folder / "drop-in").write_text(text.replace("FORKD_CGROUPS=off ", ""))
    machine.run(
        f"runuser -u ada -- mkdir -p {drop_in} &&"
        f" runuser -u ada -- cp {walked.folder}/drop-in {drop_in}/override.conf"
    )
    made = ["forkd snapshot create py --recipe fake", "forkd fork py", "forkd ls"]

    said = walked.logged_in([*COMMANDS[USER], *made])
    assert len(re.findall(r"^sb-\w+ +py +running", said, re.MULTILINE)) == 1
    # Its processes outlive the login.
    assert machine.shown("user@$(id -u ada)", "ActiveState") == "active"

    walked.logged_in([COMMANDS[USER][2], *COMMANDS[UNINSTALL_USER]])
    assert machine.run("find /home/ada /run/user -name '*forkd*'") == ""


def settings() -> str:
    (block,) = blocks(PAGE, "toml")
    return block.code
