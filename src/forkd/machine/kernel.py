"""Find the kernel that the helper machine boots: Debian's generic one.

It is the same package that guests boot, in the same cache: `forkd.images`
fetches and unpacks it there as `kernels/<version>/{vmlinuz,modules}`.  If the
cache has none yet, that is run as a program of its own, because the client side
loads no host code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostError

FETCH_DEADLINE_S = 600.0
"""How long fetching 70 MB of kernel package may take."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on the host's disk.

    Attributes:
        image: What the boot loader loads.
        modules: Its modules, with `modules.dep`.
        release: As `uname -r` says it.
    """

    image: Path
    modules: Path
    release: str


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/forkd`, or its default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forkd"


def find_kernel(cache: Path | None = None) -> Kernel:
    """Return the newest cached kernel, fetching one if there is none.

    Raises:
        HostError: None could be fetched.
    """
    folder = (cache or default_cache()) / "kernels"
    kernel = newest_kernel(folder)
    if kernel is None:
        _fetch(folder.parent)
        kernel = newest_kernel(folder)
    if kernel is None:
        raise HostError(f"no kernel could be put into {folder}")
    return kernel


def newest_kernel(folder: Path) -> Kernel | None:
    """Return the kernel of the highest version in `folder`, if it has any."""
    complete = [path for path in folder.glob("*") if (path / "modules/modules.dep").is_file()
                and (path / "vmlinuz").is_file() and not path.name.startswith(".")]  # fmt: skip
    if not complete:
        return None
    newest = max(complete, key=lambda path: _version(path.name))
    return Kernel(newest / "vmlinuz", newest / "modules", newest.name.partition("_")[0])


def _version(name: str) -> list[int]:
    return [int(part) for part in "".join(c if c.isdigit() else " " for c in name).split()]


def _fetch(cache: Path) -> None:
    arguments = [sys.executable, "-m", "forkd.images", "kernel", "--cache", str(cache)]
    try:
        subprocess.run(arguments, check=True, timeout=FETCH_DEADLINE_S)  # noqa: S603 - ours
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"the helper machine's kernel could not be fetched: {error}") from error
