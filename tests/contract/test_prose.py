"""What users read keeps to the rules of `tools/prose.toml`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tools import prose

RULES: dict[str, Any] = {
    "sentence_words_max": 8,
    "heading_words_max": 3,
    "phrases": {"whoever": "the noun"},
    "exceptions": {},
}


def test_what_users_read_keeps_to_the_rules() -> None:
    assert prose.check(list(prose.texts())) == []


def test_every_page_and_every_kind_of_text_is_read() -> None:
    places = {text.place.partition(":")[0] for text in prose.texts()}

    assert places >= {"README.md", "SECURITY.md", "docs/howto/use-secrets.md", "docs/faq.md"}
    assert places >= {"src/forkd/cli/sandboxes.py", "src/forkd/service/admission.py"}


def test_every_phrase_has_something_to_say_instead() -> None:
    for pattern, better in prose.RULES["phrases"].items():
        re.compile(pattern)
        assert better
    assert all(prose.RULES["exceptions"].values()), "an exception has a reason"


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ("Whoever forks it pays.", ["page:1: 'Whoever': say the noun"]),
        ("| a | b |\n|---|---|\n| c | whoever asks |", ["page:3: 'whoever': say the noun"]),
        ("`whoever` is code.\n\n```sh\nwhoever\n```", []),
        ("# One two three four", ["page:1: a heading of 4 words: One two three four"]),
        (
            "Short.\n\n- one two three\n  four five six seven eight nine.",
            ["page:3: a sentence of 9"],
        ),
        ("One two three four five. One two three four five.", []),
        ("`code` one two three four. `Code` one two three four.", []),
    ],
)
def test_a_page_is_read_as_a_person_does(page: str, found: list[str]) -> None:
    said = prose.check(list(prose.page_texts("page", page)), RULES)

    assert [each.startswith(start) for each, start in zip(said, found, strict=True)] == [
        True for _ in found
    ]


def test_errors_and_help_of_commands_are_read() -> None:
    error = 'def f():\n    raise E(f"whoever {x} asks", field="whoever")\n'
    command = '@app.command()\ndef f():\n    """Ask whoever is there."""\n'

    assert len(prose.check(list(prose.code_texts("src/x.py", error)), RULES)) == 1
    assert len(prose.check(list(prose.code_texts("src/cli/x.py", command)), RULES)) == 1
    assert prose.check(list(prose.code_texts("src/x.py", command)), RULES) == []


def test_an_exception_that_is_not_needed_is_a_finding() -> None:
    rules = {**RULES, "exceptions": {"page": "why", "other": "why"}}
    text = prose.Text("page:1", "whoever")

    assert prose.check([text], rules) == ["other: needs no exception any more"]
