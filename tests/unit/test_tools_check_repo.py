"""The repository's budgets and words."""

from __future__ import annotations

import pytest

from tools.check_repo import (
    CLASS_LINES_MAX,
    FUNCTION_LINES_MAX,
    PYTHON_LINES_MAX,
    RUST_LINES_MAX,
    check,
    unmirrored,
)


def python_function(lines: int) -> str:
    return "def f() -> None:\n" + "    g()\n" * (lines - 1)


def python_class(lines: int) -> str:
    return "class C:\n" + "    x = 1\n" * (lines - 1)


def rust_function(lines: int) -> str:
    return "    pub(crate) fn f() {\n" + "        g();\n" * (lines - 2) + "    }\n"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", python_function(FUNCTION_LINES_MAX)),
        ("a.py", "g()\n" * PYTHON_LINES_MAX),
        ("src/a.py", python_class(CLASS_LINES_MAX)),
        ("tests/a.py", python_class(CLASS_LINES_MAX + 1)),
        ("a.rs", rust_function(FUNCTION_LINES_MAX)),
        ("a.rs", "g();\n" * RUST_LINES_MAX),
        ("a.rs", "#[cfg(test)]\nmod tests {\n" + "g();\n" * RUST_LINES_MAX),
        ("a/tests.rs", "g();\n" * (RUST_LINES_MAX + 1)),
    ],
)
def test_what_is_at_its_limit_passes(path: str, text: str) -> None:
    assert check({path: text}, {}) == []


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("a.py", python_function(FUNCTION_LINES_MAX + 1), "a.py:f"),
        ("a.py", "g()\n" * (PYTHON_LINES_MAX + 1), "a.py"),
        ("src/a.py", python_class(CLASS_LINES_MAX + 1), "src/a.py:C"),
        ("a.rs", rust_function(FUNCTION_LINES_MAX + 1), "a.rs:f"),
        ("a.rs", "g();\n" * (RUST_LINES_MAX + 1), "a.rs"),
        ("src/forkd/cli/main.py", "g()\n" * 101, "src/forkd/cli/main.py"),
    ],
)
def test_one_line_more_is_found_unless_excepted(path: str, text: str, name: str) -> None:
    (finding,) = check({path: text}, {})

    assert finding.startswith(f"{name}: ")
    assert check({path: text}, {name: "a reason"}) == []


def test_a_docstring_costs_a_function_nothing() -> None:
    body = "".join(f"    line {n}\n" for n in range(FUNCTION_LINES_MAX))

    assert check({"a.py": f'def f() -> None:\n    """Do.\n{body}    """\n    g()\n'}, {}) == []


def test_an_exception_that_nothing_needs_is_found() -> None:
    assert check({}, {"gone.py": "was long"}) == ["gone.py: needs no exception any more"]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a.py", "# TODO: later"),
        ("a.rs", "// for now"),
        ("a.py", "# phase 3"),
        ("a.rs", "#[allow(dead_code)]"),
        ("a.py", "import a  # noqa"),
        ("a.py", "a = b  # type: ignore"),
        ("a.md", "see pypi.org"),
        ("a.sh", "#" * 101),
    ],
)
def test_a_word_that_ages_badly_is_found_where_it_is(path: str, line: str) -> None:
    (finding,) = check({path: f"\n{line}\n"}, {})

    assert finding.startswith(f"{path}:2: ")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("a.py", "# TODO(#12): later"),
        ("a.md", "What we do for now."),
        ("a.py", "import a  # noqa: F401 - exported"),
        ("a.sh", "#" * 100),
    ],
)
def test_words_that_are_in_order_pass(path: str, line: str) -> None:
    assert check({path: line}, {}) == []


def test_a_unit_test_is_named_after_what_it_tests() -> None:
    files = dict.fromkeys(
        ("src/forkd/store/gc.py", "tests/unit/test_store_gc.py", "tests/unit/test_shop.py"), ""
    )

    (finding,) = unmirrored(files)

    assert finding.startswith("tests/unit/test_shop.py: ")
