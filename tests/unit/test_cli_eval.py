"""What evaluations show, and where they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


def test_code_in_a_context_has_names_of_its_own(forkd: Forkd, sandbox: str) -> None:
    assert forkd("eval", sandbox, "--context", "draft", "x = 1").code == 0
    assert forkd("eval", sandbox, "--context", "draft", "x").out == "1\n"
    assert "NameError" in forkd("eval", sandbox, "x").err
    refused = forkd("eval", sandbox, "--context", "No!", "x")
    assert (refused.code, "--context" in refused.err) == (2, True)


def test_an_evaluation_says_which_forms_there_are(forkd: Forkd, sandbox: str) -> None:
    code = "class Html:\n    def _repr_html_(self): return '<b>1</b>'\nHtml()"

    ended = forkd("eval", sandbox, code)

    assert (ended.code, ended.out.count("\n")) == (0, 1)
    assert "it is also there as html: --json prints it" in ended.err
    (result,) = forkd("eval", sandbox, code, "--json").document["results"]
    assert (result["html"], result["is_main_result"]) == ("<b>1</b>", True)
