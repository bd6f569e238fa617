"""Be root over a root file system's files, whether or not we are root.

The programs that make a root file system (tar, what unpacks images, mke2fs) must see its files with
the owners they will have in the guest.  As root they simply do.  Otherwise they run in a user
namespace of their own, where we are root and `/etc/subuid` gives us the other owners: what
belongs to root there belongs to us outside, so Python can write to it without a namespace.

Either way they have mounts and processes of their own, which end with them: a build that
is killed leaves no mount behind.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, proc, process
from forkd.images.steps import check_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forkd.images.steps import Build

REMOVE_TIMEOUT_S = 120.0

TABLE_BYTES_MAX = 1024 * 1024
"""How much is read of `/etc/subuid`: a line of some 20 bytes for each user."""

_OWN_WORLD = ("--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


def run_as_root(  # noqa: PLR0913 - as `process.run`
    args: Sequence[str | Path],
    build: Build,
    *,
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
    network: bool = False,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a program as root over the files of a build, without a network unless it needs one.

    Raises:
        BuildError: It is not installed or failed, or this host gives us no user namespace
            with more than one owner.
    """
    name = str(args[0])
    check_installed(name)
    offline = () if network else ("--net",)
    command = ["unshare", *_namespaces(), *_OWN_WORLD, *offline, "--", *args]
    try:
        build.run(command, timeout_s=timeout_s, on_line=on_line, env=env)
    except BuildError as error:
        what = str(error).removeprefix("unshare")
        raise BuildError(f"{name}{what}", **{**error.context, "program": name}) from error


def _namespaces() -> tuple[str, ...]:
    if proc.is_root():
        return ()
    if (missing := _missing()) is not None:
        raise BuildError(f"building without root needs {missing}; or build as root")
    return ("--user", "--map-root-user", "--map-auto")


def remove(path: Path, build: Build) -> None:
    """Remove a folder whose files may belong to any owner of the namespace, however deep it is.

    A build that was cancelled removes what it made, too.
    """
    if not files.is_there(path):
        return
    args = ("rm", "-rf", "--", path)
    if proc.is_root():
        process.run(args, timeout_s=REMOVE_TIMEOUT_S)
    else:
        run_as_root(args, replace(build, cancel=None), timeout_s=REMOVE_TIMEOUT_S)


def _missing() -> str | None:
    """Name what this host lacks for namespaces of our own; None if nothing."""
    if not process.installed("newuidmap"):
        return "newuidmap (Debian package uidmap)"
    name, uid = proc.user()
    for table in (Path("/etc/subuid"), Path("/etc/subgid")):
        lines = (files.read(table, TABLE_BYTES_MAX) or b"").decode().splitlines()
        if not any(line.startswith((f"{name}:", f"{uid}:")) for line in lines):
            return f"a line for {name} in {table}"
    return None
