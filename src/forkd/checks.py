"""What an examination of a host finds: checks, and how they are shown."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


DEBIAN_IMAGES = "images of Debian packages"
"""The check of what builds images of Debian packages."""


class Status(StrEnum):
    """How a check came out."""

    PASS = "PASS"  # noqa: S105 - not a password
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What was looked at.
        status: How it came out.
        found: What was found, in a sentence.
        advice: What to do about it; empty if nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""

    def as_members(self) -> dict[str, str]:
        """Return it as members of a JSON object."""
        return asdict(self)


def exit_status(found: Iterable[Check]) -> int:
    """Return 1 if something keeps sandboxes from running here, else 0."""
    return int(any(each.status is Status.FAIL for each in found))


def as_json(found: Iterable[Check]) -> str:
    """Return the checks as one JSON document."""
    return json.dumps([each.as_members() for each in found], indent=2)


def as_text(found: Iterable[Check]) -> str:
    """Return the checks for a person, each with what to do about it."""
    lines: list[str] = []
    for each in found:
        lines.append(f"{each.status:4}  {each.name}: {each.found}")
        if each.advice and each.status is not Status.PASS:
            lines.append(f"      -> {each.advice}")
    return "\n".join(lines)
