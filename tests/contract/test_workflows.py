"""Workflows run targets of the Makefile, with pinned actions and no more rights than they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.docs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTION = ROOT / "packaging/forkd-action"

PINNED = re.compile(
    r"uses: (?:[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./packaging/[\w-]+)$"
)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
MAKE = re.compile(r"\bmake ([a-z-]+)")


def workflow(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return read


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in workflow(path)["jobs"].values():
        yield from job["steps"]


def targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_actions_of_others_are_pinned_by_hash_with_their_version(path: Path) -> None:
    used = [
        line.strip().removeprefix("- ") for line in path.read_text().splitlines() if "uses:" in line
    ]

    assert used
    assert [line for line in used if not PINNED.fullmatch(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_a_job_has_no_right_that_it_does_not_name_and_an_end(path: Path) -> None:
    read = workflow(path)

    assert read["permissions"] == {}
    for job in read["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for each in job["steps"]:
            if "checkout" in each.get("uses", ""):
                assert each["with"]["persist-credentials"] is False


def test_only_what_drafts_a_release_may_write() -> None:
    writing = {
        f"{path.name}:{name}"
        for path in WORKFLOWS
        for name, job in workflow(path)["jobs"].items()
        if "write" in job["permissions"].values()
    }

    assert writing == {"release.yml:publish"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=name_of)
def test_what_a_workflow_makes_is_a_target(path: Path) -> None:
    named = {name for each in steps(path) for name in MAKE.findall(each.get("run", ""))}

    assert named
    assert named <= targets()


def test_hooks_before_a_commit_run_targets() -> None:
    read = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))

    entries = [hook["entry"] for repo in read["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in read["repos"]} == {"local"}  # so that nothing is fetched
    assert {name for entry in entries for name in MAKE.findall(entry)} <= targets()


def test_updates_of_dependencies_wait_a_week() -> None:
    read = json.loads((ROOT / "renovate.json").read_text(encoding="utf-8"))

    assert read["minimumReleaseAge"] == "7 days"
    assert {"cargo", "github-actions", "npm", "pep621"} == set(read["enabledManagers"])


def test_the_action_gives_its_inputs_to_its_programs_as_variables() -> None:
    """An input that stood in the script itself could end it and begin another."""
    read = yaml.safe_load((ACTION / "action.yml").read_text(encoding="utf-8"))
    used = re.findall(r"\$INPUT_([A-Z]+)", (ACTION / "run").read_text(encoding="utf-8"))

    runs = read["runs"]["steps"]
    assert [each["run"] for each in runs if "${{" in each["run"]] == []
    given = [name.removeprefix("INPUT_") for name in runs[1]["env"] if name.startswith("INPUT_")]
    assert set(given) == set(used) == {name.upper() for name in read["inputs"]}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for the path, with a `forkd` that keeps its words and standard input."""
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "forkd").write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" >{tmp_path}/words\ncat >{tmp_path}/input.tar\nexit 7\n'
    )
    (folder / "forkd").chmod(0o700)
    return folder


def step(programs: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run a step as the action does."""
    variables = {f"INPUT_{name.upper()}": value for name, value in inputs.items()}
    return subprocess.run(  # noqa: S603 - ours
        [str(ACTION / "run")],
        env={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("snapshot", "chosen"), [("", ["--image", "debian:12"]), ("warm", ["warm"])]
)
def test_a_step_has_the_folder_and_the_script_as_it_is_written(
    programs: Path, tmp_path: Path, snapshot: str, chosen: list[str]
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work/a file").write_text("text")
    script = 'echo "it\'s $HOME"\nexit 7'

    done = step(programs, run=script, image="debian:12", snapshot=snapshot,
                folder=str(tmp_path / "work"), network="none", timeout="10m")  # fmt: skip

    words = (tmp_path / "words").read_bytes().decode().split("\0")
    options = ["run", "--network", "none", "--timeout", "10m", "-e", f"FORKD_STEP={script}"]
    wanted = [*options, *chosen, "--", "sh", "-euc"]
    assert words[: len(wanted)] == wanted
    with tarfile.open(tmp_path / "input.tar") as archive:
        assert "./a file" in archive.getnames()
    assert done.returncode == 7


def test_a_folder_that_is_not_there_is_named_and_nothing_runs(
    programs: Path, tmp_path: Path
) -> None:
    done = step(
        programs, run="true", image="x", folder=str(tmp_path / "none"), network="none", timeout="1m"
    )

    assert (done.returncode, done.stderr) == (
        1,
        f"forkd-action: folder: {tmp_path}/none is no folder\n",
    )
    assert not (tmp_path / "words").exists()


def test_what_the_sandbox_runs_unpacks_the_folder_and_then_runs_the_script(tmp_path: Path) -> None:
    """The same words as in the sandbox, whose root is a folder here."""
    text = (ACTION / "run").read_text(encoding="utf-8")
    (command,) = re.findall(r"^in_sandbox='(.*)'$", text, re.MULTILINE)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/name").write_text("left")
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        archive.add(tmp_path / "work", ".")

    with (tmp_path / "in.tar").open("rb") as standard_input:
        done = subprocess.run(  # noqa: S603 - ours
            ["sh", "-euc", command.replace("/workspace", str(tmp_path / "workspace"))],  # noqa: S607 - the host's
            env={"PATH": os.environ["PATH"], "FORKD_STEP": "cat name; false; echo never"},
            stdin=standard_input, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert (done.returncode, done.stdout) == (1, "left")
