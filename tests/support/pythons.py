"""Pythons of several releases: this host's own, and those of Debian in fresh roots."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import fresh_root

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.support.fresh_root import FreshRoot

RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
"""Debian's releases whose `python3` it is; none has 3.12."""

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
"""What the client is for."""

INSTALLED = (
    (Path.home() / ".pyenv/versions", "{version}.*/bin/python{version}"),
    (Path("/opt/hostedtoolcache/Python"), "{version}.*/x64/bin/python{version}"),
)
"""Where there may be others than the distribution's: with pyenv, and on hosted runners."""

TIMEOUT_S = 600.0

ASK_TIMEOUT_S = 30.0

SAY_VERSION = "import ensurepip, ssl, sys; print('{}.{}'.format(*sys.version_info))"


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter.

    Attributes:
        path: Its program.
        root: Where that is; None for this host.
    """

    path: str
    root: FreshRoot | None = None

    def run(
        self, words: Sequence[str | Path], environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command line where the interpreter is."""
        given = dict(environment or {})
        line = [str(each) for each in words]
        if self.root is not None:
            settings = [f"{name}={value}" for name, value in given.items()]
            return self.root.run(shlex.join(["env", *settings, *line]), timeout_s=TIMEOUT_S)
        return subprocess.run(  # noqa: S603 - a test's own
            line, env=_inherited() | given, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip


@cache
def of_this_host(version: str) -> str | None:
    """Return the program of this host that is a Python of a version; None if there is none."""
    found: list[str | Path | None] = [sys.executable, shutil.which(f"python{version}")]
    for folder, pattern in INSTALLED:
        found += sorted(folder.glob(pattern.format(version=version)))
    return next((str(each) for each in found if each and _said_version(each) == version), None)


def is_available(version: str) -> bool:
    """Whether this host has that Python, or can make a root that has it."""
    made = shutil.which("mmdebstrap") is not None and os.geteuid() == 0
    return of_this_host(version) is not None or (version in RELEASES and made)


@contextlib.contextmanager
def python(version: str, folder: Path) -> Iterator[Python]:
    """Have a Python of a version, of this host if it has one.

    Args:
        version: Of two parts.
        folder: A folder of this host; a root has it as well, at the same path.
    """
    here = of_this_host(version)
    if here is not None:
        yield Python(here)
        return
    release = RELEASES[version]
    lower = fresh_root.made(release, fresh_root.PYTHON_ONLY, release)
    (shared := folder / "shared").mkdir()
    with fresh_root.fresh_root(lower, layer=folder / "layer", shared=(shared,)) as root:
        yield Python("/usr/bin/python3", root)


def _said_version(program: str | Path) -> str:
    """Return the version of a Python that can make environments; empty if it is none."""
    done = subprocess.run(  # noqa: S603 - a test's own
        [program, "-c", SAY_VERSION],
        env=_inherited(), capture_output=True, text=True, check=False, timeout=ASK_TIMEOUT_S,
    )  # fmt: skip
    return done.stdout.strip()


def _inherited() -> dict[str, str]:
    """Return this process's environment without what concerns its own Python, or forkd."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FORKD_", "PYTHON", "VIRTUAL_ENV"))
    }
