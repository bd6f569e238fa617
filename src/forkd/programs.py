"""Find what comes with forkd and is not Python: the VMM, the guest agent, and recipes.

Both sides need them, the daemon to start machines and `forkd up` to try whether it could, so this
imports nothing of either.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from forkd.errors import HostError

VMM = "forkd-vmm"
AGENT = "forkd-agent"

_BUNDLED = Path(__file__).resolve().parent / "bundled"
"""What a wheel for Linux on x86_64 has besides Python (`hatch_build.py`)."""

_CHECKOUT = Path(__file__).resolve().parents[2]

RECIPES = (_BUNDLED if _BUNDLED.is_dir() else _CHECKOUT) / "recipes"
"""The recipes that come with forkd."""

PACKAGING = (_BUNDLED if _BUNDLED.is_dir() else _CHECKOUT) / "packaging"
"""Units, profiles and other files that come with forkd for a host's own programs."""

_BUILT = ("build/bin", "target/x86_64-unknown-linux-gnu/release")
"""Where `make build` and cargo leave them, linked statically."""

_VARIABLES = {VMM: "FORKD_VMM", AGENT: "FORKD_AGENT"}


SYSTEM, ARCHITECTURE = "Linux", "x86_64"
"""Where machines run, and what the programs are built for."""


def check_host() -> None:
    """Return if the VMM and the agent can run on this host.

    Raises:
        HostError: It has another system or another processor.
    """
    found = f"{platform.system()} on {platform.machine()}"
    if found != f"{SYSTEM} on {ARCHITECTURE}":
        raise HostError(
            f"forkd runs machines on {SYSTEM} on {ARCHITECTURE} only, and this host is {found}: "
            "set FORKD_URL and FORKD_TOKEN to use the daemon of such a host from here"
        )


def find(name: str) -> Path:
    """Return the program called `name`.

    It is what its variable names (`FORKD_VMM`, `FORKD_AGENT`), or is beside this Python, or was
    built in this checkout, or came with this package, or is on `PATH`: the first of these.

    Raises:
        HostError: It is nowhere, or cannot run here.
    """
    check_host()
    for path in _candidates(name):
        if path.is_file() and os.access(path, os.X_OK):
            return path.absolute()
    raise HostError(
        f"the program {name} is nowhere to be found: the wheel for Linux on x86_64 has it, "
        f"`make build` makes it in a checkout, and {_VARIABLES[name]} says where it is",
        program=name,
    )


def _candidates(name: str) -> list[Path]:
    named = os.environ.get(_VARIABLES[name])
    if named:
        return [Path(named)]
    found = shutil.which(name)
    built = [_CHECKOUT / folder / name for folder in _BUILT]
    return [
        Path(sys.executable).parent / name,
        *built,
        _BUNDLED / "bin" / name,
        *([Path(found)] if found else []),
    ]
