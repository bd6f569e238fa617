"""What notebooks show of results is what a person wants to see, and nothing a guest can abuse."""

from __future__ import annotations

import html.parser
from typing import TYPE_CHECKING

import pytest

from forkd import Client, EvalError, EvalResult, ExecResult
from forkd.sdk._notebook import REPR_CHARS_MAX, ROWS_MAX, TEXT_CHARS_MAX, table, visible
from forkd.types import DiffInfo, FileChange, TreeInfo
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from forkd.sdk._notebook import Shown
    from tests.support.daemon import RunningDaemon

HOSTILE = (
    "<script>alert(1)</script>\x1b]0;owned\x07\x1b[2J\u202e \" ' & </pre><img src=x onerror=y>"
)


class Tags(html.parser.HTMLParser):
    """Collects the tags of HTML, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style", "colspan"}

    def handle_data(self, data: str) -> None:
        self.text += data


def ran(code: int = 0, stdout: str = "", stderr: str = "", **more: bool) -> ExecResult[str]:
    return ExecResult(code, stdout, stderr, duration_s=1.5, args=("make", "a b"), **more)


def gave(**members: object) -> EvalResult:
    given = {"value": None, "repr": None, "stdout": "", "stderr": "", "error": None, **members}
    return EvalResult(**given)  # type: ignore[arg-type]  # what a test says


def plain(shown: Shown) -> str:
    return shown._repr_mimebundle_()["text/plain"]


FAULT = EvalError("ValueError", f"no {HOSTILE}", f"Traceback\nValueError: no {HOSTILE}")

CHANGES = [FileChange(path=f"/{HOSTILE}", change="added", kind="f", size_bytes=3)]


@pytest.mark.parametrize(
    "shown",
    [
        ran(stdout=HOSTILE, stderr=HOSTILE),
        ExecResult(0, HOSTILE.encode(), b"\xff\x1b"),
        gave(stdout=HOSTILE, stderr=HOSTILE, repr=HOSTILE),
        gave(error=FAULT),
        DiffInfo(changes=CHANGES, more=2, pages_apart=5),
    ],
)
def test_what_a_guest_wrote_is_shown_and_does_nothing(shown: Shown) -> None:
    forms = shown._repr_mimebundle_()
    found = Tags(forms["text/html"])

    assert found.tags <= {"pre", "table", "thead", "tbody", "tr", "th", "td"}
    for text in (found.text, forms["text/plain"], repr(shown)):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
    assert "\\x1b" in found.text


def test_a_result_shows_its_output_its_value_and_its_traceback() -> None:
    assert Tags(gave(stdout="hi\n", repr="42")._repr_html_()).text == "hi\n42"
    assert plain(gave(stdout="hi\n", repr="42")) == "hi\n42"
    assert gave(repr="None")._repr_html_() == ""
    assert "ValueError" in Tags(gave(error=FAULT)._repr_html_()).text
    assert "variables that were set are kept" in plain(gave(timed_out=True))
    assert Tags(ran(2, "out", "err")._repr_html_()).text == "outerrexit code 2"
    assert Tags(ran()._repr_html_()).text == "no output"
    assert "timed out after 1.5 s" in plain(ran(137, timed_out=True))
    assert plain(ran(truncated=True)) == "output truncated"


def test_a_result_as_text_is_its_value_or_what_was_printed() -> None:
    assert str(gave(stdout="hi\n", repr="42")) == "42"
    assert str(gave(stdout="hi\n")) == "hi\n"
    assert str(gave(error=FAULT)) == FAULT.traceback
    assert (str(ran(stdout="out", stderr="err")), str(ExecResult(0, b"\xff", b""))) == ("out", "�")


def test_a_repr_fits_a_line() -> None:
    assert repr(ran(3, "x" * 10_000, "e")).startswith("<ExecResult exit_code=3 stdout='xxx")
    assert len(repr(ran(3, "x" * 10_000, "y" * 10_000))) < 3 * REPR_CHARS_MAX
    assert repr(gave(error=EvalError("A", "b", "t" * 600))) == "<EvalResult A: b>"
    assert repr(gave(value=[1], value_is_json=True)) == "<EvalResult value=[1]>"
    assert repr(gave(repr="<object>", timed_out=True)) == "<EvalResult repr='<object>' timed_out>"


def test_what_is_long_is_cut_and_says_so() -> None:
    shown = Tags(ran(stdout="x" * (TEXT_CHARS_MAX + 7) + "end")._repr_html_()).text
    rows = Tags(table(("a",), [(each,) for each in range(ROWS_MAX + 1)])).text

    assert shown.startswith("… 10 characters before this")
    assert shown.endswith("end")
    assert rows.endswith("… 1 more")
    assert not Tags(table(("a",), [("x",)] * ROWS_MAX)).text.endswith("more")


def test_lines_and_tabs_stay() -> None:
    assert visible("a\tb\nc\x1b[0m\x9b\u2066") == "a\tb\nc\\x1b[0m\\x9b\\u2066"


def test_a_notebook_gets_the_forms_that_it_asks_for() -> None:
    assert set(ran(stdout="x")._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert set(ran()._repr_mimebundle_(include=["text/html"])) == {"text/html"}
    assert set(ran()._repr_mimebundle_(exclude=["text/html"])) == {"text/plain"}


def test_a_diff_is_a_line_for_each_file() -> None:
    changes = [
        FileChange(path="/a", change="added", kind="f", size_bytes=1),
        FileChange(path="/b", change="changed", kind="f", size_bytes=1),
        FileChange(path="/c", change="removed", kind="f", size_bytes=1),
    ]
    diff = DiffInfo(changes=changes, more=4, pages_apart=5)

    assert str(diff) == "+ /a\n~ /b\n- /c\n… 4 more\n5 pages of memory differ"
    assert repr(diff) == "<DiffInfo 7 changes>"
    assert str(DiffInfo(changes=[], more=0, pages_apart=None)) == ""


def test_sandboxes_and_their_tree_are_drawn(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client, client.fork("warm", 2, network=True) as made:
        one, other = made[0].branch(2)
        (leaf,) = one.branch()
        tree = client.tree()
        shown = Tags(made._repr_html_())

        assert isinstance(tree, TreeInfo)
        assert str(tree).splitlines() == [
            f"{made[0].id} (running)",
            f"├── {one.id} (running)",
            f"│   └── {leaf.id} (running)",
            f"└── {other.id} (running)",
            f"{made[1].id} (running)",
        ]
        assert made[0].id in shown.text
        assert "10.200.0.2" in shown.text
        assert "table" in shown.tags
        assert made[0].id in Tags(made[0]._repr_html_()).text
        assert repr(made[0]) == f"<Sandbox {made[0].id} of warm>"
        assert made[1].id in str(made)
        assert made[1].id in repr(made)
        assert daemon.url in repr(client)
