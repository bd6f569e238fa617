"""The TypeScript SDK: its package is whole, small and clean, and its words are the daemon's."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from forkd import __version__
from forkd.errors import HINTS
from tests.support.docs import ROOT
from tests.support.npm_project import package
from tools import node
from tools.check_repo import HOSTS

if TYPE_CHECKING:
    from pathlib import Path

    from tools.typescript_package import Package

__all__ = ["package"]

SOURCES = node.TYPESCRIPT / "src"
MANIFEST: dict[str, Any] = json.loads((node.TYPESCRIPT / "package.json").read_text())
LOCK = (node.TYPESCRIPT / "package-lock.json").read_text(encoding="utf-8")

OF_PYTHON = {"sandbox_lost"}
"""The code of `ForkExecutor`, which has no counterpart in TypeScript."""

CLEAN_TIMEOUT_S = 50


@pytest.mark.needs("node")
def test_the_package_has_what_runs_and_its_types_and_nothing_else(package: Package) -> None:
    modules = [path.stem for path in SOURCES.glob("*.ts")]
    compiled = [f"dist/{name}{end}" for name in modules for end in (".js", ".d.ts")]

    assert sorted(package.files) == sorted(["LICENSE", "README.md", "package.json", *compiled])


@pytest.mark.needs("node")
@pytest.mark.parametrize("words", [("publint", "--strict"), ("attw", "--profile", "esm-only")])
def test_every_kind_of_importer_finds_the_package(package: Package, words: tuple[str, ...]) -> None:
    program, *options = words
    done = subprocess.run(  # noqa: S603 - of the lock file
        [str(node.PROGRAMS / program), *options, str(package.archive)],
        cwd=package.archive.parent,
        env={**node.environment(), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=CLEAN_TIMEOUT_S,
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_runs_while_the_package_is_installed() -> None:
    """So that it can be installed where there is no Node.js, by Deno or Bun."""
    assert not {"preinstall", "install", "postinstall"} & set(MANIFEST["scripts"])
    assert set(MANIFEST["dependencies"]) == {"ws"}


def test_its_version_and_licence_are_those_of_the_project() -> None:
    assert MANIFEST["version"] == __version__
    assert (node.TYPESCRIPT / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_no_package_registry_is_named() -> None:
    assert [host for host in HOSTS if host in LOCK] == []
    assert '"resolved"' not in LOCK


def test_errors_have_the_hints_that_they_have_in_python() -> None:
    text = (SOURCES / "root-error.ts").read_text(encoding="utf-8").partition("};")[0]

    assert set(re.findall(r'^  "?([a-z_:]+)"?:', text, re.MULTILINE)) == set(HINTS) - OF_PYTHON


def test_every_error_class_can_be_imported() -> None:
    codes = json.loads((ROOT / "protocol/rest/errors.json").read_text(encoding="utf-8"))
    exported = (SOURCES / "index.ts").read_text(encoding="utf-8")
    made = (SOURCES / "errors.gen.ts").read_text(encoding="utf-8")

    assert 'export * from "./errors.gen.js";' in exported
    assert "ForkdError }" in exported
    classes = set(re.findall(r"^export class (\w+) ", made, re.MULTILINE)) | {"ForkdError"}
    assert classes == {each["class"] for each in codes.values()}


@pytest.mark.parametrize("words", [("install",), ("npm", "install", "x")])
def test_without_nodejs_the_error_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(node, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.argv", ["node", *words])

    assert node.main() == 1
    assert capsys.readouterr().err == node.MISSING


@pytest.mark.needs("node")
def test_npm_can_be_run_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["node", "npm", "--version"])

    assert node.main() == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capfd.readouterr().out)


def test_a_program_that_fails_is_heard(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "false").write_text("#!/bin/sh\necho why\nexit 3\n")
    (tmp_path / "false").chmod(0o700)
    monkeypatch.setattr(node, "PROGRAMS", tmp_path)
    monkeypatch.setattr(node, "installed", lambda: True)

    assert node.check("false") == 3
    assert capfd.readouterr().out == "why\n"
