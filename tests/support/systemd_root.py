"""A real systemd as the first process of namespaces, over this host's programs; leaves nothing.

Its root is an overlay over this host's or over another one, so that units, users and folders are
its own.  It has a network of its own, and none of the services that change settings of the kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import shlex
import socket
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.support.fresh_root import CERTIFICATES, SH_PATH, UNSHARE, indexes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SYSTEMD = "/usr/lib/systemd/systemd"

BOOT_TIMEOUT_S = 180.0
COMMAND_TIMEOUT_S = 900.0
"""Both are long enough for an emulated processor."""

CHUNK = 65536
"""What is read at once, in bytes."""

MOUNTS = """\
set -eu
mount --make-rprivate /
mount -t tmpfs -o size=1g none {top}
cd {top}
mkdir u w root
mount -t overlay -o lowerdir={lower},upperdir={top}/u,workdir={top}/w none root
cd root
{fresh}
mount -t proc none proc
for unit in systemd-sysctl systemd-binfmt systemd-modules-load systemd-udevd; do
    ln -s /dev/null etc/systemd/system/$unit.service
done
mount -t sysfs -o ro none sys
mount -t cgroup2 none sys/fs/cgroup
mount -t tmpfs -o mode=755 none run
mount -t tmpfs none tmp
mount -t tmpfs -o mode=755,size=64k none dev
mkdir dev/net dev/pts dev/shm
for device in {devices}; do
    if [ -e /dev/$device ]; then touch dev/$device; mount --bind /dev/$device dev/$device; fi
done
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 none dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 none dev/shm
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
    ln -s /proc/self/${{link#*:}} dev/${{link%%:*}}
done
for path in {shared}; do mkdir -p .$path; mount --bind $path .$path; done
{placed}
mkdir -p .forkd-old
pivot_root . .forkd-old
umount -l /.forkd-old
exec env -i container=other PATH={path} NOTIFY_SOCKET={notify} \\
    {systemd} --log-target=null systemd.unit=basic.target
"""
"""What is run for it, in new namespaces."""

DEVICES = "null zero full random urandom tty kvm net/tun"
"""What of this host's /dev is there; all else that systemd makes in it goes with the root."""

FRESH = f"""\
tr -d - </proc/sys/kernel/random/uuid >etc/machine-id
for file in /etc/resolv.conf {CERTIFICATES}; do
    [ ! -e .$file ] || [ ! -e $file ] || mount --bind $file .$file
done
"""
"""What is run for a root that is not this host's: its first start was before, and it has names."""

SPACES = ("--mount", "--pid", "--cgroup", "--uts", "--ipc", "--net")


class SystemdRoot:
    """Where it runs.

    Args:
        pid: Its process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def run(self, line: str, *, check: bool = True, network: bool = False) -> str:
        """Have a shell run a line there; return what it says on both outputs.

        Args:
            line: What it runs.
            check: Whether it must not fail.
            network: Whether it has this host's network, as to install packages.

        Raises:
            AssertionError: It failed; has what it says.
        """
        done = subprocess.run(  # noqa: S603 - a test's own
            self._words(line, network=network),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )
        assert done.returncode == 0 or not check, f"{line}: {done.stdout}"
        return done.stdout

    def typed(self, line: str, answers: str, *, check: bool = True, network: bool = False) -> str:
        """Run a line as from a terminal, on which somebody types answers; else as `run`.

        A program may discard what was typed before it asks, as apt does since Debian 13; then the
        answers are typed again.
        """
        ours, theirs = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCPKT, struct.pack("i", 1))
        with (
            open(ours, "r+b", buffering=0) as terminal,  # noqa: PTH123 - a descriptor
            open(theirs, "rb"),  # noqa: PTH123 - as above
            subprocess.Popen(  # noqa: S603 - a test's own
                self._words(line, network=network),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            ) as asked,
        ):
            assert asked.stdout is not None
            output, ended = _converse(terminal, asked.stdout, answers.encode())
            said = output.decode()
            if not ended:
                asked.kill()
            assert ended, f"{line}: did not end in {COMMAND_TIMEOUT_S:.0f} s: {said}"
        assert asked.returncode == 0 or not check, f"{line}: {said}"
        return said

    def _words(self, line: str, *, network: bool) -> list[str]:
        spaces = ("mount", "pid", "cgroup", "uts", "ipc", *(() if network else ("net",)))
        variables = {"PATH": SH_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
        variables |= indexes() if network else {}
        return [
            *("nsenter", f"--target={self._pid}", *(f"--{each}" for each in spaces)),
            *("env", "-i", *(f"{name}={value}" for name, value in variables.items())),
            *("sh", "-c", line),
        ]

    def shown(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run(f"systemctl show --property={name} --value {unit}").strip()


def _converse(terminal: IO[bytes], output: IO[bytes], answers: bytes) -> tuple[bytes, bool]:
    """Type answers until a program ends; return what it said, and whether it ended in time.

    Args:
        terminal: In packet mode, in which it tells that a program discards input (ioctl_tty(2)).
        output: What the program says.
        answers: What is typed at first, and after each time that input is discarded.
    """
    deadline = time.monotonic() + COMMAND_TIMEOUT_S
    said = bytearray()
    events = select.poll()
    events.register(terminal, select.POLLIN)
    events.register(output, select.POLLIN)
    terminal.write(answers)
    while (left := deadline - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in events.poll(left * 1000)}
        if (
            terminal.fileno() in ready
            and os.read(terminal.fileno(), CHUNK)[0] & termios.TIOCPKT_FLUSHREAD
        ):
            terminal.write(answers)
        if output.fileno() in ready:
            data = os.read(output.fileno(), CHUNK)
            if not data:
                return bytes(said), True
            said += data
    return bytes(said), False


@contextlib.contextmanager
def systemd_root(
    folder: Path,
    shared: list[Path],
    placed: dict[Path, str] | None = None,
    *,
    lower: Path = Path("/"),
) -> Iterator[SystemdRoot]:
    """Start one, and wait until it says that it is up.

    Args:
        folder: A folder with a short path, for what it needs.
        shared: Folders of this host that are the same there.
        placed: Folders of this host that are elsewhere there.
        lower: The files that its root begins with; it may write others.
    """
    notify, top = folder / "notify", folder / "top"
    top.mkdir()
    script = MOUNTS.format(
        top=top,
        lower=lower,
        fresh="" if lower == Path("/") else FRESH,
        shared=shlex.join(str(path) for path in [folder, *shared]),
        placed="\n".join(
            f"mkdir -p .{inside}; mount --bind {path} .{inside}"
            for path, inside in (placed or {}).items()
        ),
        path=SH_PATH,
        notify=notify,
        systemd=SYSTEMD,
        devices=DEVICES,
    )
    with _group() as leave, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.settimeout(BOOT_TIMEOUT_S)
        unshared = subprocess.Popen([*UNSHARE, *SPACES, "sh", "-c", script])  # noqa: S603 - a test's own
        try:
            while b"READY=1" not in manager.recv(4096):
                pass
            # A group whose processes are its own has none below it with controllers.
            leave(os.getpid(), unshared.pid)
            manager.close()  # it says more; unread, that would make it wait (unix(7))
            children = Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children")
            yield SystemdRoot(int(children.read_text()))
        finally:
            unshared.kill()
            unshared.wait()


@contextlib.contextmanager
def _group() -> Iterator[Callable[..., None]]:
    """Have processes started within the block be in a cgroup of their own, removed at its end.

    Gives what moves processes out of it again.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    root = Path(next(where for _, where, kind, *_ in mounts if kind == "cgroup2"))
    own = next(
        line.partition("::")[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    )
    before = root / own.lstrip("/")
    group = root / f"forkd-test-{os.getpid()}"
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))

    def leave(*pids: int) -> None:
        for pid in pids:
            (before / "cgroup.procs").write_text(str(pid))

    try:
        yield leave
    finally:
        leave(os.getpid())
        (group / "cgroup.kill").write_text("1")
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup and those below it, once their processes are gone."""
    with (group / "cgroup.events").open() as events:
        changes = select.poll()
        changes.register(events, select.POLLPRI)
        while "populated 1" in events.read():
            changes.poll(1000)
            events.seek(0)
    for folder, _, _ in os.walk(group, topdown=False):
        Path(folder).rmdir()
