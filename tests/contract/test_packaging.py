"""The systemd unit is one that systemd understands, and means what the daemon means."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from forkd import programs
from forkd.daemon.commands import EXIT_FAILED, EXIT_RESTART
from forkd.daemon.settings import Settings
from tests.support.daemon_program import PROGRAMS
from tests.support.docs import ROOT

UNIT = ROOT / "packaging" / "forkd.service"

INSTALLED = "/opt/forkd/bin"
"""Where the unit has the daemon."""


def options() -> dict[str, str]:
    """Return what the unit says; of what it says twice, the last."""
    pairs = [line.partition("=") for line in UNIT.read_text(encoding="utf-8").splitlines()]
    return {name: value for name, is_option, value in pairs if is_option and name[0] != "#"}


@pytest.mark.needs("systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(INSTALLED, str(PROGRAMS)))
    program = shutil.which("systemd-analyze")
    assert program is not None

    found = subprocess.run([program, "verify", unit], capture_output=True, text=True, check=True)  # noqa: S603 - systemd's

    assert found.stdout + found.stderr == ""  # what it does not know is a warning, and status 0


def test_the_apparmor_profile_is_for_the_installed_vmm_and_gives_user_namespaces() -> None:
    lines = (ROOT / "packaging/apparmor/forkd-vmm").read_text(encoding="utf-8").splitlines()

    assert f"profile {programs.VMM} {INSTALLED}/{programs.VMM} flags=(unconfined) {{" in lines
    assert "  userns," in lines


def test_a_daemon_that_cannot_go_on_is_started_again() -> None:
    unit = options()

    assert unit["Restart"] == "on-failure"
    never = unit["RestartPreventExitStatus"].split()
    assert not {str(EXIT_RESTART), str(EXIT_FAILED)} & set(never)


def test_its_folders_are_where_the_daemon_has_them_and_outlive_it() -> None:
    unit = options()

    assert Path("/run", unit["RuntimeDirectory"]) == Settings.model_fields["run_dir"].default
    assert Path("/var/lib", unit["StateDirectory"]) == Settings.model_fields["state_dir"].default
    assert (unit["KillMode"], unit["RuntimeDirectoryPreserve"]) == ("process", "yes")
