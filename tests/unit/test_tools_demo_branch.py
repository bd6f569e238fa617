from dataclasses import replace
from typing import Any

from tools.demo_branch import Story, complaints

BEFORE = ["1 aa from 0 to 1", "2 bb from 1 to 2"]


def story(index: int, **changes: Any) -> Story:  # noqa: ANN401 - JSON
    result = {
        "way": {"heat": 0.1},
        "length": 5.0,
        "visited": 60,
        "cities": 60,
        "thoughts": 4,
        "chain": f"{index:064x}",
        "secret": "s",
        "pid": 7,
    }
    return Story(result | changes, [*BEFORE, "3 cc from 2 to 3", f"4 {index:02x} improved"])


def test_siblings_that_share_what_was_and_nothing_else_pass() -> None:
    assert complaints(BEFORE, [story(1), story(2)], BEFORE) == []


def test_what_no_sibling_of_one_process_would_say_is_found() -> None:
    for name, value in (("secret", "t"), ("pid", 8)):
        found = complaints(BEFORE, [story(1), story(2, **{name: value})], BEFORE)
        assert found == [f"siblings do not share the {name} of the process that was branched"]


def test_siblings_that_went_one_way_are_found() -> None:
    assert complaints(BEFORE, [story(1), story(1)], BEFORE) == [
        "two siblings ended with the same thoughts"
    ]


def test_forgotten_torn_and_lost_thoughts_are_found() -> None:
    forgetful = replace(story(1), thoughts=["1 xx from 0 to 9", *story(1).thoughts[1:]])
    assert "a sibling has forgotten what its parent had written down" in complaints(
        BEFORE, [forgetful, story(2)], BEFORE
    )
    torn = story(2, thoughts=5)
    assert complaints(BEFORE, [story(1), torn], BEFORE) == ["a sibling's thoughts are not in order"]
    lost = story(2, visited=59)
    assert complaints(BEFORE, [story(1), lost], BEFORE) == ["a sibling has lost a city"]


def test_a_parent_that_was_touched_is_found() -> None:
    after = [*BEFORE, "3 cc improved to 5"]
    assert complaints(BEFORE, [story(1), story(2)], after) == [
        "the parent was told a way that was a sibling's"
    ]
