"""Find the kernel that the helper machine boots: Debian's generic one.

It is the same package that guests boot, in the same cache: `forkd.images`
fetches and unpacks it there as `kernels/<version>/{vmlinuz,modules}`, or below
`kernels/<series>` if `FORKD_MACHINE_KERNEL` names a series, such as `6.12`.  If
the cache has none yet, that is run as a program of its own, because the client
side loads no host code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VARIABLE = "FORKD_MACHINE_KERNEL"
"""The environment variable that says which kernel: the beginning of its version."""

SERIES = re.compile(r"[1-9][0-9]?(\.[0-9]{1,3}){0,2}")
"""What it may say."""

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


def find_kernel(cache: Path | None = None, *, progress: Callable[[str], object] = str) -> Kernel:
    """Return the newest cached kernel of the series that is wanted, fetching one if there is none.

    Args:
        cache: Where kernels are kept.
        progress: Told each step of fetching one.

    Raises:
        InvalidRequest: `FORKD_MACHINE_KERNEL` is no series, or a variable that names a mirror of
            Debian has no URL.
        HostError: None could be fetched; the message says why, and what to do.
    """
    series = _series()
    kernels = (cache or default_cache()) / "kernels"
    folder = kernels if series is None else kernels / series
    kernel = newest_kernel(folder)
    if kernel is None:
        _fetch(kernels.parent, series, progress)
        kernel = newest_kernel(folder)
    if kernel is None:
        raise HostError(f"no kernel could be put into {folder}")
    return kernel


def _series() -> str | None:
    said = os.environ.get(VARIABLE) or None
    if said is not None and SERIES.fullmatch(said) is None:
        raise InvalidRequest(
            f"{VARIABLE} is {said!r}: must be the beginning of a version of Linux, such as 6.12",
            field=VARIABLE,
        )
    return said


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


def _fetch(cache: Path, series: str | None, progress: Callable[[str], object]) -> None:
    named = "debian" if series is None else series
    arguments = ["kernel", "--json", "--cache", str(cache), named]
    environment = {name: value for name, value in os.environ.items() if name != _GUESTS}
    with subprocess.Popen(  # noqa: S603 - ours
        [sys.executable, "-m", "forkd.images", *arguments],
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        deadline = threading.Timer(FETCH_DEADLINE_S, process.kill)
        deadline.start()
        try:
            _follow(process.stdout or (), progress)
        except BaseException:
            process.terminate()
            raise
        finally:
            deadline.cancel()


def _follow(lines: Iterable[bytes], progress: Callable[[str], object]) -> None:
    """Pass on what a program that fetches a kernel tells, until it is done."""
    last = ""
    for line in lines:
        said = json.loads(line)
        match said["event"]:
            case "progress" if said["message"] != last:
                last = said["message"]
                progress(last)
            case "failed":
                error = InvalidRequest if said["code"] == InvalidRequest.code else HostError
                raise error(f"the helper machine has no kernel: {said['message']}")
            case "built":
                return
    raise HostError(
        f"the helper machine's kernel was not fetched within {FETCH_DEADLINE_S:.0f} s, or what "
        "fetches it ended"
    )


_GUESTS = "FORKD_KERNEL"
"""Says which kernel guests boot."""
