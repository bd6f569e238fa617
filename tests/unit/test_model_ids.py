"""Ids cannot be guessed, tags cannot leave their folder, and errors name the field."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest, NotFound
from forkd.model.ids import (
    TAG_CHARS_MAX,
    SandboxId,
    new_sandbox_id,
    only_sandbox,
    parse_sandbox_id,
    parse_sandbox_start,
    parse_tag,
)
from forkd.model.listing import NAMED_MAX


def test_an_id_is_new_each_time_and_parses() -> None:
    ids = {new_sandbox_id() for _ in range(1_000)}

    assert len(ids) == 1_000
    assert all(parse_sandbox_id(id_) == id_ for id_ in ids)


@pytest.mark.parametrize(
    "text",
    ["", "sb-", "sb-" + "a" * 25, "sb-" + "a" * 27, "sb-" + "A" * 26, "sb-" + "1" * 26, "../x"],
)
def test_what_is_no_id_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_sandbox_id(text, field="sandbox")

    assert refusal.value.context["field"] == "sandbox"


@pytest.mark.parametrize(
    ("text", "start"),
    [("sb-a", "sb-a"), ("a", "sb-a"), ("sb", "sb-sb"), ("a" * 26, "sb-" + "a" * 26)],
)
def test_a_beginning_of_an_id_has_what_all_begin_with(text: str, start: str) -> None:
    assert parse_sandbox_start(text) == start


@pytest.mark.parametrize("text", ["", "sb-", "sb-sb-a", "A", "1", "a" * 27, "sb-" + "a" * 27, "a/"])
def test_what_begins_no_id_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_sandbox_start(text, field="sandbox")

    assert refusal.value.context["field"] == "sandbox"


def test_only_one_sandbox_may_be_meant() -> None:
    ids = [SandboxId(f"sb-a{number}") for number in range(NAMED_MAX + 1)]

    assert only_sandbox("sb-a", ids[:1]) == ids[0]
    with pytest.raises(NotFound, match="no sandbox sb-a"):
        only_sandbox("sb-a", [])
    with pytest.raises(InvalidRequest, match=r"2 ids begin with sb-a: sb-a0, sb-a1$"):
        only_sandbox("sb-a", ids[:2])
    with pytest.raises(InvalidRequest, match=r"sb-a4 and 1 more$"):
        only_sandbox("sb-a", ids)


@pytest.mark.parametrize("text", ["a", "_", "9", "python-3.11_x", "a" * TAG_CHARS_MAX])
def test_a_tag_of_allowed_characters_is_taken(text: str) -> None:
    assert parse_tag(text) == text


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a..b", "-a", ".a", "a/b", "a b", "a\n", "é", "a\0", "a" * (TAG_CHARS_MAX + 1)],
)
def test_what_is_no_tag_is_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_tag(text, field="to")

    assert refusal.value.context["field"] == "to"
