"""A fresh root of a Debian release, in namespaces of its own, over files that are made once.

What is run there sees nothing of this host but its kernel, its network, and what a test shares.
All that it writes is in a layer that goes with it, so a test can tell exactly what stays behind.
"""

from __future__ import annotations

import contextlib
import filecmp
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CACHE = Path.home() / ".cache" / "forkd-test"
"""Where roots are kept: a checkout's own folder would be made anew by each run of CI."""

PYTHON_ONLY = ("ca-certificates", "python3", "python3-venv")

BEHIND = 'Acquire::Check-Valid-Until "false"'
"""Takes a mirror that is weeks behind, as far as a release that still changes is concerned."""

MAKE_TIMEOUT_S = 900
COMMAND_TIMEOUT_S = 900

SH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")

REAPER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGCHLD])
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""
"""The first process: daemons become its children, and it waits for those that end."""

UNSHARE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child")
"""What starts a command in new namespaces, to end with whoever started it, even by SIGKILL."""

LAYERED = """\
set -eu
mount --make-rprivate /
cd {top}
mount -t overlay -o lowerdir={lower},upperdir={top}/upper,workdir={top}/work none root
cd root
"""

PLAIN = """\
set -eu
mount --make-rprivate /
mount --bind {top} {top}
cd {top}
"""

COMMON = """\
mount -t proc none proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro none sys
mount --rbind /dev dev
mount -t tmpfs -o mode=1777 none tmp
mount -t tmpfs -o mode=755 none run
mount -t tmpfs none mnt
mkdir mnt/old
for path in {shared}; do mkdir -p .$path; mount --bind $path .$path; done
for file in /etc/resolv.conf {certs}; do
    [ ! -e .$file ] || [ ! -e $file ] || mount --bind $file .$file
done
pivot_root . mnt/old
umount -l /mnt/old
umount /mnt
exec env -i PATH={path} python3 -c "$REAPER"
"""
"""What is run for it, in new namespaces.  Settings of the kernel are this host's, so read-only."""


def made(name: str, packages: tuple[str, ...], release: str, over: Path | None = None) -> Path:
    """Return a folder with a root file system, made if need be.

    Args:
        name: What it is called.
        packages: What is installed in it.
        release: Of Debian.
        over: A root to which the packages are added; None for a new one.
    """
    digest = sha256("\n".join((release, *sorted(packages), str(over))).encode()).hexdigest()[:16]
    folder = CACHE / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob(f"{name}-{'[0-9a-f]' * len(digest)}"):  # not one of a longer name
        shutil.rmtree(old)
    partial = CACHE / f"{name}-{digest}.{os.getpid()}.partial"
    try:
        if over is None:
            _debootstrap(release, packages, partial)
        else:
            _run("cp", "-a", "--reflink=auto", over, partial)
            _install(packages, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _debootstrap(release: str, packages: tuple[str, ...], folder: Path) -> None:
    include = [f"--include={','.join(packages)}"] if packages else []
    # Mounts of its own: whoever ends it half way must not find this host's /sys below the folder.
    _run(*UNSHARE, "--mount", "mmdebstrap", "--variant=minbase",
         *include, "--format=directory", f"--aptopt={BEHIND}", release, folder)  # fmt: skip


def _install(packages: tuple[str, ...], folder: Path) -> None:
    """Add packages as a user does, with what apt fetched for it removed again."""
    with fresh_root(folder, layer=None) as root:
        apt = "apt-get -q -y -o DPkg::Use-Pty=false"
        root.check(
            f"export DEBIAN_FRONTEND=noninteractive; {apt} update && "
            f"{apt} install --no-install-recommends {' '.join(packages)} && "
            "apt-get clean && rm -rf /var/lib/apt/lists/*"
        )


def _run(*command: str | Path) -> None:
    done = subprocess.run(  # noqa: S603 - a test's own
        command, capture_output=True, text=True, check=False, timeout=MAKE_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True, slots=True)
class FreshRoot:
    """A root in which commands can be run.

    Attributes:
        pid: Its first process.
        layer: What has been written in it; None if that is the root itself.
    """

    pid: int
    layer: Path | None
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, line: str, *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Have a shell run a line there."""
        variables = {"PATH": SH_PATH, "HOME": "/root", "LANG": "C.UTF-8", **self.environment}
        settings = [f"{name}={value}" for name, value in variables.items()]
        return subprocess.run(  # noqa: S603 - a test's own
            ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--root", "--wd",  # noqa: S607
             "env", "-i", *settings, "sh", "-c", line],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=timeout_s,
        )  # fmt: skip

    def check(self, line: str) -> str:
        """Run a line; return what it prints.

        Raises:
            AssertionError: It failed; has what it says.
        """
        done = self.run(line)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def written(self) -> set[str]:
        """Return the paths that are not as they were before; of folders, which there are."""
        assert self.layer is not None
        lower = (self.layer.parent / "lower").readlink()
        found = set()
        for folder, folders, names in os.walk(self.layer):
            for name in (*names, *folders):
                path = Path(folder, name)
                inner = path.relative_to(self.layer)
                if _is_same(path, lower / inner):
                    continue
                found.add(f"/{inner}")
        return found


def _is_same(path: Path, before: Path) -> bool:
    """Whether both are folders, or files of one content and mode."""
    if path.is_symlink() or before.is_symlink():
        return False
    if path.is_dir():
        return before.is_dir()
    if not (path.is_file() and before.is_file()):
        return False
    return path.stat().st_mode == before.stat().st_mode and filecmp.cmp(path, before, shallow=False)


@contextlib.contextmanager
def fresh_root(
    lower: Path,
    *,
    layer: Path | None,
    shared: tuple[Path, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[FreshRoot]:
    """Start a root, and end all that runs in it after the block.

    Args:
        lower: The files that it begins with.
        layer: A new folder for what is written; None to write into `lower` itself.
        shared: Folders of this host that are the same there.
        environment: Variables of each command.
    """
    top = lower if layer is None else layer
    if layer is not None:
        for name in ("upper", "work", "root"):
            (layer / name).mkdir(parents=True)
        (layer / "lower").symlink_to(lower)
    script = (PLAIN if layer is None else LAYERED) + COMMON
    script = script.format(
        top=top, lower=lower, shared=" ".join(map(str, shared)), path=SH_PATH, certs=CERTIFICATES
    )
    with subprocess.Popen(  # noqa: S603 - a test's own
        [*UNSHARE, "--mount", "--pid", "sh", "-c", script],
        env=os.environ | {"REAPER": REAPER},
        stdout=subprocess.PIPE,
    ) as unshared:
        try:
            assert unshared.stdout is not None
            assert unshared.stdout.readline() == b"ready\n", "the root did not start"
            children = Path(f"/proc/{unshared.pid}/task/{unshared.pid}/children")
            pid = int(children.read_text())
            upper = None if layer is None else layer / "upper"
            yield FreshRoot(pid, upper, {**indexes(), **(environment or {})})
        finally:
            unshared.kill()


def indexes() -> dict[str, str]:
    """Return how package indexes are reached from this host."""
    names = ("PIP_INDEX_URL", "PIP_CERT", "http_proxy", "https_proxy", "no_proxy")
    return {name: os.environ[name] for name in names if name in os.environ}
