"""Unpack packages of Debian 13 beside this host's own programs, and run them from there.

Tests use emulators that are newer than those of the host's release.  apt fetches and verifies
their packages, with folders of its own, from the archive that this host's apt uses.  They are
unpacked with the libraries they need and run through their own loader: nothing is installed, and
this host's C library may be older.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SUITE = "trixie"
"""The Debian release that packages are taken from."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys that sign Debian's archive; the package is `debian-archive-keyring`."""

FETCH_DEADLINE_S = 900.0
UNPACK_DEADLINE_S = 60.0

LIBRARIES = "usr/lib/x86_64-linux-gnu"


@dataclass(frozen=True, slots=True)
class Program:
    """What is fetched.

    Attributes:
        name: For people.
        packages: The packages asked for.
        unpacked: Names of those packages, of these and what they depend on, that have a program or
            library to run.
    """

    name: str
    packages: tuple[str, ...]
    unpacked: re.Pattern[str]


def fetch(folder: Path, wanted: Program, say: Callable[[str], object]) -> Path:
    """Have a program in `folder` and return that; what is there already is used.

    Raises:
        HostError: This host's apt does not use Debian's archive, or a package could not be had.
    """
    if folder.is_dir():
        return folder
    say(f"fetching {wanted.name} from Debian's {SUITE}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        partial = Path(name)
        archives = _download(partial / "apt", wanted)
        root = partial / "root"
        root.mkdir()
        for archive in archives:
            run(["dpkg-deb", "-x", str(archive), str(root)], UNPACK_DEADLINE_S)
        root.rename(folder)
    return folder


def command(folder: Path, name: str) -> list[str]:
    """Return how the program `name` in `folder` is started: through the loader beside it."""
    loader = folder / "usr/lib64/ld-linux-x86-64.so.2"
    libraries = str(folder / LIBRARIES)
    return [str(loader), "--library-path", libraries, str(folder / "usr/bin" / name)]


def debian_archive(targets: str) -> str:
    """Return where this host's apt has Debian from.

    Args:
        targets: Lines of `apt-get indextargets`: address, label and component, with `|` between.

    Raises:
        HostError: There is no such archive.
    """
    for line in targets.splitlines():
        address, label, component = line.split("|")
        if (label, component) == ("Debian", "main"):
            return address
    raise HostError(
        f"Debian's {SUITE} cannot be fetched: apt of this host has no archive of Debian's"
    )


def apt_settings(folder: Path) -> str:
    """Return a configuration of apt that keeps everything it has in `folder`."""
    return (
        f'Dir::State::Lists "{folder}/lists";\n'
        f'Dir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache";\n'
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        'Dir::Etc::sourceparts "-";\n'
        'Acquire::Languages "none";\n'
        'APT::Sandbox::User "root";\n'
    )


def to_install(simulated: str, unpacked: re.Pattern[str]) -> list[str]:
    """Return which packages to unpack, of those that `apt-get --simulate install` names."""
    names = re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)
    return [name for name in names if unpacked.fullmatch(name)]


def _download(folder: Path, wanted: Program) -> list[Path]:
    """Fetch the packages by an apt that knows nothing but the release, and trusts Debian's keys."""
    form = "$(REPO_URI)|$(LABEL)|$(COMPONENT)"
    targets = run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"], 60.0)
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    source = f"deb [signed-by={KEYRING}] {debian_archive(targets)} {SUITE} main\n"
    (folder / "sources.list").write_text(source, encoding="utf-8")
    (folder / "apt.conf").write_text(apt_settings(folder), encoding="utf-8")
    ours = {"APT_CONFIG": str(folder / "apt.conf")}
    run(["apt-get", "-q", "update"], FETCH_DEADLINE_S, env=ours)
    asked = ["apt-get", "--simulate", "--no-install-recommends", "install", *wanted.packages]
    names = to_install(run(asked, 60.0, env=ours), wanted.unpacked)
    packages = folder / "packages"
    run(["apt-get", "-q", "download", *names], FETCH_DEADLINE_S, env=ours, cwd=packages)
    return sorted(packages.glob("*.deb"))


def run(
    command: Sequence[str],
    deadline_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command that must succeed; return what it printed."""
    try:
        done = subprocess.run(  # noqa: S603 - constants and paths of ours
            command, env=os.environ | (env or {}), cwd=cwd, timeout=deadline_s, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or "it printed no error"
        raise HostError(f"{command[0]} {command[1]} failed: {said}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{command[0]} could not be run: {error}") from error
    return done.stdout
