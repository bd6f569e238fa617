"""Make a release: packages, programs, lists of parts, notes, and sums over all of them.

    python -m tools.release            into build/release; what `make release` runs
    python -m tools.release FOLDER     into a folder that is empty, or not there
    python -m tools.release --dirty    although something is not committed, and whatever fixture of
                                       upgrades there is; for trying
    python -m tools.release --no-deb   without the Debian package, where dpkg-deb is missing
    python -m tools.release --version  print the version, if all manifests agree on it

The folder then has

    forkd_vm-<version>*.whl, .tar.gz   the Python package: for hosts, for clients, and as source
    forkd_<version>+deb*_amd64.deb     the wheel for hosts as a package of Debian 12 and 13
    forkd-<version>-x86_64-linux.tar.gz   the static programs
    requirements.txt                   the wheel for hosts and all that it needs, with digests
    python.cdx.json, programs.cdx.json what is in them, as CycloneDX
    RELEASE-NOTES.md                   of the fragments in changes/
    SHA256SUMS                         over all of these
    SHA256SUMS.minisig                 its signature, if FORKD_RELEASE_KEY names a secret key

Times in archives are that of the commit, or `SOURCE_DATE_EPOCH`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools import deb, release_lock, release_notes, sbom
from tools.outputs import Failed, output

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "build" / "release"
SUMS = "SHA256SUMS"

KEY = "FORKD_RELEASE_KEY"
"""Names the file of minisign's secret key."""

EXTRAS = ("daemon",)
"""What a host needs of the package, if it has extras of these names."""

PROGRAMS = {
    "forkd-vmm": "build/bin/forkd-vmm",
    "forkd-agent": "build/bin/forkd-agent",
    "LICENSE": "LICENSE",
}
"""What the archive of programs has, and where each file is in a checkout."""

PROGRAM_MODE = 0o755
FILE_MODE = 0o644


class CannotRelease(Exception):
    """There can be no release; the message says what to do."""


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="make release", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--dirty", action="store_true", help="although something is not committed")
    parser.add_argument("--no-deb", action="store_true", help="without the Debian package")
    parser.add_argument("--version", action="store_true", help="print the version")
    asked = parser.parse_args()
    try:
        if asked.version:
            sys.stdout.write(f"{version()}\n")
            return 0
        for path in release(asked.folder, dirty=asked.dirty, with_deb=not asked.no_deb):
            sys.stdout.write(f"{path}\n")
    except (
        CannotRelease,
        deb.CannotBuild,
        release_lock.NotLocked,
        release_notes.BadFragment,
        Failed,
    ) as error:
        sys.stderr.write(f"release: {error}\n")
        return 1
    return 0


def release(folder: Path | None, *, dirty: bool, with_deb: bool = True) -> list[Path]:
    """Make a release in a folder, `build/release` by default; return its files.

    Raises:
        CannotBuild: There can be no Debian package.
        CannotRelease: The folder is not empty, something is not committed, versions differ, a
            program is not built, or the key cannot sign.
        Failed: The fixture for tests of upgrades is missing or of other formats, or a program
            that is needed failed.
    """
    number = version()
    if not dirty and (changed := output("git", "status", "--porcelain")):
        raise CannotRelease(f"not committed (--dirty releases even so):\n{changed.rstrip()}")
    if not dirty:  # whoever tries a release need not have the fixture of one
        output(sys.executable, "-m", "tools.release_fixture", "--check")
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or output("git", "log", "-1", "--format=%ct"))
    target = _empty(folder)
    _build_packages(target, epoch)
    if with_deb:
        for python in deb.RELEASES:
            deb.build(sorted(target.glob("*x86_64.whl")), target, python=python)
    _write_programs(target / f"forkd-{number}-x86_64-linux.tar.gz", f"forkd-{number}", epoch)
    _write_lists(target, number, epoch)
    day = datetime.fromtimestamp(epoch, UTC).date()
    notes = release_notes.notes(ROOT / "changes", number, day)
    (target / "RELEASE-NOTES.md").write_text(notes, encoding="utf-8")
    write_sums(target)
    if key := os.environ.get(KEY):
        sign(target / SUMS, Path(key), f"forkd {number}")
    return sorted(target.iterdir())


def version() -> str:
    """Return the version on which the manifests of Python, Rust and TypeScript agree.

    Raises:
        CannotRelease: They do not; names each with its version.
    """
    code = (ROOT / "src/forkd/installed.py").read_text(encoding="utf-8")
    npm = json.loads((ROOT / "sdk/typescript/package.json").read_text(encoding="utf-8"))
    return agreed(
        {
            "pyproject.toml": _project()["version"],
            "src/forkd/installed.py": code.partition('VERSION = "')[2].partition('"')[0],
            "Cargo.toml": _toml("Cargo.toml")["workspace"]["package"]["version"],
            "sdk/typescript/package.json": npm["version"],
        }
    )


def agreed(versions: dict[str, str]) -> str:
    """Return the one version that all files have.

    Raises:
        CannotRelease: There are several; names each file with its version.
    """
    if len(set(versions.values())) > 1:
        said = ", ".join(f"{name} has {each}" for name, each in versions.items())
        raise CannotRelease(f"versions differ: {said}")
    return next(iter(versions.values()))


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` over all files of a folder, as `sha256sum --check` reads it."""
    lines = []
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def sign(sums: Path, key: Path, comment: str) -> None:
    """Sign the sums with minisign, which asks for the key's password if it has one.

    Raises:
        CannotRelease: There is no such key or no minisign, or it refused.
    """
    if not key.is_file():
        raise CannotRelease(f"{KEY} names {key}, which is no file")
    if shutil.which("minisign") is None:
        raise CannotRelease(f"{KEY} is set, but minisign is not installed")
    words = ["minisign", "-S", "-s", str(key), "-m", str(sums), "-t", comment]
    done = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - minisign
    if done.returncode != 0:
        raise CannotRelease(
            f"minisign cannot sign with {key}: {(done.stderr or done.stdout).strip()}"
        )


def _empty(folder: Path | None) -> Path:
    if folder is None:
        shutil.rmtree(RELEASE, ignore_errors=True)
    target = folder or RELEASE
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise CannotRelease(f"{target} is not empty")
    return target.resolve()


def _build_packages(target: Path, epoch: int) -> None:
    """Build the source, the wheel of hosts and that of clients, as `make wheel` does."""
    for kind, which in (("platform", ("-t", "sdist", "-t", "wheel")), ("pure", ("-t", "wheel"))):
        words = (sys.executable, "-m", "hatchling", "build", *which, "-d", str(target))
        output(*words, environment={"SOURCE_DATE_EPOCH": str(epoch), "FORKD_WHEEL": kind})


def _write_programs(target: Path, top: str, epoch: int) -> None:
    """Write the archive of programs: the same files make the same bytes."""
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, place in PROGRAMS.items():
            if not (ROOT / place).is_file():
                raise CannotRelease(f"{place} is not built: run `make build`")
            data = (ROOT / place).read_bytes()
            entry = tarfile.TarInfo(f"{top}/{name}")
            entry.size, entry.mtime = len(data), epoch
            entry.mode = PROGRAM_MODE if place.startswith("build/") else FILE_MODE
            archive.addfile(entry, io.BytesIO(data))


def _write_lists(target: Path, number: str, epoch: int) -> None:
    """Write the requirements, and what is in packages and programs."""
    project = _project()
    extras = [each for each in EXTRAS if each in project.get("optional-dependencies", {})]
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    needed = release_lock.requirements(lock, project["name"], extras)
    requirements = target / "requirements.txt"
    requirements.write_text(needed, encoding="utf-8")
    sbom.write_python(requirements, target / "python.cdx.json", epoch)
    sbom.write_rust(target / "programs.cdx.json", number, epoch)
    (wheel,) = target.glob("*x86_64.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    asked = f"./{wheel.name}" + (f"[{','.join(extras)}]" if extras else "")
    requirements.write_text(f"{asked} --hash=sha256:{digest}\n{needed}", encoding="utf-8")


def _project() -> dict[str, Any]:
    project: dict[str, Any] = _toml("pyproject.toml")["project"]
    return project


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
