"""Durations, sizes and rates, as people type them and as people read them.

A number without a unit has the unit that the help of its option names.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

DURATION_S_MAX = 100 * 365 * DAY_S
"""Longest duration that can be typed: a hundred years."""

SIZE_BYTES_MAX = 1 << 60
"""Greatest size that can be typed: one EiB."""

RATE_MBIT_MAX = 10_000_000
"""Greatest bandwidth that can be typed, in Mbit/s."""

DEFAULT = "default"
"""The time to live that the daemon gives."""

UNLIMITED = "unlimited"
"""What lifts the limit of a quota."""

QUOTA_DIGITS_MAX = 18
"""Digits of a quota that are read; with so many it is more than any quota may be."""

DURATIONS = "30s, 5m, 1h30m or 7d"
SIZES = "512m or 10g"
RATES = "10m or 1g"

_SECONDS = {"ms": 0.001, "s": 1, "m": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
_BYTES = {"k": KIB, "m": MIB, "g": GIB, "t": TIB}
_MBITS = {"k": 0.001, "m": 1, "g": 1_000, "t": 1_000_000}

_NUMBER = r"\d+(?:\.\d+)?"
_PART = re.compile(rf"({_NUMBER})([a-z]+)")
_PLAIN = re.compile(rf"-?{_NUMBER}(?:e[+-]?\d+)?")
_WITH_UNIT = re.compile(rf"(-?{_NUMBER})([kmgt])(?:i?b|bit)?(?:/s)?")


def duration(text: str) -> float:
    """Return a duration in seconds; a plain number is seconds."""
    return _duration(text, plain_s=1, plain="seconds")


def time_to_live(text: str) -> Any:  # noqa: ANN401 - what the SDK takes
    """Return a duration in seconds, or `default` for the daemon's."""
    return DEFAULT if text == DEFAULT else duration(text)


def duration_of_days(text: str) -> float:
    """Return a duration in seconds; a plain number is days."""
    return _duration(text, plain_s=DAY_S, plain="days")


def size_mib(text: str) -> int:
    """Return a size in MiB; a plain number is MiB."""
    words = f"is not a size; write MiB, or a number with a unit such as {SIZES}"
    size_bytes = _amount(text, _BYTES, MIB, words)
    if size_bytes > SIZE_BYTES_MAX:
        raise typer.BadParameter(f"{text!r} is more than 1 EiB")
    if size_bytes % MIB:
        raise typer.BadParameter(f"{text!r} is not a whole number of MiB")
    return int(size_bytes // MIB)


def quota(text: str) -> Any:  # noqa: ANN401 - what the SDK takes
    """Return the limit of a quota, or `unlimited`."""
    if text == UNLIMITED:
        return UNLIMITED
    if not text.isascii() or not text.isdigit():
        raise typer.BadParameter(f"{text!r} is not a quota; write a whole number, or `unlimited`")
    return int(text[:QUOTA_DIGITS_MAX])


def quota_mib(text: str) -> Any:  # noqa: ANN401 - what the SDK takes
    """Return the limit of a quota in MiB, or `unlimited`; nothing at all is a limit, too."""
    return UNLIMITED if text == UNLIMITED else 0 if text == "0" else size_mib(text)


def rate_mbit(text: str) -> int:
    """Return a bandwidth in Mbit/s; a plain number is Mbit/s."""
    words = f"is not a bandwidth; write Mbit/s, or a number with a unit such as {RATES}"
    mbits = _amount(text, _MBITS, 1, words)
    if mbits > RATE_MBIT_MAX:
        raise typer.BadParameter(f"{text!r} is more than {RATE_MBIT_MAX} Mbit/s")
    if mbits != int(mbits):
        raise typer.BadParameter(f"{text!r} is not a whole number of Mbit/s")
    return int(mbits)


def _duration(text: str, *, plain_s: float, plain: str) -> float:
    words = text.strip().lower()
    seconds: float | None = None
    if _PLAIN.fullmatch(words):
        seconds = float(words) * plain_s
    else:
        parts = _PART.findall(words.removeprefix("-"))
        known = all(unit in _SECONDS for _, unit in parts)
        if parts and known and "".join(map("".join, parts)) == words.removeprefix("-"):
            seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
            seconds = -seconds if words.startswith("-") else seconds
    if seconds is None:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write {plain}, or numbers with units such as {DURATIONS}"
        )
    if seconds <= 0:
        raise typer.BadParameter(f"{text!r} is not in the future; a duration is more than zero")
    if not math.isfinite(seconds) or seconds > DURATION_S_MAX:
        raise typer.BadParameter(f"{text!r} is longer than 100 years")
    return seconds


def _amount(text: str, units: Mapping[str, float], plain: float, words: str) -> float:
    typed = text.strip().lower()
    if _PLAIN.fullmatch(typed):
        amount = float(typed) * plain
    elif (found := _WITH_UNIT.fullmatch(typed)) is not None:
        amount = float(found[1]) * units[found[2]]
    else:
        raise typer.BadParameter(f"{text!r} {words}")
    if amount <= 0:
        raise typer.BadParameter(f"{text!r} is not more than zero")
    return amount if math.isfinite(amount) else math.inf


def shown_duration(seconds: float) -> str:
    """Return a duration in its two largest units: `1h 30m`."""
    if seconds < 1:
        return f"{seconds * 1_000:.0f} ms" if seconds else "0s"
    rest, found = round(seconds), []
    for unit, length in (("d", DAY_S), ("h", HOUR_S), ("m", MINUTE_S), ("s", 1)):
        count, rest = divmod(rest, length)
        if count:
            found.append(f"{count}{unit}")
        elif found:
            break
    return " ".join(found[:2])


def shown_size(size_bytes: float) -> str:
    """Return a size in the largest unit of which there is one: `1.5 GiB`."""
    for unit, length in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes:.0f} B"


def counted(count: int, thing: str, things: str | None = None) -> str:
    """Return a number of things: `1 vCPU`, `2 vCPUs`."""
    return f"{count} {thing if count == 1 else things or f'{thing}s'}"
