"""User namespaces in which the siblings of a machine are users of their own.

`forkd-vmm users` makes them: one that is the machine's user's, below the machine's own namespace,
which only a process of that user can enter.  Numbers are the same in all of them as on the host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from forkd.errors import HostError
from forkd.host.faults import kernel_call
from forkd.host.process import message_in, plain_environment
from forkd.host.rlimits import VMM

if TYPE_CHECKING:
    from collections.abc import Sequence

Extent: TypeAlias = tuple[int, int]
"""The first of a run of users, and how many."""

ANSWER_TIMEOUT_S = 10.0
"""How long making one may take."""

_ANSWER_BYTES_MAX = 4_096
_PROC = Path("/proc")


def extents(pid: int) -> tuple[Extent, ...] | None:
    """Return the users that there are in the namespace of a process; None if it is ours.

    Raises:
        HostError: The process has ended.
    """
    with kernel_call(f"look at the users of process {pid}", pid=pid):
        theirs = (_PROC / str(pid) / "ns/user").stat()
        ours = (_PROC / "self/ns/user").stat()
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return None
        lines = (_PROC / str(pid) / "uid_map").read_text().splitlines()
    return tuple((int(first), int(count)) for first, _, count in map(str.split, lines))


def duplicate(namespace: int) -> int:
    """Return another descriptor of a namespace, which is the caller's."""
    with kernel_call("duplicate a descriptor"):
        return os.dup(namespace)


def make(vmm: Path, pid: int, uid: int, users: Sequence[Extent]) -> int | None:
    """Make a namespace below that of a process; blocks.

    Args:
        vmm: The VMM's program.
        pid: The process.
        uid: Its user, whose the namespace is.
        users: Which there are in it.

    Returns:
        A descriptor of it, which is the caller's; None if there are as many namespaces above it as
        the kernel allows.

    Raises:
        HostError: It could not be made; the message names the setting that forbids it.
    """
    ranges = [f"{first}:{count}" for first, count in users]
    command = VMM.command([vmm, "users", str(pid), str(uid), *ranges])
    with contextlib.ExitStack() as opened:
        with kernel_call("start what makes a user namespace"):
            ours, theirs = map(opened.enter_context, socket.socketpair())
            maker = opened.enter_context(
                subprocess.Popen(  # noqa: S603 - the program is a setting, never a request's
                    command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=plain_environment(),
                    cwd="/",
                )
            )
        opened.callback(maker.kill)
        theirs.close()
        ours.settimeout(ANSWER_TIMEOUT_S)
        with kernel_call("make a user namespace"):
            said, descriptors, _, _ = socket.recv_fds(ours, _ANSWER_BYTES_MAX, 1)
        if descriptors:
            os.set_inheritable(descriptors[0], False)  # noqa: FBT003 - as the library has it
            return descriptors[0]
        if said:
            return None
        last, _ = maker.communicate(timeout=ANSWER_TIMEOUT_S)
        reason = message_in(last) or "forkd-vmm users has ended"
        raise HostError(f"siblings cannot become users of their own: {reason}")
