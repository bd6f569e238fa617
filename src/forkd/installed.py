"""How forkd is installed: alone under its name, and with what a program of it needs.

The distribution is `forkd-vm` (docs/adr/0063).  The one called `forkd` is another program with a
package of the same name: in one environment each overwrites files of the other.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec

DISTRIBUTION = "forkd-vm"
"""What forkd is called where packages come from."""

VERSION = "0.1.0"

EXTRAS = {
    "packs": ("blake3", "cryptography", "zstandard"),
    "daemon": (
        "dns",
        "fastapi",
        "prometheus_client",
        "pydantic_settings",
        "pyroute2",
        "pysequoia",
        "uvicorn",
    ),
}
"""The modules that each extra brings."""

INSTALLERS = {"uv-receipt.toml": "uv tool install", "pipx_metadata.json": "pipx install"}
"""Files in the environments of installers of programs, and the commands that make those."""

UNIX_MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty")
"""Modules of the standard library that Python has on Unix alone, and that some commands need."""

PROGRAMS = {"forkd", "forkd-daemon"}
"""What an installer makes programs of."""

_OTHER = re.compile(r"forkd-[0-9][^-]*\.(?:dist|egg)-info")


def check_alone(folder: str | None = None) -> None:
    """Return if no other distribution has a package `forkd` beside this one.

    Args:
        folder: Where packages are installed; where this one is, if None.

    Raises:
        ImportError: There is one; the message says what to run.
    """
    folder = folder or os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib takes long to load
    try:
        names = os.listdir(folder)  # noqa: PTH208 - as above
    except OSError:
        return  # a zip file, say
    found = next((name for name in names if _OTHER.fullmatch(name)), None)
    if found is None:
        return
    raise ImportError(
        f"two programs are installed as the package `forkd` in {folder}: {DISTRIBUTION}, and "
        f"{found.rpartition('.')[0]}, which is another one. They overwrite each other's files. Run "
        f"`pip uninstall forkd {DISTRIBUTION}`, then install the one that you want"
    )


def start_alone() -> None:
    """As `check_alone`, for whoever imports the package; ends one of its programs with the message.

    Raises:
        ImportError: There is another distribution, and this process is another's program.
    """
    try:
        check_alone()
    except ImportError as error:
        path, name = os.path.split(sys.argv[0] if sys.argv else "")
        if path and name in PROGRAMS:
            sys.exit(f"error: {error}")
        raise


def lacking(extra: str) -> str | None:
    """Return what an extra would bring and is not there, with what to run; None if all is there."""
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    return _advice(missing[0], extra) if missing else None


def has_unix_modules() -> bool:
    """Whether Python has the modules of `UNIX_MODULES`, as on every Unix."""
    try:
        return all(find_spec(name) is not None for name in UNIX_MODULES)
    except ImportError:
        return False


def advice(module: str | None) -> str | None:
    """Return what to do about a module that could not be imported; None if nobody knows."""
    top = (module or "").partition(".")[0]
    if top in UNIX_MODULES:
        return (
            f"this command needs Python's module {top}, which {sys.platform} does not have: use "
            "it on Linux, or set FORKD_URL and FORKD_TOKEN to use the daemon of a Linux host"
        )
    for extra, modules in EXTRAS.items():
        if top in modules:
            return _advice(top, extra)
    return None


def _advice(module: str, extra: str) -> str:
    return (
        f"the Python package {module} is not installed: `{_install_command(extra)}` "
        "installs it and what else is needed"
    )


def _install_command(extra: str) -> str:
    """Return what installs an extra, by the installer that has made this environment."""
    for record, command in INSTALLERS.items():
        if os.path.exists(os.path.join(sys.prefix, record)):  # noqa: PTH110, PTH118 - as above
            return f"{command} --force '{DISTRIBUTION}[{extra}] @ URL-OF-THE-WHEEL'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
