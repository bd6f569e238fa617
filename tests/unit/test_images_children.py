"""What our own programs tell is passed on, and what is no event is left out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError, CapacityError, ForkdError, InvalidRequest, NotFound
from forkd.images.children import told
from forkd.images.steps import Build

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.model.progress import Progress


def run(*events: object, ends_well: bool = True) -> tuple[dict[str, object], list[Progress]]:
    """Have a program tell something; return its last event, and what was passed on."""
    passed_on: list[Progress] = []

    def start(hear: Callable[[str], None]) -> None:
        for event in events:
            hear(event if isinstance(event, str) else json.dumps(event))
        if not ends_well:
            raise BuildError("python3 ended with status 1")

    return told(Build(passed_on.append), start), passed_on


def test_progress_is_passed_on_and_the_last_event_returned() -> None:
    progress = {"event": "progress", "stage": "packages", "message": "half", "fraction": 0.5}

    last, passed_on = run(progress, {**progress, "fraction": 7.0}, {"event": "fetched", "a": 1})

    assert last == {"event": "fetched", "a": 1}
    assert [(each.stage, each.fraction) for each in passed_on] == [
        ("packages", 0.5),
        ("packages", None),
    ]


def test_lines_that_are_no_events_are_left_out() -> None:
    half = {"event": "progress", "stage": 1}
    odd: tuple[object, ...] = ("text", "[" * 20_000, [], {"event": 1}, half, "")

    last, passed_on = run(*odd, {"event": "done"})

    assert (last, passed_on) == ({"event": "done"}, [])


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("not_found", NotFound),
        ("invalid_request", InvalidRequest),
        ("capacity", CapacityError),
        ("build", BuildError),
        ("host", BuildError),
        (["odd"], BuildError),
    ],
)
def test_a_failure_is_raised_in_its_own_words(code: object, kind: type[ForkdError]) -> None:
    failed = {"event": "failed", "code": code, "message": "no room for \udcff"}

    with pytest.raises(kind, match=r"^no room for \\udcff$"):
        run(failed, ends_well=False)


def test_a_program_that_fails_without_a_word_is_an_error() -> None:
    with pytest.raises(BuildError, match="ended with status 1"):
        run(ends_well=False)
