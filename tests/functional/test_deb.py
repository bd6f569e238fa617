"""The Debian package under a real systemd: installed, upgraded, removed and purged by dpkg.

With the fake VMM anywhere, and with real machines where KVM works.  `make deb` builds the package.
"""

from __future__ import annotations

import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.machine.kernel import default_cache
from tests.support.bakes import lead_to_cache
from tests.support.debs import another_version, built_for
from tests.support.docs import ROOT
from tests.support.real_host import RECIPE, STATE_PARENT, TAG
from tests.support.service_host import make_host, until
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.bakes import Bakes
    from tests.support.systemd_root import SystemdRoot

pytestmark = [
    pytest.mark.needs("root", "systemd", "deb"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1800),  # three installations, perhaps in an emulated machine
]

REAL = pytest.param(
    "real", marks=[pytest.mark.needs("kvm", "cgroup2", "binaries"), pytest.mark.together("numpy")]
)

STATE = "/var/lib/forkd"

FAKE = """\
vmm = "{host}/fake-vmm"
agent = "{host}/agent"
recipe_dirs = ["{host}/recipes"]
cgroups = "off"
jail = "off"
network_slots = 0
disk_reserve_mib = 16
"""

REAL_SETTINGS = "disk_reserve_mib = 16\n"

WATCHDOG_S = 20
"""After how many seconds a daemon hangs: one that runs in an emulated machine is slow."""

RESTART_TIMEOUT_S = 180.0
"""How long systemd may take to find that a daemon has ended or hangs, and to start another."""

UNITS = ("forkd.socket", "forkd.service")

KERNEL_HAS = """
find /sys/fs/cgroup -type d -name '*forkd*'
nft list tables
ls /sys/class/net
ls -A /run/netns 2>/dev/null
cut -d ' ' -f 5 /proc/self/mountinfo | grep forkd | sort
"""
"""Prints what a daemon makes in the kernel, and its machines: cgroups, tables, taps, mounts."""


class Installed:
    """A systemd that the package of another version is installed in.

    Attributes:
        tag: A snapshot to fork.
        kernel_had: What the kernel had before the package was there.
    """

    def __init__(self, machine: SystemdRoot, folder: Path, tag: str, kernel_had: str) -> None:
        self.machine = machine
        self.folder = folder
        self.tag = tag
        self.kernel_had = kernel_had

    def sandboxes(self) -> list[str]:
        """Return those that run, as `forkd ls` lists them."""
        said = self.machine.run("forkd ls")
        return sorted(re.findall(rf"^(sb-\w+) +{self.tag} +running", said, re.MULTILINE))

    def answers(self, sandbox: str) -> bool:
        """Whether a program runs in a sandbox."""
        return self.machine.run(f"forkd exec {sandbox} -- echo hello") == "hello\n"

    def is_there(self, path: str) -> bool:
        return self.machine.run(f"test -e {path} && echo yes", check=False) == "yes\n"

    async def after(self, how: str) -> None:
        """End the daemon in some way; return once another runs."""
        before = {"0", self.machine.shown("forkd", "MainPID")}
        self.machine.run(how)
        await until(lambda: self.machine.shown("forkd", "MainPID") not in before, RESTART_TIMEOUT_S)
        self.machine.run("systemctl start forkd")  # joins its start, which ends once it listens

    def processes(self) -> str:
        """Return the processes of machines and zygotes."""
        return self.machine.run("ps -eo args | grep -E '[f]orkd-vmm|[f]ake-vmm'", check=False)

    def check_purged(self) -> None:
        """Nothing of the package is left, nor of what its daemon made."""
        assert self.processes() == ""
        for path in ("/usr/lib/forkd", "/etc/forkd", "/run/forkd", f"{STATE}/forkd.db"):
            assert not self.is_there(path), path
        assert self.machine.run(f"ls -A {STATE}") == ""
        assert self.machine.run("getent group forkd", check=False) == ""
        assert self.machine.run(KERNEL_HAS, check=False) == self.kernel_had
        assert self.machine.run("find /etc/systemd /var/lib/systemd -name '*forkd*'") == ""


@contextmanager
def machine_with(kind: str, request: pytest.FixtureRequest) -> Iterator[Installed]:
    STATE_PARENT.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name,
        tempfile.TemporaryDirectory(prefix="test-deb-", dir=STATE_PARENT) as state,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        settings, tag = REAL_SETTINGS, str(TAG)
        linked = [] if kind == "fake" else [default_cache()]  # what stored images are links to
        if kind == "fake":
            make_host(folder, Path("/run/none")).recipe()
            settings, tag = FAKE.format(host=folder), "py"
        else:
            bakes: Bakes = request.getfixturevalue("bakes")
            bakes.of(RECIPE).copy_to(Path(state))
            lead_to_cache(Path(state))
        (folder / "forkd.toml").write_text(settings)
        before = another_version(built_for("deb12"), "0.0.9", folder)
        with systemd_root(folder, [ROOT, *linked], {Path(state): STATE}) as machine:
            # The host's own services must not start, and must not be asked about.
            machine.run("rm -f /usr/sbin/policy-rc.d")
            # Each installation would index all manual pages of this host, for minutes if emulated.
            machine.run("rm -f /var/lib/man-db/auto-update")
            # An administrator's settings are there before the package.
            machine.run(f"mkdir -p /etc/forkd && cat {folder}/forkd.toml >/etc/forkd/forkd.toml")
            had = machine.run(KERNEL_HAS, check=False)
            machine.run(f"dpkg -i --force-confold {before} 2>&1")
            yield Installed(machine, folder, tag, had)


@pytest.mark.parametrize("kind", ["fake", REAL])
async def test_the_package_is_installed_upgraded_removed_and_purged(
    kind: str, request: pytest.FixtureRequest
) -> None:
    with machine_with(kind, request) as installed:
        machine = installed.machine
        states = [machine.shown(unit, "ActiveState") for unit in UNITS]
        assert states == ["active", "active"], machine.run("journalctl -u forkd --no-pager")
        assert [machine.run(f"systemctl is-enabled {unit}") for unit in UNITS] == ["enabled\n"] * 2
        assert machine.run("stat -c '%a %G' /run/forkd/forkd.sock") == "660 forkd\n"

        machine.run("forkd-daemon config check")
        if kind == "fake":
            machine.run("forkd snapshot create py --recipe fake")
        machine.run(f"forkd fork {installed.tag} -n 2")
        before = installed.sandboxes()
        assert len(before) == 2
        assert all(installed.answers(each) for each in before)

        # Its end by a signal: a client that asks meanwhile waits, and sandboxes are adopted.
        await installed.after("systemctl kill --kill-who=main -s KILL forkd && forkd ls")
        assert installed.sandboxes() == before
        assert all(installed.answers(each) for each in before)

        # Its event loop hangs.
        machine.run(
            "mkdir /etc/systemd/system/forkd.service.d &&"
            f" printf '[Service]\\nWatchdogSec={WATCHDOG_S}\\nTimeoutAbortSec=1\\n'"
            " >/etc/systemd/system/forkd.service.d/watchdog.conf &&"
            " systemctl daemon-reload && systemctl restart forkd"
        )
        await installed.after("kill -STOP $(systemctl show --property=MainPID --value forkd)")
        machine.run("rm -r /etc/systemd/system/forkd.service.d && systemctl daemon-reload")
        assert installed.sandboxes() == before

        # Another version.
        daemon = machine.shown("forkd", "MainPID")
        machine.run(f"dpkg -i --force-confold {built_for('deb12')} 2>&1")
        assert machine.run("dpkg-query -W -f '${Version}' forkd") != "0.0.9"
        assert machine.shown("forkd", "MainPID") not in {daemon, "0"}
        assert installed.sandboxes() == before
        assert all(installed.answers(each) for each in before)
        assert (
            machine.run("cat /etc/forkd/forkd.toml")
            == (installed.folder / "forkd.toml").read_text()
        )

        assert machine.run(KERNEL_HAS, check=False) != installed.kernel_had

        # Removed: sandboxes end, snapshots and settings stay.
        assert installed.processes() != ""
        machine.run("dpkg -r forkd 2>&1")
        assert installed.processes() == ""
        assert not installed.is_there("/usr/lib/forkd")
        assert not installed.is_there("/run/forkd/forkd.sock")
        assert installed.is_there(f"{STATE}/snapshots/{installed.tag}/manifest.json")
        assert installed.is_there("/etc/forkd/forkd.toml")

        # Installed again: what was stored is there, and the daemon runs.
        machine.run(f"dpkg -i --force-confold {built_for('deb12')} 2>&1")
        assert installed.tag in machine.run("forkd snapshot ls")
        machine.run(f"forkd fork {installed.tag}")

        machine.run("dpkg -P forkd 2>&1")
        installed.check_purged()
