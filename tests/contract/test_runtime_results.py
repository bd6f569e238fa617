"""What evaluated Python shows besides its value: protocol/runtime/CONTRACT.md, "Results"."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.dialects import PYTHON
from tests.support.runtimes import REPLY, RuntimeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FRAME_MAX = 1_048_576
RESULTS_MAX, FORMS_MAX, MIME_MAX = 32, 16, 128
RESULTS_BYTES_MAX = 655_360

HTML = "class Html:\n    def _repr_html_(self): return '<b>1</b>'\n"

SIZED = """
class Sized:
    def __init__(self, size): self.size = size
    def _repr_html_(self): return "x" * (self.size - 2)
"""

MATPLOTLIB = {
    "__init__.py": "",
    "figure.py": """
class Figure:
    def __repr__(self):
        return "<Figure>"

    def savefig(self, file, format, bbox_inches):
        if getattr(self, "broken", False):
            raise ValueError("cannot draw")
        file.write(b"png of %d" % self.number)
""",
    "_pylab_helpers.py": """
class Gcf:
    managers = {}

    @classmethod
    def get_all_fig_managers(cls):
        return list(cls.managers.values())
""",
    "pyplot.py": """
from matplotlib._pylab_helpers import Gcf
from matplotlib.figure import Figure

class Thing:
    pass

window = None

def figure():
    made = Figure()
    made.number = len(Gcf.managers) + 1
    manager = Thing()
    manager.canvas = Thing()
    manager.canvas.figure = made
    manager.canvas.required_interactive_framework = window
    Gcf.managers[made.number] = manager
    return made

def close(figure):
    del Gcf.managers[figure.number]

def get_fignums():
    return list(Gcf.managers)

def show():
    print("a window")
""",
}


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimeProcess]:
    """Python, in whose path there is something like matplotlib."""
    package = tmp_path / "matplotlib"
    package.mkdir()
    for name, text in MATPLOTLIB.items():
        (package / name).write_text(text, encoding="utf-8")
    env = PYTHON.environment(tmp_path) | {"PYTHONPATH": str(tmp_path)}
    with RuntimeProcess(PYTHON.command, env) as process:
        process.ask("hello", contract=1)
        yield process


def shown(runtime: RuntimeProcess, code: str) -> list[dict[str, Any]]:
    """Return what code shows, which must not fail."""
    answer = runtime.eval(code)
    assert (answer.kind, answer.body["error"], answer.stderr) == (REPLY, None, "")
    results: list[dict[str, Any]] = answer.body.get("results", [])
    return results


def png(number: int) -> str:
    """Return the picture of a figure, as it is sent."""
    return base64.b64encode(b"png of %d" % number).decode()


def test_a_value_with_no_form_but_its_repr_adds_nothing(runtime: RuntimeProcess) -> None:
    for code in ("1", "'a'", "[{}]", "object()", "int", "x = 1", "class A: pass\nA"):
        assert "results" not in runtime.eval(code).body, code


def test_a_value_comes_in_the_forms_of_a_notebook(runtime: RuntimeProcess) -> None:
    code = """
class Value:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/plain": "left out", "x/y": "own", "application/vnd.a+json": {"a": 1}}, {}
    def _repr_html_(self): return "<b>é</b>"
    def _repr_markdown_(self): return "**b**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png"
    def _repr_jpeg_(self): return "anBl\\nZw=="
    def _repr_pdf_(self): return b"pdf"
    def _repr_latex_(self): return "$x$"
    def _repr_json_(self): return {"a": [1]}, {"metadata": True}
    def _repr_javascript_(self): return None
    def __repr__(self): return "value"
Value()
"""
    (value,) = shown(runtime, code)
    assert value == {
        "is_main": True,
        "data": {
            "x/y": "own",
            "application/vnd.a+json": '{"a": 1}',
            "text/html": "<b>é</b>",
            "text/markdown": "**b**",
            "image/svg+xml": "<svg/>",
            "image/png": "cG5n",
            "image/jpeg": "anBlZw==",
            "application/pdf": "cGRm",
            "text/latex": "$x$",
            "application/json": '{"a": [1]}',
        },
        "omitted": {},
    }


def test_a_form_that_fails_or_is_made_up_is_none(runtime: RuntimeProcess) -> None:
    code = """
class Value:
    def __getattr__(self, name): return lambda *_, **__: "made up"
    def _repr_html_(self): return 1 / 0
    def _repr_json_(self): return object()
    def _repr_markdown_(self): return "*1*"
Value()
"""
    assert shown(runtime, code)[0]["data"] == {"text/markdown": "*1*"}


def test_what_is_displayed_comes_before_the_value(runtime: RuntimeProcess) -> None:
    results = shown(runtime, HTML + "display(Html(), 2)\ndisplay('a')\n3")
    assert [(each["is_main"], each["data"]) for each in results] == [
        (False, {"text/html": "<b>1</b>", "text/plain": results[0]["data"]["text/plain"]}),
        (False, {"text/plain": "2"}),
        (False, {"text/plain": "'a'"}),
        (True, {}),
    ]
    assert "results" not in runtime.eval("4").body


def test_ipythons_display_is_ours(runtime: RuntimeProcess, tmp_path: Path) -> None:
    core = tmp_path / "IPython" / "core"
    core.mkdir(parents=True)
    for folder in (core, core.parent):
        (folder / "__init__.py").write_text("")
    (core / "display_functions.py").write_text("def display(*values, **options): print(options)\n")
    code = "from IPython.core.display_functions import display as theirs\ntheirs(1)"
    assert shown(runtime, code) == [{"is_main": False, "data": {"text/plain": "1"}, "omitted": {}}]
    answer = runtime.eval("theirs({}, raw=True)")
    assert (answer.stdout, answer.body.get("results")) == ("{'raw': True}\n", None)


def test_figures_that_are_open_are_shown_and_closed(runtime: RuntimeProcess) -> None:
    results = shown(
        runtime, "from matplotlib import pyplot as plt\nf, g = plt.figure(), plt.figure()"
    )
    forms = [{"image/png": png(number), "text/plain": "<Figure>"} for number in (1, 2)]
    assert [each["data"] for each in results] == forms
    assert not any(each["is_main"] for each in results)
    assert runtime.eval("plt.get_fignums()").body["value"] == []


def test_a_figure_comes_after_the_value(runtime: RuntimeProcess) -> None:
    value, figure = shown(runtime, "from matplotlib import pyplot as plt\nplt.figure(); 5")
    assert (value["is_main"], value["data"]) == (True, {})
    assert figure["data"]["image/png"] == png(1)


def test_a_figure_that_is_the_value_is_shown_once(runtime: RuntimeProcess) -> None:
    runtime.eval("from matplotlib import pyplot as plt")
    (value,) = shown(runtime, "plt.figure()")
    assert (value["is_main"], value["data"]) == (True, {"image/png": png(1)})
    first, *more = shown(runtime, "display(plt.figure())")
    assert (first["data"]["image/png"], more) == (png(1), [])


def test_show_makes_results_of_figures_at_once(runtime: RuntimeProcess) -> None:
    code = (
        "from matplotlib.pyplot import figure, show\nfigure()\nshow()\ndisplay(1)\nfigure(); show()"
    )
    kinds = ["image/png" in each["data"] for each in shown(runtime, code)]
    assert kinds == [True, False, True]


def test_figures_of_code_that_fails_are_shown(runtime: RuntimeProcess) -> None:
    body = runtime.eval("from matplotlib import pyplot as plt\nplt.figure()\n1 / 0").body
    assert body["error"]["type"] == "ZeroDivisionError"
    assert body["results"][0]["data"]["image/png"] == png(1)


def test_a_figure_that_cannot_be_drawn_says_so(runtime: RuntimeProcess) -> None:
    code = "from matplotlib import pyplot as plt\nplt.figure().broken = True"
    answer = runtime.eval(code)
    assert (answer.body["error"], answer.body["results"][0]["data"]) == (
        None,
        {"text/plain": "<Figure>"},
    )
    assert "cannot draw" in answer.stderr


def test_figures_in_windows_are_left_alone(runtime: RuntimeProcess) -> None:
    code = "from matplotlib import pyplot as plt\nplt.window = 'qt'\nplt.figure()\nplt.show()"
    answer = runtime.eval(code)
    assert (answer.stdout, answer.body.get("results")) == ("a window\n", None)
    assert runtime.eval("plt.get_fignums()").body["value"] == [1]


def test_results_one_past_their_limit_are_counted(runtime: RuntimeProcess) -> None:
    for count, more in ((RESULTS_MAX - 1, 0), (RESULTS_MAX, 1)):
        body = runtime.eval(f"for n in range({count}): display(n)\n'value'").body
        assert (len(body["results"]), body["more_results"]) == (RESULTS_MAX, more)
        assert body["results"][-1]["is_main"]


def test_forms_one_past_their_limit_are_none(runtime: RuntimeProcess) -> None:
    code = """
class Value:
    def _repr_mimebundle_(self, include, exclude):
        return {"x/" + "y" * 126: "long", "x/" + "y" * 127: "too long", "x/é": "no",
                **{"x/%d" % n: "" for n in range(16)}}
Value()
"""
    (value,) = shown(runtime, code)
    long = "x/" + "y" * (MIME_MAX - 2)
    assert set(value["data"]) == {long, *(f"x/{n}" for n in range(FORMS_MAX - 1))}


def test_a_form_one_past_the_room_is_left_out_and_named(runtime: RuntimeProcess) -> None:
    runtime.eval(SIZED)
    (fits,) = shown(runtime, f"Sized({RESULTS_BYTES_MAX})")
    assert len(fits["data"]["text/html"]) + 2 == RESULTS_BYTES_MAX
    (value,) = shown(runtime, f"Sized({RESULTS_BYTES_MAX + 1})")
    assert (value["data"], value["omitted"]) == ({}, {"text/html": RESULTS_BYTES_MAX + 1})


def test_an_answer_of_the_longest_of_everything_fits_a_frame(runtime: RuntimeProcess) -> None:
    code = r"""
class Value(dict):
    def __repr__(self): return "\x01" * 65_536
    def _repr_mimebundle_(self, include, exclude):
        return {chr(33 + n) * 128: "x" * 40_000 for n in range(16)}
for n in range(31): display(Value())
Value(a="x" * 262_000)
"""
    body = runtime.eval(code).body
    assert (body["error"], len(body["results"])) == (None, RESULTS_MAX)
    assert body["value_is_json"]
    assert body["results"][-1]["omitted"]
