"""Durations, sizes and rates are read with units, and refused in words that name their option."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import typer

from forkd.cli import units, words
from forkd.errors import InvalidRequest
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 5),
        ("0.5", 0.5),
        ("1e3", 1_000),
        ("30s", 30),
        ("5m", 300),
        ("1h30m", 5_400),
        ("1.5h", 5_400),
        ("90d", 90 * 86_400),
        ("2w", 14 * 86_400),
        ("250ms", 0.25),
        (" 5M ", 300),
        ("36500d", 36_500 * 86_400),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert units.duration(text) == seconds


def test_a_plain_number_has_the_unit_of_its_option() -> None:
    assert units.duration_of_days("90") == 90 * 86_400
    assert units.duration_of_days("90d") == 90 * 86_400
    assert units.duration_of_days("12h") == 43_200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5 parsecs", "is not a duration; write seconds, or numbers with units such as 30s, 5m"),
        ("", "is not a duration"),
        ("h", "is not a duration"),
        ("5mm", "is not a duration"),
        ("1h 30m", "is not a duration"),
        ("nan", "is not a duration"),
        ("0", "is not in the future"),
        ("0s", "is not in the future"),
        ("-5m", "is not in the future"),
        ("-5", "is not in the future"),
        ("36501d", "is longer than 100 years"),
        ("1e300", "is longer than 100 years"),
        ("1e999", "is longer than 100 years"),
        ("9" * 400 + "w", "is longer than 100 years"),
    ],
)
def test_what_is_no_duration_is_said(text: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said) as refused:
        units.duration(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("512", 512),
        ("512m", 512),
        ("512MiB", 512),
        ("10g", 10_240),
        ("1.5g", 1_536),
        ("1t", 1 << 20),
        ("2048k", 2),
    ],
)
def test_a_size_is_read(text: str, mib: int) -> None:
    assert units.size_mib(text) == mib


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5 parsecs", "is not a size; write MiB, or a number with a unit such as 512m or 10g"),
        ("512k", "is not a whole number of MiB"),
        ("0.5", "is not a whole number of MiB"),
        ("0", "is not more than zero"),
        ("-1g", "is not more than zero"),
        ("1048577t", "is more than 1 EiB"),
        ("1e999", "is more than 1 EiB"),
    ],
)
def test_what_is_no_size_is_said(text: str, said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        units.size_mib(text)


def test_a_rate_is_read() -> None:
    assert [units.rate_mbit(each) for each in ("10", "10m", "10mbit", "1g")] == [10, 10, 10, 1_000]
    with pytest.raises(typer.BadParameter, match="is not a whole number of Mbit/s"):
        units.rate_mbit("10k")
    with pytest.raises(typer.BadParameter, match="is not a bandwidth"):
        units.rate_mbit("fast")
    with pytest.raises(typer.BadParameter, match="is more than 10000000 Mbit/s"):
        units.rate_mbit("11t")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.25, "250 ms"),
        (5, "5s"),
        (300, "5m"),
        (5_400, "1h 30m"),
        (86_400, "1d"),
        (90_061, "1d 1h"),
        (7_776_000, "90d"),
    ],
)
def test_a_duration_is_shown_in_its_largest_units(seconds: float, shown: str) -> None:
    assert units.shown_duration(seconds) == shown


def test_sizes_and_counts_are_shown_as_people_read_them() -> None:
    sizes = [0, 1_023, 1 << 20, 1_536 << 20, 64 << 30, 3 << 40]
    shown = ["0 B", "1023 B", "1 MiB", "1.5 GiB", "64 GiB", "3 TiB"]
    assert [units.shown_size(each) for each in sizes] == shown
    assert [units.counted(n, "vCPU") for n in (1, 2)] == ["1 vCPU", "2 vCPUs"]


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


@pytest.mark.usefixtures("sandbox")
def test_options_take_units(forkd: Forkd) -> None:
    (made,) = forkd(
        "fork", "warm", "--memory", "1g", "--disk", "2g", "--ttl", "1h30m", "--json"
    ).document

    assert (made["memory_limit_mib"], made["disk_limit_mib"]) == (1_024, 2_048)
    assert made["expires_at_unix"] - made["created_at_unix"] > 5_000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fork", "warm", "--ttl", "5 parsecs"], "error: --ttl: '5 parsecs' is not a duration"),
        (["fork", "warm", "--ttl", "-5m"], "error: --ttl: '-5m' is not in the future"),
        (
            ["fork", "warm", "--ttl", "366d"],
            "error: --ttl: 366d is out of range; it must be at most 365d",
        ),
        (
            ["fork", "warm", "--memory", "1"],
            "error: --memory: 1 MiB is out of range; it must be at least",
        ),
        (["fork", "warm", "--memory", "lots"], "error: --memory: 'lots' is not a size"),
        (["fork", "warm", "--cpus", "many"], "error: --cpus: 'many' is not a"),
        (["fork", "warm", "-n", "0"], "error: --n: 0 is out of range; it must be at least 1"),
        (["fork", "warm", "-n", "x"], "error: --n: 'x' is not a"),
        (["fork"], "error: missing argument 'TAG'"),
        (["fork", "warm", "--nonsense"], "error: no such option: --nonsense"),
        (["fork", "warm", "two"], "error: got unexpected extra argument(s) (two)"),
        (["nonsense"], "error: no such command 'nonsense'"),
        (["--nonsense"], "error: no such option: --nonsense"),
        (["token", "create", "x", "--expires-in", "soon"], "error: --expires-in: 'soon' is not a"),
        (
            ["fork", "warm", "--network", "https://example.com"],
            "error: --network: give a name, not a URL: example.com:443",
        ),
        (
            ["fork", "warm", "--network", "http://example.com:8080/a"],
            "error: --network: give a name, not a URL: example.com:8080",
        ),
    ],
)
@pytest.mark.usefixtures("sandbox")
def test_an_error_names_the_option_and_what_was_typed(
    forkd: Forkd, args: list[str], said: str
) -> None:
    ended = forkd(*args)

    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(said), ended.err
    assert "Input should" not in ended.err


@pytest.mark.usefixtures("sandbox")
def test_a_wrong_option_is_json_where_that_is_wanted(
    forkd: Forkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["forkd", "fork", "warm", "--ttl", "x", "--json"])

    ended = forkd("fork", "warm", "--ttl", "x", "--json")

    assert ended.err.startswith('{"error": "--ttl: \'x\' is not a duration')
    assert '"code": "invalid_request"' in ended.err


def test_the_value_of_a_secret_is_never_repeated(forkd: Forkd) -> None:
    ended = forkd("secret", "set", "x", "--host", "api.example.com", stdin=b"short")

    assert ended.code == 2
    assert "the secret's value is shorter than" in ended.err
    assert "short'" not in ended.err


def test_what_is_no_field_of_a_request_is_said_as_it_is() -> None:
    assert words.said(InvalidRequest("two of them", field="ids")) == "two of them"
    assert words.said(
        InvalidRequest("labels.0: Input should be a valid number", field="labels.0")
    ) == ("--label is not a number")
