"""Fills the disk under programs that keep their data in order, and says whether they have.

Runs in the namespace of a sandbox's runtime: `one_round(number, seed)` has SQLite, git and dpkg
write until there is no space, forgets what the kernel has of it in memory, makes room, and examines
each.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

FOLDER = Path("/root/torture")
BALLAST = FOLDER / "ballast"
DATABASE = FOLDER / "database"
REPOSITORY = FOLDER / "repository"
PACKAGE = "forkd-torture"
DEB = FOLDER / "package.deb"
EMPTY = FOLDER / "empty"
"""A repository with the files that are committed, as each round begins with."""

DPKG = Path("/var/lib/dpkg")
WRITTEN = (
    (FOLDER, "**/*"),
    (Path("/opt/torture"), "*"),
    (DPKG, "*"),
    (DPKG, "updates/*"),
    (DPKG, f"info/{PACKAGE}.*"),
)
"""Where all of it writes, as patterns of files in folders."""

CACHES = Path("/proc/sys/vm/drop_caches")
LOG = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
PIECE = 1 << 16
BLOCK = os.urandom(1 << 18)
TRACKED = 4
COMMITTED_MAX = 1 << 18
ROOM_MAX = 1 << 20
"""Most that a program finds free; so each fails at another place of its work."""

NO_ROOM = ("SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_IOERR_SHMSIZE", "SQLITE_IOERR_SHMMAP")
"""What SQLite makes of ENOSPC: of the database and its log, and of the index of the log."""

IO_ERRORS = re.compile(
    r"i/o error|input/output error|ext4-fs error|lost async page write", re.IGNORECASE
)

QUIET = {"GIT_AUTHOR_NAME": "t", "GIT_AUTHOR_EMAIL": "t@t", "GIT_CONFIG_NOSYSTEM": "1"}
QUIET |= {
    "GIT_COMMITTER_NAME": "t",
    "GIT_COMMITTER_EMAIL": "t@t",
    "HOME": str(FOLDER),
    "LC_ALL": "C",
}


def run(*args: str | Path, check: bool = True) -> tuple[int, str]:
    """Run a program; return its status and what it said."""
    done = subprocess.run(  # noqa: S603 - ours
        args, check=False, capture_output=True, text=True, env={**os.environ, **QUIET}
    )
    said = done.stdout + done.stderr
    assert not IO_ERRORS.search(said), said
    assert not check or done.returncode == 0, said
    return done.returncode, said


def git(*args: str, check: bool = True) -> tuple[int, str]:
    """Run git in the repository."""
    return run("git", "-C", REPOSITORY, "-c", "maintenance.auto=false", *args, check=check)


def make_repository() -> None:
    """Put a new repository in place of the one before."""
    shutil.rmtree(REPOSITORY, ignore_errors=True)
    shutil.copytree(EMPTY, REPOSITORY)


def free_bytes() -> int:
    """Return what `df` calls available."""
    space = os.statvfs("/")
    return space.f_bavail * space.f_frsize


def prepare() -> None:
    """Make a database, a repository and a package."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with sqlite3.connect(DATABASE) as database:
        assert database.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
        database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, data BLOB, sum TEXT)")
    database.close()
    REPOSITORY.mkdir()
    git("init", "-q", "-b", "main", "--template=")
    for number in range(TRACKED):
        (REPOSITORY / str(number)).touch()
    git("add", "-A")
    git("commit", "-qm", "nothing yet")
    REPOSITORY.rename(EMPTY)
    make_repository()
    tree = FOLDER / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "opt/torture").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        f"Package: {PACKAGE}\nVersion: 1\nArchitecture: all\n"
        "Maintainer: nobody <nobody@localhost>\nDescription: data\n"
    )
    for number in range(2):  # dpkg flushes the disk for each
        (tree / f"opt/torture/{number}").write_bytes(os.urandom(4 * PIECE))
    run("dpkg-deb", "-Znone", "--root-owner-group", "--build", tree, DEB)
    shutil.rmtree(tree)


def piece_of_ballast(number: int) -> bytes:
    """Return a piece that is like no other."""
    return number.to_bytes(8, "little") + BLOCK[8:]


def fill(room: int) -> int:
    """Leave `room` bytes free; return how many were written.

    A write that does not fit says so at once, and breaks nothing.
    """
    written = 0
    with BALLAST.open("wb", buffering=0) as file:
        while (left := free_bytes() - room) > 0:
            number, begun = divmod(written, len(BLOCK))
            try:
                written += file.write(piece_of_ballast(number)[begun : begun + left])
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
        os.fsync(file.fileno())
    return written


def remove_ballast(written: int) -> None:
    """Check that all of it was kept, and make room."""
    with BALLAST.open("rb") as file:
        for start in range(0, written, len(BLOCK)):
            wanted = piece_of_ballast(start // len(BLOCK))[: written - start]
            assert file.read(len(BLOCK)) == wanted, start
        assert not file.read(1)
    BALLAST.unlink()


def insert(dice: random.Random, acknowledged: list[tuple[int, str]]) -> None:
    """Insert rows until there is no space; note each that was committed."""
    database = sqlite3.connect(DATABASE, isolation_level=None)
    try:
        for number in range(1000):
            data = dice.randbytes(dice.randrange(PIECE))
            total = hashlib.sha256(data).hexdigest()
            found = database.execute("INSERT INTO rows (data, sum) VALUES (?, ?)", (data, total))
            acknowledged.append((found.lastrowid or 0, total))
            assert number < 999, "the disk is never full"
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname not in NO_ROOM:
            raise
    finally:
        database.close()


def commit(dice: random.Random, acknowledged: list[str]) -> None:
    """Commit files until there is no space; note each commit."""
    for _ in range(100):
        try:
            data = dice.randbytes(dice.randrange(1, COMMITTED_MAX))
            (REPOSITORY / str(dice.randrange(TRACKED))).write_bytes(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return
        if git("commit", "-qam", "x", check=False)[0]:
            return
        acknowledged.append((REPOSITORY / ".git/refs/heads/main").read_text().strip())
    raise AssertionError("the disk is never full")


def forget(*patterns: tuple[Path, str]) -> None:
    """Have all data that is acknowledged on the disk, and none of some files in memory.

    Programs stay in memory: to read them from the disk again each time would take longest.
    """
    os.sync()
    for folder, pattern in patterns:
        for path in filter(Path.is_file, folder.glob(pattern)):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    CACHES.write_text("2")  # entries of folders and inodes


def examine(rows: list[tuple[int, str]], commits: list[str], ballast: int) -> None:
    """Check each program's data after the disk was full; then make room and use them again."""
    remove_ballast(ballast)
    database = sqlite3.connect(DATABASE)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    kept = dict(database.execute("SELECT number, sum FROM rows"))
    assert all(kept.get(number) == total for number, total in rows)
    for number, data, total in database.execute("SELECT number, data, sum FROM rows"):
        assert hashlib.sha256(data).hexdigest() == total, number
    database.execute("DELETE FROM rows")
    database.commit()
    database.execute("VACUUM")
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    for name in ("index.lock", "HEAD.lock"):  # as git itself advises after a crash
        (REPOSITORY / ".git" / name).unlink(missing_ok=True)
    git("fsck", "--full", "--strict", "--no-dangling")
    assert set(git("rev-list", "--all")[1].split()) >= set(commits)
    make_repository()
    run("dpkg", "-i", DEB)
    assert run("dpkg", "--audit")[1] == ""
    assert run("dpkg", "--verify", PACKAGE)[1] == ""


def check_kernel_log() -> None:
    """Raise if the kernel has noted an error of the disk since the last time."""
    lines = []
    with contextlib.suppress(BlockingIOError):
        while True:
            lines.append(os.read(LOG, 8192).decode(errors="replace"))
    said = "".join(lines)
    assert not IO_ERRORS.search(said), said[-4000:]


def one_round(number: int, seed: int) -> list[int]:
    """Fill the disk under all three, each first in turn; return how often each succeeded before."""
    dice = random.Random(seed)  # noqa: S311 - a test's
    rows: list[tuple[int, str]] = []
    commits: list[str] = []
    installed = 0
    ballast = fill(dice.randrange(ROOM_MAX))
    for turn in range(3):
        program = (number + turn) % 3
        if program == 0:
            insert(dice, rows)
        elif program == 1:
            commit(dice, commits)
        else:
            installed = int(run("dpkg", "-i", DEB, check=False)[0] == 0)
    forget(*WRITTEN)
    examine(rows, commits, ballast)
    check_kernel_log()
    return [len(rows), len(commits), installed]
