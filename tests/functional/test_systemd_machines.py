"""Real machines of a daemon under a real systemd live on when the daemon is killed."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.machine.kernel import default_cache
from tests.support.bakes import lead_to_cache
from tests.support.daemon_program import PROGRAMS
from tests.support.real_host import REAL, RECIPE, ROOT, STATE_PARENT, TAG
from tests.support.service_host import until
from tests.support.systemd_root import systemd_root

if TYPE_CHECKING:
    from tests.support.bakes import Bakes

pytestmark = [
    REAL,
    pytest.mark.needs("systemd"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(600),
]

SHARED = [ROOT, Path(sys.prefix), Path(sys.base_prefix), default_cache()]
"""Folders with what the daemon is made of, and what stored images are links to."""

SETTINGS = "network_slots = 0\ndisk_reserve_mib = 16\n"


def listed(said: str) -> list[str]:
    """Return the sandboxes that run, by id."""
    return sorted(re.findall(r"^(sb-\w+) +\S+ +running", said, re.MULTILINE))


async def test_a_daemon_that_is_killed_is_started_again_and_adopts_its_machines(
    bakes: Bakes,
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as name,
        tempfile.TemporaryDirectory(prefix="test-systemd-", dir=STATE_PARENT) as state,
    ):
        bakes.of(RECIPE).copy_to(Path(state))
        lead_to_cache(Path(state))
        folder = Path(name)
        (folder / "forkd.toml").write_text(SETTINGS)
        with systemd_root(folder, SHARED, {Path(state): "/var/lib/forkd"}) as machine:
            said = machine.run(
                f"ln -s {PROGRAMS}/forkd {PROGRAMS}/forkd-daemon /usr/local/bin/ &&"
                f" mkdir -p /etc/forkd && cat {folder}/forkd.toml >/etc/forkd/forkd.toml &&"
                " forkd host install-service --yes || journalctl -u forkd --no-pager"
            )
            assert machine.shown("forkd", "ActiveState") == "active", said
            machine.run(f"forkd fork {TAG} -n 2")
            before = listed(machine.run("forkd ls"))
            machines = machine.run("pgrep forkd-vmm")
            assert len(before) == 2
            daemon = machine.shown("forkd", "MainPID")

            # The socket stays, so a client that asks at once waits for the next daemon.
            machine.run("systemctl kill --kill-who=main -s KILL forkd")
            after = machine.run("forkd ls")

            assert listed(after) == before
            await until(lambda: machine.shown("forkd", "ActiveState") == "active")
            assert machine.shown("forkd", "MainPID") not in {daemon, "0"}
            same = set(machine.run("pgrep forkd-vmm").split()) & set(machines.split())
            assert len(same) >= len(before), "the zygote has ended, its machines have not"
            for each in before:
                assert machine.run(f"forkd exec {each} -- echo hello") == "hello\n"

            machine.run("forkd host remove-service --yes")
            # It cannot remove the state folder itself, which is a mount here.
            machine.run("forkd-daemon uninstall --state", check=False)
            assert machine.run("pgrep forkd-vmm", check=False) == ""
            assert machine.run("ls -A /var/lib/forkd") == ""
