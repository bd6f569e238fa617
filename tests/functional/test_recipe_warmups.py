"""What warm-ups offer works, tried without a machine: on this host, and with programs of ours.

tests/functional/test_recipe_machines.py tries the same on real machines.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.docs import ROOT, load_program

if TYPE_CHECKING:
    from pathlib import Path

AGENT = ROOT / "recipes" / "coding-agent"
CHROMIUM = ROOT / "recipes" / "chromium"
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


class FakeBrowser(types.ModuleType):
    """The module `websocket`, whose one connection leads to a browser of few words."""

    class WebSocketTimeoutException(Exception):
        """Nothing came in time."""

    def __init__(self) -> None:
        super().__init__("websocket")
        self.said: deque[dict[str, Any]] = deque()
        self.timeout_s = 0.0
        self.title = ""

    def create_connection(self, address: str, *, suppress_origin: bool) -> FakeBrowser:
        assert (address, suppress_origin) == ("ws://browser", True)
        return self

    def settimeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def send(self, text: str) -> None:
        asked = json.loads(text)
        self.said.append({"method": "Page.frameResized"})  # which nobody waits for
        match asked["method"], asked["params"]:
            case "Page.navigate", {"url": url}:
                self.go(asked, url)
            case "Runtime.evaluate", {"expression": "throw 1"}:
                self.answer(asked, {"exceptionDetails": {"text": "Uncaught 1"}})
            case "Runtime.evaluate", {"expression": expression}:
                value = {"title": self.title} if "document.title" in expression else expression
                self.answer(asked, {"result": {"value": value}})
            case "Page.captureScreenshot", {"format": "png"}:
                self.answer(asked, {"data": base64.b64encode(b"a picture").decode()})
            case "Page.enable" | "Page.setLifecycleEventsEnabled", _:
                self.answer(asked, {})
            case _:
                self.said.append({"id": asked["id"], "error": {"message": "wasn't found"}})

    def go(self, asked: dict[str, Any], url: str) -> None:
        """Load a page, which other pages than `slow` do at once."""
        if url == "http://nowhere/":
            self.answer(asked, {"loaderId": "n", "errorText": "net::ERR_NAME_NOT_RESOLVED"})
        elif "#" in url:
            self.answer(asked, {"frameId": "main"})
        else:
            self.title = url
            loaded = [] if url == "data:slow" else [self.event(url)]
            self.said.append(self.event("the page before"))
            self.said += loaded if "early" in url else []
            self.answer(asked, {"loaderId": url})
            self.said += [] if "early" in url else loaded

    def event(self, loader: str) -> dict[str, Any]:
        """Return the event that a page has loaded."""
        return {"method": "Page.lifecycleEvent", "params": {"name": "load", "loaderId": loader}}

    def answer(self, asked: dict[str, Any], result: dict[str, Any]) -> None:
        self.said.append({"id": asked["id"], "result": result})

    def recv(self) -> str:
        assert self.timeout_s > 0
        if not self.said:
            raise self.WebSocketTimeoutException
        return json.dumps(self.said.popleft())


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the warm-up of chromium offers, over a browser that is none."""
    monkeypatch.setitem(sys.modules, "websocket", FakeBrowser())
    replaced = {"Page(_start())": 'Page("ws://browser")', "/tmp/": f"{tmp_path}/"}
    return load_program(CHROMIUM / "warmup.py", replaced=replaced)


@pytest.mark.parametrize("url", ["data:late", "data:early"])
def test_a_browser_has_visited_a_page_once_that_page_has_loaded(
    browser: dict[str, Any], url: str
) -> None:
    assert browser["visit"](url) == {"title": url}
    assert browser["visit"](f"{url}#there") == {"title": url}
    assert browser["js"]("1 + 1") == "1 + 1"


def test_a_browser_draws_into_a_file(browser: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "drawn.png"

    assert browser["screenshot"](path) == path
    assert path.read_bytes() == b"a picture"


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("visit('http://nowhere/')", RuntimeError, "http://nowhere/: net::ERR_NAME_NOT_RESOLVED"),
        ("visit('data:slow')", TimeoutError, "the browser had no answer in time: data:slow"),
        ("js('throw 1')", RuntimeError, "Uncaught 1"),
        ("cdp('No.such')", RuntimeError, "No.such: wasn't found"),
    ],
)
def test_a_browsers_refusal_is_an_error_in_its_words_and_it_goes_on(
    browser: dict[str, Any], code: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        eval(code, browser)  # noqa: S307 - our own

    assert str(caught.value) == words
    assert browser["visit"]("data:next") == {"title": "data:next"}
