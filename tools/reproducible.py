"""Build the programs twice in different places, and compare their bytes.

    python -m tools.reproducible    what `make reproducible` runs; some minutes

The second build differs in all that must not matter: the folder, whose path is longer and has a
space in it, cargo's folder, the time zone, the language, the mask of new files, and the number of
compilers at once.  Both use the toolchain of `rust-toolchain.toml` and this host's C library.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "reproducible"

PROGRAMS = Path("build/bin")
"""Where `tools/build_binaries` puts what it builds, in a checkout."""

OTHERWISE = {
    "TZ": "Pacific/Chatham",
    "LC_ALL": "C.UTF-8",
    "LANGUAGE": "de",
    "CARGO_BUILD_JOBS": "1",
    "SOURCE_DATE_EPOCH": "1",
}
"""What the environment of the second build has, beside a folder of cargo's own."""

CRATES = ("cache", "index")
"""Parts of cargo's folder `registry` that spare the second build a download."""

FOUND = 1
"""The exit status if two programs differ."""


class CannotBuild(Exception):
    """A build failed; the message is what it printed."""


def main() -> int:
    """Build twice and compare; return the exit status."""
    shutil.rmtree(WORK, ignore_errors=True)
    first, second = WORK / "one", WORK / "a second place" / "further down"
    cargo_home = second.parent / "cargo"
    try:
        copy_crates(_cargo_home(), cargo_home)
        build(first, {}, umask=0o022)
        build(second, {**OTHERWISE, "CARGO_HOME": str(cargo_home)}, umask=0o077)
    except CannotBuild as error:
        sys.stderr.write(f"reproducible: a build failed:\n{error}\n")
        return FOUND
    findings = differences(first / PROGRAMS, second / PROGRAMS)
    if findings:
        sys.stderr.writelines(f"reproducible: {each}\n" for each in findings)
        sys.stderr.write(f"reproducible: both builds are kept in {WORK}\n")
        return FOUND
    for path in sorted((first / PROGRAMS).iterdir()):
        sys.stdout.write(f"{digest(path)}  {path.name}\n")
    sys.stdout.write("reproducible: both builds are the same, byte for byte\n")
    shutil.rmtree(WORK)
    return 0


def build(folder: Path, environment: dict[str, str], *, umask: int) -> None:
    """Copy the checkout's sources into a folder, which must not exist, and build the programs.

    Raises:
        CannotBuild: The build failed.
    """
    copy_sources(folder)
    inherited = {name: value for name, value in os.environ.items() if name != "CARGO_TARGET_DIR"}
    done = subprocess.run(  # noqa: S603 - ours
        [str(folder / "tools/build_binaries")],
        cwd=folder,
        env={**inherited, **environment},
        umask=umask,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CannotBuild(done.stdout)


def copy_sources(folder: Path) -> None:
    """Copy every file that is tracked, or not yet, but that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git is wherever it is
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def copy_crates(source: Path, target: Path) -> None:
    """Give another folder of cargo's the downloads of one, if there are any."""
    for name in CRATES:
        if (source / "registry" / name).is_dir():
            shutil.copytree(source / "registry" / name, target / "registry" / name)


def _cargo_home() -> Path:
    return Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo")


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each file of two folders that differs, or is in one of them only."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
    return [line for name in names if (line := _difference(first / name, second / name))]


def _difference(first: Path, second: Path) -> str | None:
    for path in (first, second):
        if not path.exists():
            return f"{path.name} is not in {path.parent}"
    one, other = first.read_bytes(), second.read_bytes()
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return f"{first.name} differs from byte {same} on ({len(one)} and {len(other)} bytes)"


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
