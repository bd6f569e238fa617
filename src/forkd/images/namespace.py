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
    from collections.abc import Sequence

    from forkd.images.steps import Build

REMOVE_TIMEOUT_S = 120.0

_OWN_WORLD = ("--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


def is_root() -> bool:
    """Tell whether we are root already."""
    return os.geteuid() == 0


def as_root(args: Sequence[str | Path]) -> list[str | Path]:
    """Return the command that runs `args` as root over the files of a build.

    Raises:
        BuildError: This host gives us no user namespace with more than one owner.
    """
    if is_root():
        return ["unshare", *_OWN_WORLD, "--", *args]
    if (missing := _missing()) is not None:
        raise BuildError(f"building without root needs {missing}; or build as root")
    return ["unshare", "--user", "--map-root-user", "--map-auto", *_OWN_WORLD, "--", *args]


def remove(path: Path, build: Build) -> None:
    """Remove a folder whose files may belong to any owner of the namespace."""
    if not path.exists() or is_root():
        files.remove_tree(path)
    else:
        build.run(as_root(["rm", "-rf", "--", path]), timeout_s=REMOVE_TIMEOUT_S)


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
