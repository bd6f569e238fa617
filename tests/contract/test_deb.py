"""What the Debian package is made of fits together; tests/functional/test_deb.py installs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forkd.daemon import config_file, setting_values
from forkd.daemon.settings import Settings
from tools import deb

SCRIPTS = ("postinst", "prerm", "postrm")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_maintainer_script_is_one_that_the_shell_reads(name: str) -> None:
    path = deb.SCRIPTS / name

    subprocess.run(["sh", "-n", path], check=True)  # noqa: S603, S607 - dash

    lines = path.read_text(encoding="utf-8").splitlines()
    assert (lines[0], "set -e" in lines) == ("#!/bin/sh", True)


def test_scripts_know_the_units_folders_and_group_that_the_daemon_has() -> None:
    text = {name: (deb.SCRIPTS / name).read_text(encoding="utf-8") for name in SCRIPTS}
    system = {Path(place).name for place in deb.UNITS.values() if "/system/" in place}

    for name in ("postinst", "postrm"):
        assert f'units="{" ".join(sorted(system, reverse=True))}"' in text[name]
    for name in ("state_dir", "run_dir"):
        assert f"{Settings.model_fields[name].default}" in text["postrm"]
    assert f"groupadd --system {setting_values.SOCKET_GROUP}\n" in text["postinst"]
    assert f"/{deb.HOME}/bin/forkd-daemon uninstall" in text["prerm"]
    assert (str(config_file.SYSTEM),) == deb.CONFFILES


@pytest.mark.parametrize("version", ["", "v1", "1.0-1", "1 0", "1.0_1"])
def test_what_is_no_version_is_refused_by_name(tmp_path: Path, version: str) -> None:
    wheel = tmp_path / f"forkd_vm-{version}-py3-none-manylinux_x86_64.whl"

    with pytest.raises(deb.CannotBuild, match="is no version of a Debian package"):
        deb.build([wheel], tmp_path, version=version or "-")


def test_without_a_wheel_the_way_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(deb.CannotBuild, match="run `make wheel`"):
        deb.build([], tmp_path)
    assert list(tmp_path.iterdir()) == []
