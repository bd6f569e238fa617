"""Ids cannot be guessed, tags cannot leave their folder, and errors name the field."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest
from forkd.model.ids import TAG_CHARS_MAX, new_sandbox_id, parse_sandbox_id, parse_tag


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
