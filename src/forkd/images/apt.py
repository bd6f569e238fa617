"""Ask apt for packages: this host's apt, or one apart that also knows other releases of Debian.

The one apart has its own lists of packages, in a folder that the caller removes, and leaves the
host's alone.  It takes the servers from the host's own sources of Debian, and its signatures are
verified with the keys in Debian's own package `debian-archive-keyring`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, folders, process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.images.steps import Build

TIMEOUT_S = 900.0

RELEASES = ("bookworm", "trixie", "trixie-backports")
"""Releases of Debian of which there are kernels: 6.1, 6.12, and what is newest."""

KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
"""Where the package debian-archive-keyring has Debian's keys."""

_TARGETS = "$(REPO_URI) $(CODENAME) $(ORIGIN) $(LABEL) $(COMPONENT)"

_SECURITY = "Debian-Security"

_REACHING = re.compile(
    r"^Acquire::(?:https?|Retries|ForceIPv[46])(?:::\S+)? \".+\";$", re.MULTILINE
)
"""Of apt's configuration, what says how to reach servers: proxies, certificates, retries."""


@dataclass(frozen=True, slots=True)
class Apt:
    """An apt that can be asked.

    Attributes:
        config: Its configuration in place of the host's; None for the host's own.
    """

    config: Path | None = None

    def records(self, package: str, build: Build) -> list[str]:
        """Return what is known of each version of a package; nothing if there is none.

        Args:
            package: Its name, perhaps with `=version`.
            build: What it is asked for.
        """
        try:
            shown = self.run(["apt-cache", "show", package], build)
        except BuildError:
            build.tell("kernel", f"apt knows no {package}")
            return []
        return [record for record in shown.split("\n\n") if record.strip()]

    def download(self, packages: Iterable[str], folder: Path, build: Build) -> None:
        """Put the archives of packages into `folder`, verified.

        Raises:
            BuildError: They could not be fetched, or are not what was signed.
        """
        fetch = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *packages]
        self.run(fetch, build, cwd=folder)

    def run(self, args: list[str], build: Build, cwd: Path | None = None) -> str:
        """Run one of apt's programs; return what it wrote.

        Raises:
            BuildError: It failed.
        """
        environment = process.plain_environment()
        if self.config is not None:
            environment["APT_CONFIG"] = str(self.config)
        done = build.run(args, timeout_s=TIMEOUT_S, cwd=cwd, env=environment)
        return done.stdout.decode(errors="replace")


def apart(folder: Path, build: Build) -> Apt:
    """Return an apt that knows `RELEASES`, with all that it keeps in `folder`.

    Raises:
        BuildError: This host's apt has no source of Debian, or the servers cannot be reached, or
            their signatures are not Debian's.
    """
    listed = build.run(
        ["apt-get", "indextargets", "--format", _TARGETS, "Created-By: Packages"],
        timeout_s=TIMEOUT_S,
    )
    sources = parse_sources(listed.stdout.decode(errors="replace"))
    keyring = next(filter(files.is_there, KEYRINGS), None)
    if not sources or keyring is None:
        lacks = "no source of Debian: run `apt-get update`" if keyring else "no keys of Debian's"
        raise BuildError(
            f"this host's apt has {lacks}; if this is not Debian, name a kernel by its path with "
            "machine.kernel = './vmlinuz'"
        )
    dumped = build.run(["apt-config", "dump", "Acquire"], timeout_s=TIMEOUT_S)
    reached = _REACHING.findall(dumped.stdout.decode(errors="replace"))
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        folders.make(folder / name)
    folders.write(folder / "status", b"")
    lines = [f"deb [arch=amd64 signed-by={keyring}] {uri} {suite} main\n" for uri, suite in sources]
    folders.write(folder / "sources.list", "".join(lines).encode())
    folders.write(folder / "apt.conf", "".join(_configuration(folder, reached)).encode())
    build.tell("kernel", "fetching the lists of Debian's packages", 0.02)
    found = Apt(folder / "apt.conf")
    found.run(["apt-get", "-q", "-o", "APT::Update::Error-Mode=any", "update"], build)
    return found


def parse_sources(listed: str) -> list[tuple[str, str]]:
    """Return servers and suites of `RELEASES`, from the lines about a host's sources.

    Each line has the server, the codename, who publishes it, as what, and which component.
    """
    lines = [line.split() for line in listed.splitlines()]
    debian = [
        (words[0], words[-2] == _SECURITY)
        for words in lines
        if len(words) == _WORDS and words[2] == "Debian" and words[-1] == "main"
    ]
    return list(dict.fromkeys(_suites(debian)))


_WORDS = 5


def _suites(debian: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, str]]:
    for uri, security in debian:
        for release in RELEASES:
            if not security:
                yield uri, release
            elif "-" not in release:
                yield uri, f"{release}-security"


def _configuration(folder: Path, reached: Iterable[str]) -> Iterator[str]:
    yield f'Dir::State "{folder}";\nDir::State::Lists "{folder}/lists";\n'
    yield f'Dir::State::status "{folder}/status";\nDir::Cache "{folder}/cache";\n'
    yield f'Dir::Etc::SourceList "{folder}/sources.list";\n'
    yield f'Dir::Etc::SourceParts "{folder}/parts";\nDir::Etc::Parts "{folder}/parts";\n'
    yield f'Dir::Etc::Preferences "{folder}/none";\nDir::Etc::PreferencesParts "{folder}/parts";\n'
    yield 'Dir::Etc::Main "/dev/null";\nAPT::Sandbox::User "root";\nAcquire::Languages "none";\n'
    yield from (f"{line}\n" for line in reached)
