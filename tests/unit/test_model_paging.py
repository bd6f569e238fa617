from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest
from forkd.limits import CURSOR_CHARS_MAX, LIST_LIMIT_MAX
from forkd.model.paging import PageRequest


def key(text: str) -> tuple[str]:
    return (text,)


def test_whoever_follows_pages_meets_each_element_once_while_others_come_and_go() -> None:
    there = {f"n{number:02}" for number in range(10)}
    seen: list[str] = []
    asked = PageRequest(limit=3)
    while True:
        page = asked.of(there, key)
        seen += page.items
        there -= set(page.items[:1])  # what was seen may go
        there.add(f"n0{len(seen)}-new")
        if page.next is None:
            break
        assert len(page.next) <= CURSOR_CHARS_MAX
        asked = PageRequest(limit=3, after=page.next)

    assert [each for each in seen if "new" not in each] == [f"n{number:02}" for number in range(10)]
    assert len(set(seen)) == len(seen)


def test_a_page_that_holds_the_rest_is_the_last() -> None:
    assert PageRequest(limit=2).of("ab", key).next is None
    assert PageRequest().of("ba", key).items == ("a", "b")


@pytest.mark.parametrize("after", ["", "!", "e30", "WzFd", "bm8", "é", "[" * 4000])
def test_an_after_that_no_page_said_is_refused(after: str) -> None:
    with pytest.raises(InvalidRequest, match="Forkd-Next"):
        PageRequest(after=after)


@pytest.mark.parametrize("limit", [0, LIST_LIMIT_MAX + 1])
def test_a_page_has_a_possible_length(limit: int) -> None:
    with pytest.raises(InvalidRequest, match="limit must be 1 to 1000"):
        PageRequest(limit=limit)
