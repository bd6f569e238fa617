"""Be root over a root file system's files, whether or not we are root.

The programs that make a root file system (tar, umoci, mke2fs) must see its files with the
owners they will have in the guest.  As root they simply do.  Otherwise they run in a user
namespace of their own, where we are root and `/etc/subuid` gives us the other owners: what
belongs to root there belongs to us outside, so Python can write to it without a namespace.

Either way they have mounts and processes of their own, which end with them: a build that
is killed leaves no mount behind.
"""

from __future__ import annotations

import getpass
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forkd.images.steps import Build

REMOVE_TIMEOUT_S = 120.0

_OWN_WORLD = ("--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


def is_root() -> bool:
    """Tell whether we are root already."""
    return os.geteuid() == 0


def run_as_root(
    args: Sequence[str | Path],
    build: Build,
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
) -> None:
    """Run a program as root over the files of a build.

    Raises:
        BuildError: It is not installed or failed, or this host gives us no user namespace
            with more than one owner.
    """
    name = str(args[0])
    if not process.installed(name):
        raise BuildError(f"{name} is not installed", program=name)
    command = ["unshare", *_namespaces(), *_OWN_WORLD, "--", *args]
    try:
        build.run(command, timeout_s=timeout_s, on_line=on_line)
    except BuildError as error:
        what = str(error).removeprefix("unshare")
        raise BuildError(f"{name}{what}", **{**error.context, "program": name}) from error


def _namespaces() -> tuple[str, ...]:
    if is_root():
        return ()
    if (missing := _missing()) is not None:
        raise BuildError(f"building without root needs {missing}; or build as root")
    return ("--user", "--map-root-user", "--map-auto")


def remove(path: Path, build: Build) -> None:
    """Remove a folder whose files may belong to any owner of the namespace."""
    if not path.exists() or is_root():
        files.remove_tree(path)
    else:
        run_as_root(["rm", "-rf", "--", path], build, timeout_s=REMOVE_TIMEOUT_S)


def _missing() -> str | None:
    """Name what this host lacks for namespaces of our own; None if nothing."""
    if not process.installed("newuidmap"):
        return "newuidmap (Debian package uidmap)"
    owner = (f"{getpass.getuser()}:", f"{os.getuid()}:")
    for table in (Path("/etc/subuid"), Path("/etc/subgid")):
        lines = table.read_text().splitlines() if table.exists() else []
        if not any(line.startswith(owner) for line in lines):
            return f"a line for {getpass.getuser()} in {table}"
    return None
