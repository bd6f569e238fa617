"""What warm-ups offer works, tried without a machine: on this host, and with programs of ours.

tests/functional/test_recipe_machines.py tries the same on real machines.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.docs import ROOT, load_program

if TYPE_CHECKING:
    from pathlib import Path

AGENT = ROOT / "recipes" / "coding-agent"
ONNX = ROOT / "recipes" / "onnx"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project of coding-agent."""
    return shutil.copytree(AGENT / "project", tmp_path / "project")


@pytest.fixture
def agent(project: Path) -> dict[str, Any]:
    """What the warm-up of coding-agent offers, for this copy, before its tools were used."""
    replaced = {"/srv/project": str(project), "\n\n_use_everything()\n": "\n"}
    return load_program(AGENT / "warmup.py", replaced=replaced)


def test_an_agents_command_says_its_status_and_all_that_it_printed(
    agent: dict[str, Any], project: Path
) -> None:
    done = agent["sh"]("pwd; echo worse >&2; exit 3")

    assert done == {"exit": 3, "output": f"{project}\nworse\n"}


def test_an_agents_command_is_killed_when_its_time_is_over(agent: dict[str, Any]) -> None:
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0\.05 seconds"):
        agent["sh"]("sleep 60", timeout_s=0.05)


def test_an_agents_tests_run_in_a_process_of_their_own(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (AGENT / "warmup.py").read_text().replace("/srv/project", str(project))
    code = (
        code.removesuffix("_use_everything()\n")
        + f"""
print(run_tests())
open({str(project / "slug.py")!r}, "w").write("def slug(title):\\n    return title\\n")
print(run_tests()["exit"], run_tests(PROJECT, "-k", "nothing")["exit"])
print("slug" in sys.modules, PROJECT in sys.path)
"""
    )
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    command = [sys.executable, "-B", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - ours

    passed, failed, kept = ended.stdout.splitlines()
    assert passed.startswith("{'exit': 0, 'output': '..")
    assert (failed, kept) == ("1 5", "False False")


MODEL = {
    "target_labels_space": ["bash", "python", "txt"],
    "beg_size": 4,
    "block_size": 8,
    "padding_token": 256,
}

SESSION = """
class SessionOptions:
    pass

class InferenceSession:
    def __init__(self, model, options, providers):
        assert model.is_file()
        assert options.intra_op_num_threads == options.inter_op_num_threads == 1

    def run(self, _, feeds):
        import numpy as np
        (self.seen,) = feeds["bytes"].tolist()
        return [np.array([[0.1, 0.7, 0.2]])]
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the warm-up of onnx offers, over a model that says what it was shown."""
    folder = tmp_path / "magika" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "model.onnx").touch()
    (folder / "config.min.json").write_text(json.dumps(MODEL))
    (tmp_path / "magika" / "__init__.py").touch()
    (tmp_path / "onnxruntime.py").write_text(SESSION)
    for name in ("magika", "onnxruntime"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = load_program(ONNX / "warmup.py")
    for name in ("magika", "onnxruntime"):
        monkeypatch.delitem(sys.modules, name)
    return names


def test_a_model_says_the_likeliest_kinds_first(model: dict[str, Any]) -> None:
    assert model["identify"]("anything") == "python"
    assert model["scores"](b"anything", 2) == [["python", 0.7], ["txt", 0.2]]


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("", [256] * 8),
        (" ab ", [97, 98, 32, 256, 256, 32, 97, 98]),
        ("abcdefghij", [97, 98, 99, 100, 103, 104, 105, 106]),
        (b"        ab        ", [256] * 8),
    ],
)
def test_a_model_is_shown_the_first_and_last_bytes_without_white_space(
    model: dict[str, Any], content: str | bytes, seen: list[int]
) -> None:
    model["identify"](content)

    assert model["session"].seen == seen
