"""Split what `make lock` has pinned: what building and running need, and what only tests need.

    python -m tools.split_lock FILE

FILE is a lock file with all that the virtual environment has.  `requirements.lock` gets what forkd
needs with every extra but `dev`, and what builds its wheel; `tests/requirements.lock` the rest.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import release_lock

ROOT = Path(__file__).resolve().parent.parent

RUN = ROOT / "requirements.lock"
TESTS = ROOT / "tests/requirements.lock"

BACKEND = ("hatchling", "editables")
"""What builds the wheel, and what it needs to install a checkout."""

DEV = "dev"
"""The extra of tests and checks."""

HEADS = {
    RUN: "# What building and running need, with digests.  Written by `make lock`.\n",
    TESTS: "# What only tests and checks need besides, with digests.  Written by `make lock`.\n",
}


def running() -> set[str]:
    """Return the names of the packages that building and running need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *BACKEND]
    texts += [each for extra, brought in extras.items() if extra != DEV for each in brought]
    found: set[str] = set()
    for each in map(Requirement, texts):
        if each.name != project["name"]:
            found |= {canonicalize_name(each.name)} | release_lock.needed(each.name, each.extras)
    return found


def split(lock: str, wanted: set[str]) -> dict[Path, str]:
    """Return each lock file with its contents.

    Args:
        lock: All pins, with digests.
        wanted: The packages that building and running need.
    """
    said = dict(HEADS)
    for found in release_lock.PIN.finditer(lock):
        path = RUN if canonicalize_name(found["name"]) in wanted else TESTS
        said[path] += f"{found[0]}\n"
    return said


def main() -> None:
    """Write both files."""
    lock = Path(sys.argv[1]).read_text(encoding="utf-8")
    for path, text in split(lock, running()).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
