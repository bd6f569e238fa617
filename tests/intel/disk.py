"""Make the disk of the Intel machine: the programs of this host, the checkout, and what it boots.

Bochs has no shared folders, so a run begins with a disk image of what it needs.  The files are
gathered in a folder, as hard links where that is possible, and `mke2fs -d` copies them.  The image
is sparse, and the machine never writes to it: what it changes is in a file of Bochs' own.

    sector 0        the boot loader, and a table with one partition
    1 MiB …         the partition: an ext4 file system, whose root is the machine's
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.machine import system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PARTITION_BYTES_BEFORE = 1 << 20
"""Where the partition begins: behind the boot loader, which has less than that."""

SECTOR_BYTES = 512

SYSTEM_GIB = 16
"""Size of the file system; what is not used of it takes no room on this host."""

PROGRAMS = (
    "bin", "sbin", "lib64", "libexec", "lib/locale", "lib/os-release", "lib/python3",
    "lib/ssl", "lib/x86_64-linux-gnu", "share/ca-certificates", "share/terminfo", "share/zoneinfo",
)  # fmt: skip
"""What tests use of `/usr`; the rest of it is documentation, compilers and desktops."""

LEFT_OUT = (".git", "target", "build", "node_modules", ".hypothesis")
"""Folders of the checkout that no test in the machine reads."""

BUILT = ("bin",)
"""What is taken of `build/` nevertheless."""

MAKE_DEADLINE_S = 600.0


def gather(root: Path, checkout: Path, more: Iterable[Path]) -> None:
    """Make `root` what the machine's root is: system, Python, checkout, and the folders in `more`.

    Raises:
        OSError: A file could not be read, or there is no room.
    """
    system.stage(root)
    (root / "usr").mkdir(exist_ok=True)
    for name in PROGRAMS:
        place(root, Path("/usr") / name)
    for folder in sorted(Path("/usr/lib").glob("python3.*")):
        place(root, folder)
    folders = {folder for folder in system.python_folders() if not folder.is_relative_to(checkout)}
    for folder in (*folders, *more):
        place(root, folder)
    place(root, checkout, leave=LEFT_OUT)
    for name in BUILT:
        place(root, checkout / "build" / name)


def place(root: Path, source: Path, *, leave: tuple[str, ...] = ()) -> None:
    """Have `source` in `root` under its own path, without the folders that are called `leave`."""
    target = root / source.relative_to("/")
    if source.is_symlink() or source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)
    elif source.is_dir():
        shutil.copytree(
            source, target, symlinks=True, dirs_exist_ok=True, copy_function=_copy,
            ignore=shutil.ignore_patterns(*leave), ignore_dangling_symlinks=True,
        )  # fmt: skip


def _copy(source: str | Path, target: str | Path) -> str | Path:
    """Link a file if we may, which keeps its owner; else copy it.  A link is copied."""
    if os.geteuid() == 0 and not Path(source).is_symlink():
        try:
            os.link(source, target)
        except OSError:  # another file system
            pass
        else:
            return target
    return shutil.copy2(source, target, follow_symlinks=False)


def make_image(path: Path, root: Path, boot: bytes, *, run: Callable[[list[str]], object]) -> None:
    """Make the disk `path` with the files of `root` and the boot loader `boot`.

    Args:
        path: The file.
        root: Its files; root owns them in the image if we do here.
        boot: The first sectors.
        run: Runs a command that must succeed.

    Raises:
        HostError: The boot loader is too large.
    """
    if len(boot) > PARTITION_BYTES_BEFORE:
        raise HostError(f"the boot loader has {len(boot)} bytes; there is room for 1 MiB")
    path.unlink(missing_ok=True)
    options = f"offset={PARTITION_BYTES_BEFORE},lazy_itable_init=1,nodiscard"
    run([
        "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-i", "32768", "-O", "^has_journal",
        "-E", options, "-d", str(root), str(path), f"{SYSTEM_GIB << 20}k",
    ])  # fmt: skip
    with path.open("r+b") as file:
        file.truncate(PARTITION_BYTES_BEFORE + (SYSTEM_GIB << 30))
        file.write(with_partition(boot, SYSTEM_GIB << 30))


def with_partition(boot: bytes, size_bytes: int) -> bytes:
    """Return boot sectors whose table has one Linux partition of that size, behind them."""
    start, sectors = PARTITION_BYTES_BEFORE // SECTOR_BYTES, size_bytes // SECTOR_BYTES
    farthest = b"\xfe\xff\xff"  # "see the numbers of the sectors"
    entry = struct.pack("<B3sB3sII", 0x80, farthest, 0x83, farthest, start, sectors)
    table = entry.ljust(64, b"\0") + b"\x55\xaa"
    return boot[: SECTOR_BYTES - len(table)] + table + boot[SECTOR_BYTES:]


def run(command: list[str]) -> None:
    """Run a command that must succeed.

    Raises:
        HostError: It did not.
    """
    try:
        subprocess.run(  # noqa: S603 - constants and paths of ours
            command, check=True, capture_output=True, timeout=MAKE_DEADLINE_S
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise HostError(f"{command[0]} failed: {said}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{command[0]} could not be run: {error}") from error
