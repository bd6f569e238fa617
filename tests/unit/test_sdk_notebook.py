"""What notebooks show of results is what a person wants to see, and nothing a guest can abuse."""

from __future__ import annotations

import html.parser
from typing import TYPE_CHECKING

import pytest

from forkd import Client, EvalError, EvalResult, ExecResult, Image
from forkd.sdk._notebook import (
    PAGE_PIXELS_MAX,
    REPR_CHARS_MAX,
    ROWS_MAX,
    TEXT_CHARS_MAX,
    table,
    visible,
)
from forkd.sdk._results import eval_result
from forkd.types import DiffInfo, FileChange, Result, TreeInfo
from forkd.wire import v2
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


class Attributes(html.parser.HTMLParser):
    """Collects the tags of HTML with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_html_of_a_guest_is_in_a_frame_that_runs_nothing() -> None:
    hostile = f'"></iframe><script>alert(1)</script>{HOSTILE}'
    shown = gave(repr="a frame", results=[Result("a frame", html=hostile)])

    ((tag, attributes),) = Attributes(shown._repr_html_()).found

    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", "", hostile)
    assert plain(shown) == "a frame"


def test_the_frame_around_a_table_grows_with_it_to_a_limit() -> None:
    looks = [
        Attributes(Result("", html="<tr>" * rows)._repr_html_()).found[0][1]["style"]
        for rows in (1, 2, 1000)
    ]
    assert len(set(looks)) == len(looks)
    assert f"height:{PAGE_PIXELS_MAX}px" in str(looks[-1])


@pytest.mark.parametrize(
    ("result", "source"),
    [
        (
            Result("", png='cG5n" onerror="alert(1)'),
            'data:image/png;base64,cG5n" onerror="alert(1)',
        ),
        (Result("", jpeg="anBlZw=="), "data:image/jpeg;base64,anBlZw=="),
        (Result("", svg="<svg/>"), "data:image/svg+xml;base64,PHN2Zy8+"),
    ],
)
def test_pictures_of_a_guest_are_pictures_and_nothing_else(result: Result, source: str) -> None:
    assert Attributes(result._repr_html_()).found == [("img", {"src": source})]


def test_results_that_were_left_out_are_named() -> None:
    large = Result("a", omitted={"image/png": 700_000})
    shown = gave(results=[large], more_results=2)._repr_html_()
    assert "image/png is too large: 700000 bytes" in shown
    assert "2 more results were dropped" in shown


def test_results_have_the_names_of_e2b() -> None:
    forms = {
        "text/html": "h",
        "text/markdown": "m",
        "image/svg+xml": "s",
        "image/png": "p",
        "image/jpeg": "j",
        "application/pdf": "d",
        "text/latex": "l",
        "application/javascript": "c",
        "application/json": '{"a": 1}',
        "x/y": "own",
    }
    shown = v2.EvalForms(is_main=False, data={"text/plain": "t", **forms}, omitted={"a/b": 1})
    value = v2.EvalForms(is_main=True, data={"text/html": "v", "application/json": "garbled"})
    answer = v2.EvalResult(
        result="the value",
        has_value=True,
        value_is_json=False,
        stdout="",
        stderr="",
        exit_code=0,
        results=[shown, value],
        more_results=3,
    )

    result = eval_result(answer)

    first, main = result.results
    assert (first.text, first.json, first.is_main_result) == ("t", {"a": 1}, False)
    names = (first.html, first.markdown, first.svg, first.png, first.jpeg, first.pdf, first.latex)
    assert names == tuple("hmspjdl")
    assert (first.javascript, first.extra, first.omitted) == ("c", {"x/y": "own"}, {"a/b": 1})
    assert (main.text, main.json, main.html, main.is_main_result) == ("the value", None, "v", True)
    assert result.more_results == 3
    assert main.formats() == ["text", "html"]
    assert first.formats() == [
        *("text", "json", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex"),
        *("javascript", "x/y"),
    ]


def test_a_result_is_short_in_a_list() -> None:
    picture = Result("<Figure>", png="iVBORw0KGgo" * 10_000, extra={"x/y": "own"})
    assert repr([picture]) == "[<Result '<Figure>' and as png, x/y>]"
    assert repr(Result("a" * 1000)) == f"<Result {repr('a' * 1000)[: REPR_CHARS_MAX - 1]}…>"


def test_a_sandbox_that_was_killed_says_so(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        sandbox = client.sandbox("warm")
        assert "running" in sandbox._repr_html_()
        sandbox.kill()
        assert (sandbox.info.status, sandbox.info.exit_reason) == ("exited", "deleted")
        assert "running" not in sandbox._repr_html_()


def test_a_list_of_files_has_a_line_for_each(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client, client.sandbox("warm") as sandbox:
        sandbox.files.write("/tmp/note", "text")
        (note,) = sandbox.files.list("/tmp")
        assert repr(note) == "<FileEntry '/tmp/note' file of 4 bytes>"


def test_an_image_shows_its_recipe() -> None:
    shown = Image.debian().apt_install("git")
    assert '"git"' in plain(shown)
    assert "&quot;git&quot;" in shown._repr_html_()
