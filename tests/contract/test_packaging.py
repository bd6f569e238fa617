"""The systemd unit is one that systemd understands, and means what the daemon means."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from forkd import programs
from forkd.daemon import server, setting_values
from forkd.daemon.commands import EXIT_FAILED, EXIT_RESTART
from forkd.daemon.settings import Settings
from forkd.machine.lifecycle import SHARED_SOCKET
from tests.support.daemon_program import PROGRAMS
from tests.support.docs import ROOT

UNIT = ROOT / "packaging" / "forkd.service"
USER_UNIT = ROOT / "packaging" / "forkd-user.service"
SOCKET = ROOT / "packaging" / "forkd.socket"

INSTALLED = "/opt/forkd/bin"
"""Where the unit has the daemon."""


def options(path: Path = UNIT) -> dict[str, str]:
    """Return what a unit says; of what it says twice, the last."""
    pairs = [line.partition("=") for line in path.read_text(encoding="utf-8").splitlines()]
    return {name: value for name, is_option, value in pairs if is_option and name[0] != "#"}


def test_the_unit_of_a_user_differs_in_its_folders_alone() -> None:
    roots, users = options(), options(USER_UNIT)
    only_roots = ("LimitNOFILE", "NoNewPrivileges", "CapabilityBoundingSet", "Protect")
    others = ("Environment", "RuntimeDirectoryMode", "WantedBy", "After")

    assert {name for name in roots if not name.startswith(only_roots)} == {*users} - {"Environment"}
    same = {name for name in users if name not in others}
    assert {name: users[name] for name in same} == {name: roots[name] for name in same}


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("path", [UNIT, USER_UNIT], ids=lambda path: path.stem)
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path, path: Path) -> None:
    units = [tmp_path / "forkd.service", tmp_path / "forkd.socket"]
    text = path.read_text(encoding="utf-8").replace(INSTALLED, str(PROGRAMS))
    units[0].write_text(text)
    units[1].write_text(path.with_suffix(".socket").read_text(encoding="utf-8"))
    program = shutil.which("systemd-analyze")
    assert program is not None

    found = subprocess.run([program, "verify", *units], capture_output=True, text=True, check=True)  # noqa: S603 - systemd's

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


def test_its_socket_is_where_clients_look_and_the_daemon_would_have_it() -> None:
    roots, users = options(SOCKET), options(USER_UNIT.with_suffix(".socket"))
    settings = Settings.model_fields

    assert roots["ListenStream"] == str(SHARED_SOCKET) == str(settings["socket"].default)
    assert int(roots["SocketMode"], 8) == settings["socket_mode"].default
    assert roots["SocketGroup"] == setting_values.SOCKET_GROUP
    assert int(roots["Backlog"]) == server.BACKLOG
    assert users.keys() == roots.keys() - {"SocketGroup"}
    assert f"FORKD_SOCKET={users['ListenStream']}" in options(USER_UNIT)["Environment"]


def test_its_folders_are_where_the_daemon_has_them_and_outlive_it() -> None:
    unit = options()

    assert Path("/run", unit["RuntimeDirectory"]) == Settings.model_fields["run_dir"].default
    assert Path("/var/lib", unit["StateDirectory"]) == Settings.model_fields["state_dir"].default
    assert (unit["KillMode"], unit["RuntimeDirectoryPreserve"]) == ("process", "yes")
