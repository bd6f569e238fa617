"""Errors in the words of the command line: options by their names, and limits in people's units.

The SDK and the daemon name the field of a request that is wrong.  A person typed an option, so the
message begins with that, and says what was typed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.cli.units import MIB, shown_duration, shown_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forkd.errors import ForkdError


def _size(mib: float) -> str:
    return shown_size(mib * MIB)


def _number(value: float) -> str:
    return f"{value:g}"


@dataclass(frozen=True, slots=True)
class Option:
    """What a field of a request is called on the command line.

    Attributes:
        name: The option or the argument.
        shown: What prints its values.
        secret: Whether what was typed is not repeated.
        form: What its text consists of.
        others: What other commands call it.
    """

    name: str
    shown: Callable[[float], str] = _number
    secret: bool = False
    form: str = "of the right form"
    others: tuple[str, ...] = ()

    def called(self, typed: Mapping[str, Any]) -> str:
        """Return what the command calls it whose options are `typed`."""
        return next((each for each in (self.name, *self.others) if each in typed), self.name)


TAG_FORM = "1 to 64 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
NAME_FORM = (
    "1 to 63 lower-case letters, digits, '.', '_' and '-', beginning with a letter or a digit"
)


FIELDS: Mapping[str, Option] = {
    "memory_limit_mib": Option("--memory", _size),
    "memory_mib": Option("--memory", _size),
    "disk_limit_mib": Option("--disk", _size),
    "disk_mib": Option("--disk", _size),
    "snapshot_mib": Option("--snapshots", _size),
    "cpu_limit": Option("--cpus"),
    "cpu_weight": Option("--cpu-weight"),
    "pids_limit": Option("--pids"),
    "io_limit_mib_s": Option("--io", _size),
    "io_limit_ops": Option("--io-ops"),
    "bandwidth_limit_mbit": Option("--bandwidth", lambda mbit: f"{mbit:g} Mbit/s"),
    "ttl_s": Option("--ttl", shown_duration, others=("DURATION",)),
    "ttl_secs": Option("--ttl", shown_duration, others=("DURATION",)),
    "timeout_s": Option("--timeout", shown_duration),
    "timeout_secs": Option("--timeout", shown_duration),
    "exec_timeout_s": Option("--exec-timeout", shown_duration),
    "exec_timeout_secs": Option("--exec-timeout", shown_duration),
    "idle_ttl_s": Option("--idle-ttl", shown_duration, others=("--idle",)),
    "idle_ttl_secs": Option("--idle-ttl", shown_duration, others=("--idle",)),
    "expires_in_s": Option("--expires-in", shown_duration),
    "expires_in_secs": Option("--expires-in", shown_duration),
    "vcpus": Option("--vcpus"),
    "n": Option("--n"),
    "snapshot_tag": Option("TAG", form=TAG_FORM),
    "tag": Option("TAG", form=TAG_FORM, others=("--tag", "--to")),
    "network": Option("--network"),
    "secrets": Option("--secret"),
    "labels": Option("--label"),
    "label": Option("--label"),
    "name": Option("--name", form=NAME_FORM, others=("NAME", "TENANT")),
    "env": Option("--env"),
    "cwd": Option("--cwd"),
    "user": Option("--user"),
    "code": Option("CODE"),
    "args": Option("COMMAND"),
    "scopes": Option("--scope"),
    "tenant": Option("--tenant"),
    "hosts": Option("--host"),
    "header": Option("--header"),
    "value": Option("the secret's value", secret=True),
    "url": Option("--url"),
}
"""Options by the field of a request that they fill."""

PHRASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Input should be greater than or equal to (\S+)"), "must be at least {0}"),
    (re.compile(r"Input should be less than or equal to (\S+)"), "must be at most {0}"),
    (re.compile(r"Input should be greater than (\S+)"), "must be more than {0}"),
    (re.compile(r"Input should be less than (\S+)"), "must be less than {0}"),
    (
        re.compile(r"(?:String|Value) should have at least (\d+) character.*"),
        "is shorter than {0} characters",
    ),
    (
        re.compile(r"(?:String|Value) should have at most (\d+) character.*"),
        "is longer than {0} characters",
    ),
    (
        re.compile(r"(?:List|Dictionary|Set|Value) should have at most (\d+) item.*"),
        "may be given {0} times at most",
    ),
    (
        re.compile(r"(?:List|Dictionary|Set|Value) should have at least (\d+) item.*"),
        "must be given at least {0} times",
    ),
    (re.compile(r"Input should be a valid integer.*"), "is not a whole number"),
    (re.compile(r"Input should be a valid number.*"), "is not a number"),
    (re.compile(r"Input should be a finite number.*"), "is not a finite number"),
    (re.compile(r"(?:Value|Assertion) error, (.*)", re.DOTALL), "{0}"),
)
"""What the library that checks values says, and how we say it."""


def plain(message: str, shown: Callable[[float], str] = str) -> str:
    """Return a complaint about a value in our words."""
    for pattern, words in PHRASES:
        if found := pattern.fullmatch(message.strip().rstrip(".")):
            return words.format(*(_limit(each, shown) for each in found.groups()))
    return message


def _limit(text: str, shown: Callable[[float], str]) -> str:
    try:
        return shown(float(text))
    except ValueError:
        return text


def _option_of(field: str, typed: Mapping[str, Any]) -> Option | None:
    """Return the option that fills a field: one that is listed, or that has the field's name."""
    alike = f"--{field.replace('_', '-')}"
    return FIELDS.get(field) or (Option(alike) if alike in typed else None)


def said(error: ForkdError, typed: Mapping[str, Any] | None = None) -> str:
    """Return an error's message, with an option's name in place of a field's.

    Args:
        error: What the SDK raised.
        typed: Values of the command's options and arguments by `Option.name`.
    """
    message = str(error)
    field = str(error.context.get("field", ""))
    parts = [each for each in field.split(".") if not each.isdigit()]
    option = _option_of(parts[0], typed or {}) if parts else None
    if option is None or not message.startswith(f"{field}: "):
        return message
    what = plain(message.removeprefix(f"{field}: "), option.shown)
    name = option.called(typed or {})
    value = None if option.secret or typed is None else typed.get(name)
    if what.startswith("String should match pattern"):
        return f"{name}: {value!r} is not {option.form}"
    if what.startswith("must be ") and isinstance(value, int | float):
        return f"{name}: {option.shown(value)} is out of range; it {what}"
    return f"{name} {what}" if what.startswith(("is ", "may ", "must ")) else f"{name}: {what}"
