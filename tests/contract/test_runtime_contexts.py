"""Contexts of evaluated Python: protocol/runtime/CONTRACT.md, `eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.limits import EVAL_CONTEXTS_MAX
from tests.support.dialects import PYTHON
from tests.support.runtimes import ERROR, REPLY, RuntimeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "__import__('os').getcwd()"


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimeProcess]:
    """Python, greeted."""
    with RuntimeProcess(PYTHON.command, PYTHON.environment(tmp_path)) as process:
        assert process.ask("hello", contract=1).body["contexts"] is True
        yield process


def test_each_context_has_names_of_its_own(runtime: RuntimeProcess) -> None:
    runtime.eval("x = 'main'")
    runtime.eval_in("a", "x = 'a'")
    assert runtime.eval_in("b", "x").body["error"]["type"] == "NameError"
    assert runtime.eval_in("a", "x").body["value"] == "a"
    assert runtime.eval("x").body["value"] == "main"


def test_each_context_has_a_folder_of_its_own(runtime: RuntimeProcess, tmp_path: Path) -> None:
    start = runtime.eval(FOLDER).body["value"]
    runtime.eval_in("a", f"import os; os.chdir({str(tmp_path)!r})")
    assert runtime.eval(FOLDER).body["value"] == start
    runtime.eval("import os; os.chdir('/usr')")
    assert runtime.eval_in("a", FOLDER).body["value"] == str(tmp_path)
    assert runtime.eval_in("b", FOLDER).body["value"] == start
    assert runtime.eval(FOLDER).body["value"] == "/usr"


def test_a_folder_that_is_gone_hurts_no_other_context(
    runtime: RuntimeProcess, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    runtime.eval_in("a", f"import os; os.mkdir({str(gone)!r}); os.chdir({str(gone)!r})")
    runtime.eval_in("a", f"os.rmdir({str(gone)!r})")
    assert runtime.eval("6 * 7").body["value"] == 42
    assert runtime.eval_in("a", "6 * 7").body["value"] == 42


def test_classes_and_pickles_find_the_module_of_their_context(runtime: RuntimeProcess) -> None:
    code = "import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))) is A"
    for context in ("a", "b"):
        assert runtime.eval_in(context, code).body["value"] is True
    assert runtime.eval(code).body["value"] is True


def test_an_exception_and_an_interruption_leave_the_context(runtime: RuntimeProcess) -> None:
    runtime.eval("x = 'main'")
    assert runtime.eval_in("a", "x = 1\n1 / 0").body["error"]["type"] == "ZeroDivisionError"
    assert runtime.eval("x").body["value"] == "main"
    assert runtime.eval_in("a", "x").body["value"] == 1


def test_results_of_a_context_are_those_of_a_notebook(runtime: RuntimeProcess) -> None:
    assert runtime.eval_in("a", "display(1)").body["results"][0]["data"] == {"text/plain": "1"}


def test_contexts_are_listed_and_forgotten(runtime: RuntimeProcess) -> None:
    runtime.eval_in("a", "x = 1; import os; os.chdir('/usr')")
    assert runtime.eval("import forkd; forkd.contexts()").body["value"] == [
        {"id": "a", "cwd": "/usr"}
    ]
    assert runtime.eval("forkd.remove_context('a')").body["value"] is True
    assert runtime.eval("forkd.remove_context('a')").body["value"] is False
    assert runtime.eval_in("a", "x").body["error"]["type"] == "NameError"


def test_one_context_past_the_limit_is_refused(runtime: RuntimeProcess) -> None:
    for number in range(EVAL_CONTEXTS_MAX):
        assert runtime.eval_in(f"c{number}", "x = 1").kind == REPLY
    refused = runtime.eval_in("more", "x = 1")
    assert (refused.kind, refused.body["code"], refused.body["field"]) == (
        ERROR,
        "invalid_request",
        "context",
    )
    assert runtime.eval_in("c0", "x").body["value"] == 1
    runtime.eval("import forkd; forkd.remove_context('c0')")
    assert runtime.eval_in("more", "x = 1").kind == REPLY
