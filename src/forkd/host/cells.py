"""Cells: jails for programs that are not the VMM, made by `forkd-vmm cell`.

A program in a cell sees the files that it is told of and no others, has no process but its own, no
rights on the host, and a network only if it needs one.  It is a single user that is nobody's, or
root of a user namespace whose users are; either way nothing that it leaves is root's.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host.faults import kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PROC = Path("/proc")

PROGRAM_PATHS = tuple(
    map(
        Path,
        (
            "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/usr", "/etc/alternatives",
            "/etc/ld.so.cache", "/etc/localtime",
        ),
    )
)  # fmt: skip
"""What programs of the host need to start."""

NETWORK_PATHS = tuple(
    map(
        Path,
        (
            "/etc/ca-certificates", "/etc/gai.conf", "/etc/host.conf", "/etc/hosts",
            "/etc/nsswitch.conf", "/etc/pki", "/etc/protocols", "/etc/resolv.conf", "/etc/services",
            "/etc/ssl",
        ),
    )
)  # fmt: skip
"""What they need to find others over the network."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that a program can be run in.

    Attributes:
        vmm: The VMM's program.
        uid: The user that the program is, or that root of its user namespace is.
        uid_count: Users of that namespace; 1 for none.
        cgroup: What it is started in.
    """

    vmm: Path
    uid: int
    uid_count: int = 1
    cgroup: Path | None = None

    def command(
        self,
        args: Sequence[str | Path],
        *,
        read: Iterable[Path] = (),
        write: Iterable[Path] = (),
        network: bool = False,
    ) -> list[str | Path]:
        """Return the words that run a program in the cell.

        Args:
            args: The program, by path or name, and its arguments.
            read: Files and folders that it reads, besides `PROGRAM_PATHS`.
            write: Folders in which it writes; their owner is `uid`.
            network: Whether it has the host's network.
        """
        more = (*NETWORK_PATHS, *_certificates()) if network else ()
        config: dict[str, object] = {
            "read": sorted({str(path) for path in (*PROGRAM_PATHS, *more, *read)}),
            "write": sorted(map(str, write)),
            "network": network,
            "uid": self.uid,
            "uid_count": self.uid_count,
        }
        if self.cgroup is not None:
            config["cgroup"] = str(self.cgroup)
        return [self.vmm, "cell", json.dumps(config), "--", *args]

    def end(self, timeout_s: float) -> None:
        """End every process that is one of the cell's users, and wait until there is none.

        Those of a cell whose first process was killed end by themselves, but not at once.

        Raises:
            HostError: One did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        with kernel_call("end what is left in a cell"):
            while running := [pid for pid in _all_processes() if self._is_inmate(pid)]:
                for pid in running:
                    self._end_one(pid, deadline)

    def _is_inmate(self, pid: int) -> bool:
        """Whether a process is one of the cell's users, and has not ended."""
        try:
            status = (_PROC / str(pid) / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        uid = int(found["Uid"].split()[0])
        return self.uid <= uid < self.uid + self.uid_count and not found["State"].startswith("Z")

    def _end_one(self, pid: int, deadline: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                if not self._is_inmate(pid):  # the number means another process by now
                    return
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                left_s = max(deadline - time.monotonic(), 0)
                poll = select.poll()  # not `select`, which takes no descriptor above 1,023
                poll.register(pidfd, select.POLLIN)
                if not poll.poll(left_s * 1_000):
                    raise HostError(f"process {pid} in a cell survives SIGKILL", pid=pid)
            finally:
                os.close(pidfd)


def _certificates() -> list[Path]:
    """Return the authorities that this process was told to believe, as its children are."""
    named = (Path(os.environ.get(each, "")) for each in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    return [path for path in named if path.is_absolute()]


def _all_processes() -> list[int]:
    return [int(each.name) for each in _PROC.iterdir() if each.name.isdecimal()]


def python_paths() -> tuple[Path, ...]:
    """Return what a program of ours reads that is started by this interpreter.

    Where it was installed, and we: not what else it can import, such as the working directory.
    """
    with kernel_call("find what Python reads"):
        real = Path(os.path.realpath(sys.executable))
        return (Path(sys.prefix), Path(sys.base_prefix), real, Path(__file__).parents[1])
