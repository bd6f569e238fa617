"""What building and running need comes by itself; what only tests need comes with them."""

from __future__ import annotations

import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOR_TESTS = (
    "build/reference-client",
    "tools.node install",
    "install_debian_packages tests/debian-packages.txt",
    "-r tests/requirements.lock",
)
"""What brings the published clients, and npm, Debian and Python packages of tests."""


def commands(target: str) -> str:
    """Return what `make` would run for a target, with nothing made yet."""
    words = ["make", "-n", "-B", target]
    return subprocess.run(  # noqa: S603 - make's, and nothing is run
        words, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def packages(name: str) -> set[str]:
    text = (ROOT / name).read_text("utf-8")
    return set(re.findall(r"^([a-z0-9.+-]+) ", text, re.MULTILINE))


def test_setup_brings_nothing_that_only_tests_need() -> None:
    said = commands("setup")

    assert "-r requirements.lock" in said
    assert [each for each in FOR_TESTS if each in said] == []


@pytest.mark.parametrize("target", ["test-setup", "test"])
def test_the_setup_of_tests_brings_both(target: str) -> None:
    said = commands(target)

    assert [each for each in ("-r requirements.lock", *FOR_TESTS) if each not in said] == []


def test_a_soak_brings_what_only_its_tests_need() -> None:
    said = commands("soak")

    assert "build/inspect-client" in said
    assert "build/release-tools" in said


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "arm64")])
def test_on_another_host_a_build_says_so_before_it_installs_anything(
    system: str, machine: str, tmp_path: Path
) -> None:
    script = f"#!/bin/sh\n[ $1 = -s ] && echo {system} || echo {machine}\n"
    (uname := tmp_path / "uname").write_text(script)
    uname.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    done = subprocess.run(  # noqa: S603 - make
        ["make", "build", f"STAMPS={tmp_path}"],  # noqa: S607 - make
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 2
    assert f"and this host is {system} on {machine}." in done.stderr
    assert "the client alone works here" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["uname"]


def test_each_debian_package_is_in_one_list() -> None:
    running, testing = packages("tools/debian-packages.txt"), packages("tests/debian-packages.txt")

    assert {"e2fsprogs", "mmdebstrap"} <= running
    assert {"docker-registry", "prometheus"} <= testing
    assert not running & testing


def test_targets_that_run_tests_set_them_up() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^(check|soak|test-native|test-machine|test-intel): (.*?) ##",
                         makefile, re.MULTILINE)  # fmt: skip

    assert len(targets) == 5
    assert [name for name, needed in targets if "test-setup" not in needed.split()] == []
