"""Fetch QEMU 10 of Debian 13 into `build/qemu`, and print the path of its program.

    FORKD_MACHINE_QEMU=$(python -m tools.qemu) make test-machine

The program is a script that starts it with the libraries and firmware beside it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from typing import TYPE_CHECKING

from forkd.errors import ForkdError
from tools import in_machine, trixie

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = trixie.Program(
    "QEMU", ("qemu-system-x86",), re.compile(r"(?:lib|qemu|seabios|zlib).*")
)  # fmt: skip
"""QEMU, and the firmware that it boots a machine with."""

NAME = "qemu-system-x86_64"

FIRMWARE = ("usr/share/qemu", "usr/share/seabios")


def main() -> int:
    """Print the program's path, fetched if need be; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", choices=["10"], help="the only one there is")
    parser.parse_args()
    try:
        folder = trixie.fetch(in_machine.ROOT / "build" / "qemu", PROGRAM, in_machine.say)
        program = folder / NAME
        program.write_text(script(folder), encoding="utf-8")
        program.chmod(0o755)
    except (ForkdError, OSError) as error:
        in_machine.say(f"error: {error}")
        return 125
    sys.stdout.write(f"{program}\n")
    return 0


def script(folder: Path) -> str:
    """Return the script that starts QEMU in `folder`."""
    firmware = [word for name in FIRMWARE for word in ("-L", str(folder / name))]
    started = shlex.join([*trixie.command(folder, NAME), *firmware])
    modules = shlex.quote(str(folder / trixie.LIBRARIES / "qemu"))
    return f'#!/bin/sh\nQEMU_MODULE_DIR={modules} exec {started} "$@"\n'


if __name__ == "__main__":
    sys.exit(main())
