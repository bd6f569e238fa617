"""`make audit` tells a finding from a database that it could not ask."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tools.audit import (
    FOUND,
    UNREACHABLE,
    Check,
    Outcome,
    State,
    main,
    of_crates,
    of_packages,
    status,
    workflows,
)

if TYPE_CHECKING:
    from pathlib import Path


def ended(code: int, stdout: str = "", stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(["x"], code, stdout, stderr)


def listed(*dependencies: dict[str, object], code: int = 0) -> subprocess.CompletedProcess[str]:
    return ended(code, json.dumps({"dependencies": dependencies, "fixes": []}))


GOOD: dict[str, object] = {"name": "h11", "version": "0.16.0", "vulns": []}
UNKNOWN: dict[str, object] = {"name": "rich", "skip_reason": "Dependency not found"}
VULNERABLE: dict[str, object] = {
    "name": "h11",
    "version": "0.14.0",
    "vulns": [{"id": "CVE-2025-43859", "fix_versions": ["0.16.0"], "aliases": []}],
}


def test_packages_without_vulnerabilities_are_clean() -> None:
    assert of_packages(listed(GOOD)) == Outcome(State.CLEAN)


def test_a_vulnerable_package_is_named_with_the_version_that_mends_it() -> None:
    outcome = of_packages(listed(GOOD, VULNERABLE, UNKNOWN, code=1))

    assert outcome == Outcome(State.FOUND, "h11 0.14.0: CVE-2025-43859 (mended in 0.16.0)")


def test_a_database_that_does_not_know_a_package_has_not_cleared_it() -> None:
    """pip-audit's own exit status is 0 then, even if the database knows no package at all."""
    outcome = of_packages(listed(GOOD, UNKNOWN))

    assert outcome.state is State.UNREACHABLE
    assert outcome.said == "the database does not know 1 of 2 packages: rich"


def test_a_database_that_cannot_be_asked_is_said_with_the_last_words() -> None:
    outcome = of_packages(ended(1, stderr="Traceback\nConnectionError: no such host\n"))

    assert outcome.state is State.UNREACHABLE
    assert outcome.said == "the database cannot be asked:\nConnectionError: no such host"


def test_what_cargo_deny_finds_is_a_finding() -> None:
    assert of_crates(ended(0)) == Outcome(State.CLEAN)
    assert of_crates(ended(1, stderr="error[rejected]")) == Outcome(State.FOUND, "error[rejected]")


def test_advisories_that_cannot_be_fetched_are_no_finding() -> None:
    said = "[ERROR] failed to fetch advisory database by git: Could not resolve host"

    assert of_crates(ended(1, stderr=said)).state is State.UNREACHABLE


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Have these programs, and no others, be found by `workflows`."""
    (folder / "bin").mkdir()
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bin" / name).chmod(0o700)
    monkeypatch.setattr("tools.audit.TOOLS", folder)
    monkeypatch.setenv("PATH", str(folder / "bin"))


def test_what_actionlint_finds_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, actionlint="echo ci.yml:3:1: bad; exit 1")

    assert workflows() == Outcome(State.FOUND, "ci.yml:3:1: bad\n")


def test_actionlint_is_built_where_there_is_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = 'echo "#!/bin/sh" >"$GOBIN/actionlint"; /bin/chmod 700 "$GOBIN/actionlint"'
    programs(tmp_path, monkeypatch, go=make)

    assert workflows() == Outcome(State.CLEAN)


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ({}, "neither actionlint nor Go, which builds it, is installed"),
        (
            {"go": "echo no route to host >&2; exit 1"},
            "actionlint cannot be built: no route to host",
        ),
    ],
)
def test_without_actionlint_workflows_are_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str], said: str
) -> None:
    programs(tmp_path, monkeypatch, **scripts)

    assert workflows() == Outcome(State.UNREACHABLE, said)


def test_a_finding_outweighs_a_database_that_was_not_asked() -> None:
    clean, found, unknown = (Outcome(each) for each in State)

    assert status([clean]) == 0
    assert status([clean, unknown]) == UNREACHABLE
    assert status([unknown, found, clean]) == FOUND


def test_offline_leaves_out_what_needs_the_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Check("here", lambda: Outcome(State.CLEAN))
    there = Check("there", lambda: Outcome(State.UNREACHABLE, "no host"), online=True)
    monkeypatch.setattr("tools.audit.CHECKS", (here, there))

    monkeypatch.setattr("sys.argv", ["audit", "--offline"])
    assert main() == 0
    assert capsys.readouterr().out == "audit: here: ok\n"

    monkeypatch.setattr("sys.argv", ["audit"])
    assert main() == UNREACHABLE
    assert capsys.readouterr().out == "audit: here: ok\naudit: there: NOT CHECKED\n    no host\n"
