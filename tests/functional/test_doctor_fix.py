"""`forkd doctor --fix` asks whoever is at the terminal, needs root, and sets values at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forkd.host.tuning import SETTINGS, Setting, look, wrong
from forkd.service.tuning_files import Plan, plan, set_now

MAPPINGS = next(each for each in SETTINGS if each.name == "vm.max_map_count")
FIX = (sys.executable, "-m", "forkd.cli", "doctor", "--fix")


def refuse(_: str, __: object) -> bool:
    return False


def test_files_for_another_root_need_no_root(tmp_path: Path) -> None:
    done = subprocess.run(  # noqa: S603 - our own program
        [*FIX, "--yes", "--dir", tmp_path], capture_output=True, text=True, check=True
    )

    expected = plan(look(), {}).files
    assert {path: (tmp_path / path).read_text(encoding="utf-8") for path in expected} == expected
    assert ("written: " in done.stdout) is bool(wrong(look()))


@pytest.mark.needs("root")
def test_who_is_not_root_is_told_and_changes_nothing() -> None:
    """In a user namespace without a map everybody is nobody, and may still read our Python."""
    done = subprocess.run(  # noqa: S603 - our own program
        ["unshare", "--user", *FIX, "--yes"],  # noqa: S607 - util-linux is wherever it is
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr == (
        "error: --fix writes to /etc, which needs root: `sudo forkd doctor --fix` (host)\n"
    )


@pytest.mark.needs("root")
def test_a_value_is_set_at_once() -> None:
    path = Path("/") / MAPPINGS.path
    before = path.read_text(encoding="ascii")

    try:
        refused = set_now(Plan({}, (MAPPINGS,)))
        after = path.read_text(encoding="ascii")
    finally:
        path.write_text(before, encoding="ascii")

    assert (refused, after) == ({}, f"{MAPPINGS.wanted}\n")


def test_a_value_that_the_kernel_refuses_is_named() -> None:
    missing = Setting("kernel.forkd_has_none", "1", "nothing", refuse)

    refused = set_now(Plan({}, (missing,)))

    assert list(refused) == [missing.name]
    assert "cannot set kernel.forkd_has_none" in refused[missing.name]
