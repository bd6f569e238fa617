"""Set what is wrong on a host for good, by one file of sysctl.d and one of tmpfiles.d.

`plan` says what the files would be; `apply` writes them, and sets the values at once where the host
is this one.  A file has exactly what is wrong now and what it has had before, so that doing it
again changes nothing.  Deleting both files takes it back, at the host's next start.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from forkd.host import files, tunables, tuning
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forkd.host.tuning import Seen, Setting

SYSCTL_FILE = Path("etc/sysctl.d/90-forkd.conf")
"""Sorts behind the distributions' own."""

TMPFILES_FILE = Path("etc/tmpfiles.d/forkd.conf")

FILE_BYTES_MAX = 64 * 1024
"""The longest such file that is read."""

HEAD = "# Written by `forkd doctor --fix`. Delete this file and restart to take it back."


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        files: Files that would change, below the host's root, and what would be in them.
        settings: What is wrong now.
    """

    files: Mapping[Path, str]
    settings: tuple[Setting, ...]


def plan(host: Seen, existing: Mapping[Path, str]) -> Plan:
    """Return what mends what is wrong on a host, as far as files can.

    Args:
        host: What was seen.
        existing: Those of the two files that are there.
    """
    wrong = tuning.wrong(host)
    wanted: dict[Path, str] = {}
    for path in (SYSCTL_FILE, TMPFILES_FILE):
        missing = [each for each in wrong if each.is_sysctl is (path == SYSCTL_FILE)]
        text = _merged(existing.get(path, ""), missing)
        if missing and text != existing.get(path):
            wanted[path] = text
    return Plan(wanted, wrong)


def _merged(existing: str, settings: list[Setting]) -> str:
    """Return a file with these settings, and what it had of others."""
    kept = [
        line
        for line in existing.splitlines()
        if line != HEAD and not any(_is_of(line, each) for each in settings)
    ]
    return "\n".join([HEAD, *kept, *(each.line for each in settings)]) + "\n"


def _is_of(line: str, setting: Setting) -> bool:
    return setting.name in line.replace("=", " ").split()


# Effects


def existing(root: Path) -> dict[Path, str]:
    """Return those of the two files that are there.

    Raises:
        HostError: One cannot be read.
    """
    found = {}
    for path in (SYSCTL_FILE, TMPFILES_FILE):
        data = files.read(root / path, FILE_BYTES_MAX)
        if data is not None:
            found[path] = data.decode(errors="replace")
    return found


def write(planned: Plan, root: Path) -> None:
    """Write the files.

    Raises:
        HostError: The kernel refused.
    """
    for path, text in planned.files.items():
        files.make_folder((root / path).parent, parents=True, exist_ok=True)
        files.write_atomic(root / path, text.encode())


def set_now(planned: Plan) -> dict[str, str]:
    """Set the values on this host; return why not, for each that the kernel refused."""
    refused = {}
    for each in planned.settings:
        try:
            with kernel_call(f"set {each.name}"):
                tunables.write(tuning.ROOT / each.path, each.wanted)
        except ForkdError as error:
            refused[each.name] = str(error)
    return refused
