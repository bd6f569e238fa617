"""What captives try, and what each gets: the data of the suite, and of tables in captive-tries.md.

The tries are those of `crates/vmm/src/jail/captive.rs`.  What is not refused is in `captives.json`,
by the place of the process that was taken over; the suite fails if anything else was got, or if
anything of that was not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "crates/vmm/src/jail/captive.rs"
GOT = Path(__file__).with_suffix(".json")

ABOVE = "above:"
"""How the hostname of a child begins whose zygote, or seed, is to be the captive."""

_TRIES = re.compile(r'tries!\["(?P<group>\w+)",(?P<tries>.*?)^    \]', re.DOTALL | re.MULTILINE)
_NAME = re.compile(r'^        "(?P<name>[^"]+)" =>', re.MULTILINE)


def tries() -> set[tuple[str, str]]:
    """Return every try, with its group."""
    return set(listed())


def listed() -> list[tuple[str, str]]:
    """Return every try, with its group, as they are made one after the other."""
    found = _TRIES.finditer(SOURCE.read_text(encoding="utf-8"))
    return [(each["group"], name) for each in found for name in _NAME.findall(each["tries"])]


def got(place: str) -> set[tuple[str, str]]:
    """Return what is not refused to a captive in a place."""
    return {(group, each) for group, names in places()[place].items() for each in names}


def places() -> dict[str, dict[str, list[str]]]:
    """Return what is not refused, by place and group."""
    found: dict[str, dict[str, list[str]]] = json.loads(GOT.read_text(encoding="utf-8"))
    return found
