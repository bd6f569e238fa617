"""What programs read: one shape for each thing, times in both forms, and one way to ask for it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from forkd.cli.render import plain, with_dates
from forkd.wire.v2_events import EventInfo
from forkd.wire.v2_exec import EvalResult
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture(autouse=True)
def snapshots(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm", "is-flaky")


@pytest.fixture
def sandbox(forkd: Forkd) -> str:
    return forkd("fork", "warm", "--ttl", "1h").out.strip()


def test_forks_and_siblings_have_the_same_members_whether_or_not_they_failed(forkd: Forkd) -> None:
    forked = forkd("fork", "is-flaky", "-n", "2", "--json").document
    source = next(each["id"] for each in forked if each["error"] is None)
    branched = forkd("branch", source, "-n", "2", "--json").document["sandboxes"]

    every = [*forked, *branched]
    assert len({tuple(each) for each in every}) == 1
    assert [each["status"] for each in every] == ["running", "failed"] * 2
    for each in every:
        ready = each["status"] == "running"
        assert (each["error"], each["stage"], each["code"]) == (
            (None, None, None) if ready else ("no answer", "agent", "guest")
        )
        assert (each["created_at"] is not None) == (each["hostname"] is not None) == ready
        assert each["snapshot_tag"] == "is-flaky"


def members(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from members(each)
    elif isinstance(value, list):
        for each in value:
            yield from members(each)


TIMED = (
    ("ls",),
    ("inspect", "{sandbox}"),
    ("ttl", "{sandbox}"),
    ("limits", "{sandbox}"),
    ("tree",),
    ("branch", "{sandbox}", "--tag", "kept"),
    ("promote", "{sandbox}"),
    ("snapshot", "ls"),
    ("snapshot", "info", "warm"),
    ("image", "ls"),
    ("token", "create", "ci", "--expires-in", "1d"),
    ("secret", "set", "key", "--host", "example.com"),
    ("top",),
)


@pytest.mark.parametrize("command", TIMED, ids=" ".join)
def test_every_time_is_there_in_rfc_3339_too(
    forkd: Forkd, sandbox: str, command: tuple[str, ...]
) -> None:
    if command[0] == "promote":
        sandbox = forkd("branch", sandbox).out.strip()
    words = [each.format(sandbox=sandbox) for each in command]

    ended = forkd(*words, "--json", stdin=b"a-secret-value")

    found = [each for each in members(ended.document) if any("_unix" in name for name in each)]
    assert found
    for each in found:
        assert each == with_dates({name: each[name] for name in each if not is_date(name)})


AT = "1970-01-01T00:00:01.500Z"


def is_date(name: str) -> bool:
    return name == "at" or name.endswith("_at")


def test_events_and_templates_have_dates(forkd: Forkd, sandbox: str) -> None:
    members: dict[str, Any] = dict.fromkeys(EventInfo.model_fields)
    event = EventInfo.model_construct(None, **{**members, "at_unix": 1.5, "detail": {"x_unix": 5}})
    assert plain(event) == {**members, "at_unix": 1.5, "at": AT, "detail": {"x_unix": 5}}
    assert forkd("inspect", sandbox, "-o", "{created_at}").out.startswith("2026-01-02T03:04:05Z")


def test_times_become_dates_by_their_units() -> None:
    assert with_dates({"created_at_unix": 0, "x": 1}) == {
        "created_at_unix": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "x": 1,
    }
    assert with_dates({"branched_at_unix_ms": 1_500})["branched_at"] == "1970-01-01T00:00:01.500Z"
    assert with_dates({"at_unix": 1.25})["at"] == "1970-01-01T00:00:01.250Z"
    assert with_dates({"last_used_unix": 1})["last_used_at"] == "1970-01-01T00:00:01Z"
    assert with_dates({"expires_at_unix": None})["expires_at"] is None
    assert with_dates({"expires_at_unix": 1e300})["expires_at"] is None


def test_what_a_guest_said_stays_as_it_is() -> None:
    @dataclass
    class Result:
        value: object

    assert plain(Result({"made_unix": 5})) == {"value": {"made_unix": 5}}
    fields: dict[str, Any] = dict.fromkeys(EvalResult.model_fields)
    said = EvalResult.model_construct(None, **{**fields, "value": {"made_unix": 5}})
    assert plain(said) == {**fields, "value": {"made_unix": 5}}


@pytest.mark.parametrize("before", [["--json"], ["-o", "json"], ["--output=json"]])
@pytest.mark.parametrize(
    "command", [["ls"], ["snapshot", "ls"], ["fork", "warm"], ["tree"], ["context", "ls"]]
)
@pytest.mark.usefixtures("sandbox")
def test_json_may_be_asked_for_in_front_of_a_command(
    forkd: Forkd, before: list[str], command: list[str]
) -> None:
    assert forkd(*before, *command).document is not None
    assert not forkd(*command).out.startswith(("[", "{"))


def test_other_forms_and_errors_may_be_asked_for_in_front_too(forkd: Forkd, sandbox: str) -> None:
    assert forkd("-o", "{id}", "ls").out == f"{sandbox}\n"
    assert forkd("-o", "{id}", "ls", "-o", "{status}").out == "running\n"
    assert "LIMITS" in forkd("-o", "wide", "ls").out
    for words in (["--json", "inspect", "gone"], ["-o", "json", "inspect", "gone"]):
        assert json.loads(forkd(*words).err)["code"] == "not_found"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "wide", "kill", "x"], "`forkd kill` cannot print 'wide'; leave out --output"),
        (["--json", "shell", "x"], "`forkd shell` cannot print JSON; leave out --json"),
        (["--json", "-o", "wide", "ls"], "--json and --output exclude each other"),
        (["-o", "yaml", "ls"], "--output: 'yaml' is not a format"),
    ],
)
def test_a_form_that_a_command_has_not_is_one_error(
    forkd: Forkd, words: list[str], said: str
) -> None:
    ended = forkd(*words)

    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1
