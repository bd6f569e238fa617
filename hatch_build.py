"""Put what a host needs besides Python into the wheel (docs/adr/0063).

`FORKD_WHEEL=platform` makes the wheel that has the VMM, the agent, recipes and what is in
`packaging`; `FORKD_WHEEL=pure` the one with the client alone.  Without it the programs decide: if
`build/bin` has both, they go along.  Nothing is compiled here: `make build` does that.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAMS = ("forkd-vmm", "forkd-agent")
FOLDERS = ("recipes", "packaging")

BUNDLED = "forkd/bundled"
"""Where all of it is in the wheel; `forkd.programs` looks there."""

TAG = "py3-none-manylinux_2_17_x86_64.musllinux_1_1_x86_64"
"""Static programs need no C library of the host; these are the oldest that installers know."""

KINDS = ("platform", "pure")

_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_X86_64 = 62
_INTERPRETER = 3


class WheelHook(BuildHookInterface[Any]):
    """Adds the files, and says for which systems the wheel is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Choose the kind of wheel, and what is in it."""
        if version == "editable":
            return  # the checkout is looked into
        root = Path(self.root)
        if chosen(os.environ.get("FORKD_WHEEL", ""), root) == "pure":
            return
        build_data["pure_python"] = False
        build_data["tag"] = TAG
        build_data["force_include"].update(bundled(root))


def chosen(said: str, root: Path) -> str:
    """Return the kind of wheel for what the environment says.

    Raises:
        ValueError: It says neither, or the programs are missing or not static.
    """
    if said and said not in KINDS:
        raise ValueError(f"FORKD_WHEEL is platform or pure, not {said!r}")
    paths = [root / "build/bin" / name for name in PROGRAMS]
    if said == "pure" or (not said and not all(path.is_file() for path in paths)):
        return "pure"
    for path in paths:
        if not path.is_file():
            raise ValueError(f"there is no {path}: run `make build`, or set FORKD_WHEEL=pure")
        check_static(path)
    return "platform"


def bundled(root: Path) -> dict[str, str]:
    """Return the files that a host needs, each with its path in the wheel."""
    found = {str(root / "build/bin" / name): f"{BUNDLED}/bin/{name}" for name in PROGRAMS}
    for folder in FOLDERS:
        for path in _files(root / folder):
            found[str(path)] = f"{BUNDLED}/{path.relative_to(root)}"
    return found


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def check_static(path: Path) -> None:
    """Return if a program runs on every Linux on x86_64.

    Raises:
        ValueError: It is for another processor, or needs a C library.
    """
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02" or len(data) < _ELF_HEADER.size:
        raise ValueError(f"{path} is no program of 64 bits")
    header = _ELF_HEADER.unpack_from(data)
    machine, table, size, count = header[2], header[5], header[9], header[10]
    if machine != _X86_64:
        raise ValueError(f"{path} is not for x86_64")
    kinds = [_PROGRAM_HEADER.unpack_from(data, table + at * size)[0] for at in range(count)]
    if _INTERPRETER in kinds:
        raise ValueError(f"{path} is not static: run `make build`")
