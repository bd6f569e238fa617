"""What is installed is what was locked: each package by its digest, and from nowhere else."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.support.docs import ROOT
from tools import split_lock

if TYPE_CHECKING:
    from pathlib import Path

REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?P<rest>(?: \\\n +\S+)*)$", re.MULTILINE
)
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
COMMANDS = ("build", "clippy", "fetch", "metadata", "run", "test")
"""What cargo changes a lock file with, unless it is told not to."""


def tracked(*patterns: str) -> list[Path]:
    words = ["git", "ls-files", "--", *patterns]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - git
    return [ROOT / name for name in listed.stdout.split()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


LOCKS = tracked("*requirements.lock", "*requirements.txt", ":!recipes/")
"""Not what recipes put into guests, which is theirs to pin."""
MAKE = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")


@pytest.mark.parametrize("path", LOCKS, ids=name_of)
def test_each_python_package_is_pinned_with_digests(path: Path) -> None:
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)

    found = list(REQUIREMENT.finditer(text))

    assert found
    assert [each["name"] for each in found if not DIGEST.search(each["rest"])] == []
    assert REQUIREMENT.sub("", text).strip() == ""  # so that nothing else stands there


def test_pip_takes_nothing_that_has_no_digest() -> None:
    taken = [
        line for line in MAKE.splitlines() if re.search(r"\bpip (install|download)\b.* -r ", line)
    ]

    assert taken
    assert [line for line in taken if "--require-hashes" not in line] == []


def test_the_lock_has_every_package_that_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    asked = {_plain(re.split(r"[\[<>=!~; ]", each)[0]) for each in project["dependencies"] + extras}
    texts = [path.read_text(encoding="utf-8") for path in (split_lock.RUN, split_lock.TESTS)]
    locked = REQUIREMENT.finditer("".join(texts))

    assert asked - {_plain(each["name"]) for each in locked} <= {_plain(project["name"])}


def test_each_package_is_locked_where_it_is_needed_and_nowhere_else() -> None:
    texts = {path: path.read_text("utf-8") for path in (split_lock.RUN, split_lock.TESTS)}

    assert split_lock.split("".join(texts.values()), split_lock.running()) == texts


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("path", tracked("*Cargo.lock"), ids=name_of)
def test_each_crate_is_pinned_with_a_digest(path: Path) -> None:
    packages = tomllib.loads(path.read_text(encoding="utf-8"))["package"]

    foreign = [each for each in packages if "source" in each]
    assert foreign
    assert [each["name"] for each in foreign if not each["source"].startswith("registry+")] == []
    assert [each["name"] for each in foreign if len(each.get("checksum", "")) != 64] == []


def test_cargo_never_changes_a_lock() -> None:
    lines = [*MAKE.splitlines(), *(ROOT / "tools/build_binaries").read_text().splitlines()]
    called = [line for line in lines if re.search(rf"\bcargo ({'|'.join(COMMANDS)})\b", line)]

    assert called
    assert [line for line in called if "--locked" not in line] == []


@pytest.mark.parametrize("path", tracked("*package-lock.json"), ids=name_of)
def test_each_npm_package_is_pinned_with_a_digest(path: Path) -> None:
    packages = json.loads(path.read_text(encoding="utf-8"))["packages"]

    foreign = {name: each for name, each in packages.items() if name and not each.get("link")}
    assert foreign
    inside = [name for name, each in foreign.items() if each.get("inBundle")]
    assert [name for name, each in foreign.items() if "integrity" not in each] == inside


def test_npm_installs_what_is_locked() -> None:
    text = (ROOT / "tools/node.py").read_text(encoding="utf-8")

    assert '"ci", ' in text
