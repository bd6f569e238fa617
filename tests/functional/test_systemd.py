"""The unit under a real systemd: what docs/howto/run-under-systemd.md says of it."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_program import PROGRAMS
from tests.support.docs import ROOT
from tests.support.service_host import make_host, until
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.systemd_root import SystemdRoot

pytestmark = [pytest.mark.needs("root", "systemd"), pytest.mark.timeout(180)]

SHARED = [ROOT, Path(sys.prefix), Path(sys.base_prefix)]
"""Folders with what the daemon is made of."""

WATCHDOG = "WatchdogTimestampMonotonic"
"""When systemd was last told that the daemon's event loop turns."""

DROP_IN = """\
[Service]
Environment=FORKD_CGROUPS=off FORKD_JAIL=off FORKD_NETWORK_SLOTS=0 FORKD_DISK_RESERVE_MIB=16
Environment=FORKD_VMM={host}/fake-vmm FORKD_AGENT={host}/agent FORKD_RECIPE_DIRS={host}/recipes
"""


@pytest.fixture
def serving() -> Iterator[SystemdRoot]:
    """A systemd with the unit, whose daemon has the fake VMM."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name:
        folder = Path(name)
        host = folder / "host"
        host.mkdir()
        make_host(host, Path("/run/forkd")).recipe()
        with systemd_root(folder, SHARED) as machine:
            (folder / "drop-in").write_text(DROP_IN.format(host=host))
            machine.run(
                f"ln -s {PROGRAMS}/forkd {PROGRAMS}/forkd-daemon /usr/local/bin/ &&"
                " mkdir /etc/systemd/system/forkd.service.d &&"
                f" cp {folder}/drop-in /etc/systemd/system/forkd.service.d/override.conf &&"
                " forkd host install-service --yes"
            )
            yield machine


@pytest.fixture
def machine(serving: SystemdRoot) -> SystemdRoot:
    """The same, in which three sandboxes run."""
    serving.run("forkd snapshot create py --recipe fake && forkd fork py -n 3")
    return serving


def sandboxes(machine: SystemdRoot) -> list[str]:
    return sorted(re.findall(r"^(sb-\w+) +py +running", machine.run("forkd ls"), re.MULTILINE))


async def after(machine: SystemdRoot, how: str) -> str:
    """End the daemon in some way; return what the journal says once the next one listens."""
    before = machine.shown("forkd", "MainPID")
    machine.run(how)

    def is_another() -> bool:
        is_active = machine.shown("forkd", "ActiveState") == "active"
        return is_active and machine.shown("forkd", "MainPID") not in {before, "0"}

    await until(is_another)
    return machine.run("journalctl --unit=forkd --no-pager")


async def told_again(machine: SystemdRoot) -> None:
    """Return once systemd was told again that the daemon's event loop turns."""
    before = machine.shown("forkd", WATCHDOG)
    await until(lambda: machine.shown("forkd", WATCHDOG) != before)


async def test_sandboxes_outlive_every_end_of_the_daemon(machine: SystemdRoot) -> None:
    before = sandboxes(machine)
    assert len(before) == 3

    for how in ("systemctl restart forkd", "systemctl kill --kill-who=main -s KILL forkd"):
        await after(machine, how)
        assert sandboxes(machine) == before
    machine.run("systemctl stop forkd")
    assert machine.shown("forkd", "Result") == "success"
    assert machine.shown("forkd", "ActiveState") == "inactive"
    assert sandboxes(machine) == before, "the socket starts the daemon for a client"
    assert machine.shown("forkd", "ActiveState") == "active"
    assert machine.run(f"forkd exec {before[0]} -- echo hello") == "hello\n"

    settings = "env $(systemctl show -P Environment forkd)"
    said = machine.run(
        f"{settings} sh -c 'forkd host remove-service --yes && forkd-daemon uninstall --state'"
    )
    assert "removed folders: /run/forkd, /var/lib/forkd" in said
    assert machine.run("ls -d /run/forkd /var/lib/forkd", check=False).count("No such file") == 2


UNITS = "/etc/systemd/system/forkd.service /etc/systemd/system/forkd.socket"


@pytest.mark.soak(only=True)
def test_units_are_put_in_place_once_and_taken_back_unless_they_were_changed(
    serving: SystemdRoot,
) -> None:
    written = serving.run(f"sha256sum {UNITS}")
    assert f"ExecStart={PROGRAMS}/forkd-daemon serve" in serving.run(f"cat {UNITS}")
    assert "SocketGroup" not in serving.run(f"cat {UNITS}"), "this host has no such group"

    said = serving.run("forkd host install-service --yes")
    assert said.count("there already") == 2
    assert serving.run(f"sha256sum {UNITS}") == written
    assert "nobody to ask" in serving.run("forkd host install-service", check=False)
    assert "nothing was changed" in serving.run("forkd host remove-service --dry-run")

    serving.run("groupadd --system forkd")  # so that the socket's file is another
    said = serving.run("forkd host install-service --yes")
    assert "forkd.socket: to write again" in said
    assert "SocketGroup=forkd" in serving.run(f"cat {UNITS}")

    serving.run("sed -i s/WatchdogSec=60/WatchdogSec=61/ /etc/systemd/system/forkd.service")
    said = serving.run("forkd host install-service --yes", check=False)
    assert "forkd.service is not as `forkd host install-service` has made it" in said
    said = serving.run("forkd host remove-service --yes", check=False)
    assert "forkd.service: stays: it was changed since" in said
    assert serving.run(f"ls {UNITS}", check=False).count("No such file") == 1

    serving.run("rm /etc/systemd/system/forkd.service && mkdir -p /usr/lib/systemd/system")
    serving.run("touch /usr/lib/systemd/system/forkd.service")
    said = serving.run("forkd host install-service --yes", check=False)
    assert "a package has /usr/lib/systemd/system/forkd.service already" in said
    assert "nothing to remove" in serving.run("forkd host remove-service --yes")
    serving.run("systemctl kill forkd; forkd-daemon uninstall --state")


@pytest.mark.soak(only=True)
async def test_a_daemon_that_hangs_is_ended_and_started_again(machine: SystemdRoot) -> None:
    before = sandboxes(machine)
    machine.run(
        "printf '[Service]\\nWatchdogSec=2\\nTimeoutAbortSec=1\\n'"
        " >/etc/systemd/system/forkd.service.d/watchdog.conf &&"
        " systemctl daemon-reload && systemctl restart forkd"
    )
    daemon = machine.shown("forkd", "MainPID")
    await told_again(machine)
    await told_again(machine)
    assert machine.shown("forkd", "MainPID") == daemon

    await after(machine, "kill -STOP $(systemctl show --property=MainPID --value forkd)")

    assert sandboxes(machine) == before
    assert machine.shown("forkd", "NRestarts") == "1"
    machine.run("systemctl stop forkd.socket forkd && forkd-daemon uninstall --state")


@pytest.mark.soak(only=True)
def test_a_user_has_a_daemon_of_its_own() -> None:
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        make_host(folder, Path("/run/none")).recipe()
        with systemd_root(folder, SHARED) as machine:
            parents = {str(each) for path in SHARED for each in path.parents}
            machine.run(f"chmod a+rx {' '.join(sorted(parents))}")
            machine.run("useradd --create-home ours && loginctl enable-linger ours")
            uid = machine.run("id -u ours").strip()
            machine.run(f"systemctl start user@{uid}")
            runtime = f"/run/user/{uid}"
            url = f"unix://{runtime}/forkd/forkd.sock"
            ours = f"runuser -u ours -- env XDG_RUNTIME_DIR={runtime} FORKD_URL={url}"
            units = "/home/ours/.config/systemd/user"
            drop_in = DROP_IN.format(host=folder)
            (folder / "drop-in").write_text(drop_in.replace("FORKD_CGROUPS=off ", ""))
            machine.run(
                f"{ours} mkdir -p {units}/forkd.service.d &&"
                f" cp {folder}/drop-in {units}/forkd.service.d/override.conf &&"
                f" {ours} {PROGRAMS}/forkd host install-service --user --yes"
            )

            machine.run(f"{ours} {PROGRAMS}/forkd snapshot create py --recipe fake")
            made = machine.run(f"{ours} {PROGRAMS}/forkd fork py").split()[0]
            machine.run(f"{ours} systemctl --user restart forkd")
            assert f"{made}  py        running" in machine.run(f"{ours} {PROGRAMS}/forkd ls")

            said = machine.run(
                f"{ours} env $({ours} systemctl --user show -P Environment forkd) sh -c"
                f" '{PROGRAMS}/forkd host remove-service --user --yes &&"
                f" {PROGRAMS}/forkd-daemon uninstall --state'"
            )
            assert f"removed folders: {runtime}/forkd, /home/ours/" in said
            assert machine.run(f"ls {units}").split() == ["forkd.service.d"]
