"""Several daemons by name: which one a command and the SDK talk to, and where tokens are kept."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError, InvalidRequest, NotFound
from forkd.sdk import Endpoint, _contexts, discover

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

TOKEN = "a-secret-token"  # noqa: S105 - it guards nothing


@pytest.fixture(autouse=True)
def home(tmp_path: Path, forkd: Forkd, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert forkd is not None  # it sets FORKD_URL, which goes before any context
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("FORKD_HOME", str(tmp_path / "home"))
    for name in ("FORKD_URL", "FORKD_TOKEN", "FORKD_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_a_context_that_is_used_is_found_by_the_command_and_the_sdk(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    assert forkd("context", "add", "here", daemon.url).out == "here\n"
    assert forkd("--context", "here", "ls", "-q").code == 0
    assert forkd("context", "use", "here").out == "here\n"
    assert forkd("ls", "-q").code == 0
    assert discover() == Endpoint(daemon.url)

    assert forkd("context", "use", "local").code == 0
    assert discover() != Endpoint(daemon.url)


def test_what_is_said_more_closely_goes_first(
    monkeypatch: pytest.MonkeyPatch, forkd: Forkd
) -> None:
    forkd("context", "add", "one", "http://one:1", "--token", TOKEN, "--use")
    forkd("context", "add", "two", "http://two:1")

    assert discover() == Endpoint("http://one:1", TOKEN)
    assert discover().token == TOKEN
    monkeypatch.setenv("FORKD_CONTEXT", "two")
    assert discover().url == "http://two:1"
    monkeypatch.setenv("FORKD_URL", "http://three:1")
    assert discover() == Endpoint("http://three:1")
    assert discover(context="one").url == "http://one:1"
    assert discover("http://four:1").url == "http://four:1"
    monkeypatch.delenv("FORKD_URL")
    monkeypatch.setenv("FORKD_CONTEXT", "local")
    assert "one" not in discover().url


def test_tokens_are_for_their_owner_alone_and_never_shown(forkd: Forkd, home: Path) -> None:
    added = forkd(
        "context", "add", "ci", "https://ci:1", "--token", "-", stdin=TOKEN.encode() + b"\n"
    )
    listed = [forkd("context", "ls", *form).out for form in ([], ["--json"], ["-o", "{name}"])]

    path = home / "config" / "forkd" / "contexts.json"
    assert added.code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert TOKEN in path.read_text()
    assert not any(TOKEN in each for each in listed)
    assert listed[2] == "local\nci\n"
    assert listed[0].splitlines()[1].split()[:2] == ["local", "yes"]
    assert TOKEN not in repr(_contexts.load())


@pytest.mark.parametrize("args", [["ls"], ["--context", "gone", "ls"], ["ps"]])
def test_a_context_that_is_gone_is_one_error(forkd: Forkd, home: Path, args: list[str]) -> None:
    forkd("context", "add", "gone", "http://gone:1", "--use")
    path = home / "config" / "forkd" / "contexts.json"
    path.write_text(path.read_text().replace('"gone": {', '"other": {'))

    ended = forkd(*args)

    assert (ended.code, ended.out) == (3, "")
    assert ended.err.startswith(
        "error: there is no context 'gone'; there are: local, other; `forkd context use NAME` "
    )


def test_a_context_that_is_removed_is_no_longer_used(forkd: Forkd) -> None:
    forkd("context", "add", "ci", "http://ci:1", "--use")

    assert forkd("context", "rm", "ci").out == "ci\n"
    assert _contexts.load() == _contexts.Contexts()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["add", "ci", "http://x:1"], 4, "there is a context 'ci' already"),
        (["add", "local", "http://x:1"], 4, "there is a context 'local' already"),
        (["add", "a b", "http://x:1"], 2, "'a b' is not the name of a context"),
        (["add", "x" * 64, "http://x:1"], 2, "is not the name of a context"),
        (["add", "x", "ftp://x"], 2, "url must be http://host:port"),
        (["add", "x", "http://x", "--token", "-"], 2, "standard input has no token"),
        (["use", "nothing"], 3, "there is no context 'nothing'; there are: local, ci"),
        (["rm", "nothing"], 3, "there is no context 'nothing'"),
        (["rm", "local"], 2, "the context 'local' always exists"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    forkd: Forkd, args: list[str], code: int, said: str
) -> None:
    forkd("context", "add", "ci", "http://ci:1")
    before = _contexts.load()

    ended = forkd("context", *args)

    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err
    assert _contexts.load() == before


def test_there_is_a_limit_to_contexts(forkd: Forkd) -> None:
    known = _contexts.Contexts()
    for number in range(_contexts.CONTEXTS_MAX):
        known.add(f"c{number}", _contexts.Context("http://x:1"))
    known.save()

    ended = forkd("context", "add", "more", "http://x:1")

    assert (ended.code, "which is the limit" in ended.err) == (2, True)


@pytest.mark.parametrize("text", ["", "[]", '{"contexts": {"a": {"uri": 1}}}', "\xff"])
def test_a_damaged_file_is_one_error(forkd: Forkd, home: Path, text: str) -> None:
    path = home / "config" / "forkd" / "contexts.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(InvalidRequest, match="does not hold contexts"):
        discover()
    assert forkd("context", "ls").code == 2


def test_a_folder_that_cannot_be_made_is_one_error(forkd: Forkd, home: Path) -> None:
    (home / "config").write_text("a file")

    with pytest.raises((InvalidRequest, HostError)):
        _contexts.Contexts().save()
    assert forkd("context", "add", "x", "http://x:1").code in {1, 2}


def test_url_and_context_exclude_each_other(forkd: Forkd) -> None:
    ended = forkd("--url", "http://x:1", "--context", "local", "ls")

    assert (ended.code, "--url and --context exclude each other" in ended.err) == (2, True)
    with pytest.raises(NotFound):
        discover(context="nothing")
