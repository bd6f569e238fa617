from __future__ import annotations

import pytest

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.ids import new_sandbox_id, parse_sandbox_name, parse_sandbox_ref
from forkd.model.labels import LabelFilter, check_labels, parse_label_filter
from forkd.model.sandbox import ForkOptions, SandboxChange, check_fork_count

ONES = {f"k{number}": "v" for number in range(limits.LABELS_MAX)}


def test_labels_may_be_as_many_and_as_long_as_the_limits_say() -> None:
    check_labels(ONES)
    check_labels({"k" * limits.LABEL_KEY_CHARS_MAX: "v" * limits.LABEL_VALUE_CHARS_MAX})
    check_labels({"example.com/a_b-c": "", "0": "Ωß =,"})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (ONES | {"one-more": ""}, "labels has 65 labels; a sandbox has at most 64"),
        ({"k" * 64: ""}, "the key of a label is a letter or digit"),
        ({"k" * (64 << 10): ""}, "and 65456 characters more"),
        ({"k": "v" * 257}, "the value of k has 257 characters; at most 256"),
        ({"": "v"}, "not ''"),
        ({"a=b": "v"}, "not 'a=b'"),
        ({"k": "line\n"}, "printable"),
    ],
)
def test_what_is_no_label_is_refused_with_one_short_error(
    labels: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ForkOptions(labels=labels)
    assert said in str(refused.value)
    assert len(str(refused.value)) < 300
    assert refused.value.context["field"] == "labels"


def test_a_filter_asks_for_a_key_or_for_a_value_too() -> None:
    assert parse_label_filter("team") == LabelFilter("team")
    assert parse_label_filter("team=") == LabelFilter("team", "")
    assert parse_label_filter("team=a=b") == LabelFilter("team", "a=b")
    with pytest.raises(InvalidRequest):
        parse_label_filter("=a")


@pytest.mark.parametrize("name", ["Web", "-a", "a b", "", "a" * 64, new_sandbox_id(), "a/b"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_sandbox_name(name)


def test_an_id_is_an_id_and_else_it_is_a_name() -> None:
    id_ = new_sandbox_id()
    assert parse_sandbox_ref(id_) == id_
    assert parse_sandbox_ref("a" * 63) == "a" * 63
    with pytest.raises(InvalidRequest, match=r"neither a sandbox id .* nor the name"):
        parse_sandbox_ref("A!")


def test_a_name_goes_with_one_sandbox() -> None:
    check_fork_count(1, parse_sandbox_name("web"))
    with pytest.raises(InvalidRequest, match="name goes with one sandbox, and n is 2"):
        check_fork_count(2, parse_sandbox_name("web"))


def test_an_environment_has_a_possible_size() -> None:
    most = limits.SANDBOX_ENV_BYTES_MAX
    ForkOptions(env={"A": "x" * (most - 2)})
    for env in ({"A": "x" * (most - 1)}, {"": "x"}, {"A=": ""}, {"A": "\0"}):
        with pytest.raises(InvalidRequest) as refused:
            ForkOptions(env=env)
        assert refused.value.context["field"] == "env"


def test_a_change_of_nothing_is_refused() -> None:
    with pytest.raises(
        InvalidRequest, match="give name, labels, label_changes, ttl_secs or idle_ttl_secs"
    ):
        SandboxChange()
