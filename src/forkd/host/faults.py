"""Errors of the kernel as exceptions of ours: the one place that knows both.

Every call of this package that the kernel can refuse is made under `kernel_call`, so that no
layer above needs to know which calls can fail, or what an errno means.  Running out of something
that others may give back (space, memory, descriptors, processes) is a `CapacityError`, which a
client may try again; all else is a `HostError`.
"""

from __future__ import annotations

import errno
import os

from forkd.errors import CapacityError, HostError

NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""What the kernel says of a path that leads to no file."""

EXHAUSTED = {
    errno.ENOSPC: "free space on its file system",
    errno.EDQUOT: "raise the quota",
    errno.EMFILE: "raise the daemon's limit of open files (LimitNOFILE=)",
    errno.ENFILE: "raise fs.file-max",
    errno.ENOMEM: "free memory",
    errno.EAGAIN: "raise the limit of processes (TasksMax=, kernel.pid_max)",
    errno.ENOBUFS: "free memory",
}
"""What runs out, and the way out."""


def host_error(doing: str, error: OSError, **context: str | int) -> HostError | CapacityError:
    """Return an error of the kernel as one of ours.

    Args:
        doing: What was tried, to follow on "cannot".
        error: What the kernel said.
        context: Ids and numbers that belong to it.
    """
    number = error.errno or 0
    reason = error.strerror or str(error) or type(error).__name__
    if (way_out := EXHAUSTED.get(number)) is not None:
        return CapacityError(f"cannot {doing}: {reason}; {way_out}", **context, errno=number)
    if number:
        context["errno"] = number
    return HostError(f"cannot {doing}: {reason}", **context)


class kernel_call:  # noqa: N801 - used as a function is
    """Raise what the kernel refuses in the block as one of ours.

    A class of its own, and no `contextlib.contextmanager`: a fork enters eight for each child, and
    a generator takes half as long again (1.06 µs, not 0.66).

    Args:
        doing: What the block does, to follow on "cannot": `make /run/forkd/s/sb-…`.
        context: Ids and numbers that belong to an error.

    Raises:
        CapacityError: Something ran out that others may give back.
        HostError: Anything else.
    """

    __slots__ = ("_context", "_doing")

    def __init__(self, doing: str, **context: str | int) -> None:
        self._doing = doing
        self._context = context

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: object
    ) -> None:
        if isinstance(error, OSError):
            raise host_error(self._doing, error, **self._context) from error


def strerror(number: int) -> str:
    """Return the kernel's words for an errno."""
    return os.strerror(number)
