"""Make the requirements file of a release: the wheel and all that it needs, with digests.

What it needs is followed from its own metadata, and versions and digests are those of
`requirements.lock`.  So `pip install --require-hashes` installs what the release was tested with.
"""

from __future__ import annotations

import re
from importlib.metadata import distribution
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==\S+(?: \\\n +\S+)+$", re.MULTILINE)
"""A package in a lock file, with its digests."""


class NotLocked(Exception):
    """A package that is needed is not in the lock file."""


def requirements(lock: str, project: str, extras: Iterable[str]) -> str:
    """Return the lines of `lock` for what a project needs with some of its extras.

    Args:
        lock: The text of a lock file with digests.
        project: A distribution that is installed, as are all that it needs.
        extras: Names of extras that are wanted.

    Raises:
        NotLocked: The lock file lacks a package.
    """
    pins = {str(canonicalize_name(each["name"])): each[0] for each in PIN.finditer(lock)}
    names = needed(project, extras)
    missing = sorted(names - pins.keys())
    if missing:
        raise NotLocked(f"not in requirements.lock, so run `make lock`: {', '.join(missing)}")
    return "".join(f"{pins[name]}\n" for name in sorted(names))


def needed(project: str, extras: Iterable[str]) -> set[str]:
    """Return the names of all distributions that a project needs, without its own."""
    wanted = [(project, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while wanted:
        name, chosen = wanted.pop()
        if (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        wanted += _directly(name, chosen)
    return {name for name, _ in seen} - {canonicalize_name(project), project}


def _directly(name: str, extras: frozenset[str]) -> Iterable[tuple[str, frozenset[str]]]:
    for text in distribution(name).requires or []:
        each = Requirement(text)
        environments = [{"extra": extra} for extra in extras or {""}]
        if each.marker is None or any(each.marker.evaluate(one) for one in environments):
            yield canonicalize_name(each.name), frozenset(each.extras)
