"""Error codes are a contract: unique, documented, and the same on both sides of the wire."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forkd import errors, types
from forkd.daemon.errors import STATUS, body_of, status_of
from forkd.sdk._errors import from_answer, from_body
from forkd.wire.v2 import ErrorBody
from tools.gen import walk

ALL = list(walk(errors.ForkdError))
DOCUMENTED = json.loads(Path("protocol/rest/errors.json").read_text(encoding="utf-8"))


def test_every_code_is_unique() -> None:
    codes = [each.code for each in ALL]

    assert sorted(set(codes)) == sorted(codes)


def test_every_code_is_documented_with_its_meaning() -> None:
    assert set(DOCUMENTED) == {each.code for each in ALL}
    assert all(each["meaning"] for each in DOCUMENTED.values())


def test_every_class_is_drawn_in_the_tree() -> None:
    for each in ALL:
        assert each.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind: type[errors.ForkdError]) -> None:
    error = kind("it broke", field="tag", n=3)

    back = from_body(ErrorBody.model_validate_json(body_of(error).model_dump_json()))

    assert type(back) is kind
    assert (str(back), back.context) == ("it broke", {"field": "tag", "n": 3})


def test_a_class_without_a_status_has_its_parents() -> None:
    assert errors.ChainError not in STATUS
    assert status_of(errors.ChainError) == status_of(errors.StoreError)


def test_a_code_of_a_newer_daemon_is_kept() -> None:
    error = from_body(ErrorBody(error="new", code="never_heard_of"))

    assert type(error) is errors.ForkdError
    assert error.context["code"] == "never_heard_of"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, errors.Denied), (404, errors.RequestError), (502, errors.ForkdError)],
)
def test_what_stands_between_us_and_the_daemon_may_refuse_too(
    status: int, kind: type[errors.ForkdError]
) -> None:
    error = from_answer(status, b"<html>no</html>")

    assert type(error) is kind
    assert str(status) in str(error)


@pytest.mark.parametrize("key", errors.HINTS)
def test_a_hint_is_of_a_code_that_exists_and_names_what_exists(key: str) -> None:
    code, _, context = key.partition(":")
    (kind,) = [each for each in ALL if each.code == code]
    words = errors.HINTS[key]

    assert kind("x", **({context: "y"} if context else {})).hint == words
    for noun, method in re.findall(r"`client\.(\w+)\.(\w+)\(", words):
        assert callable(getattr(getattr(types, noun.capitalize(), types.SandboxCollection), method))


def test_an_error_about_which_no_more_is_known_has_no_hint() -> None:
    assert errors.Conflict("x", sandbox="y").hint is None
    assert errors.NotFound("x", field="path").hint is None


def test_a_hint_is_there_for_errors_of_a_daemon_and_of_the_sdk() -> None:
    body = ErrorBody(error="no snapshot 'x'", code="not_found", context={"tag": "x"})

    assert "client.snapshots.list()" in (from_body(body).hint or "")
    assert "check=False" in (errors.ExecTimeout("x").hint or "")
