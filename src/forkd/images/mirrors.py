"""Choose the mirrors of Debian's archive: those of a setting, of this host's apt, or Debian's own.

Debian's archive is in two parts: releases, and their security updates, each with mirrors of its
own.  apt itself is not asked: its files are read, if there are any.  What a mirror serves is
verified with keys of ours (`forkd.images.debian_archive`), so a wrong choice here can only fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest
from forkd.host import files, folders, proc

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MIRROR_VARIABLE = "FORKD_DEBIAN_MIRROR"
"""The environment variable that names the mirror of releases."""

SECURITY_VARIABLE = "FORKD_DEBIAN_SECURITY_MIRROR"
"""The same of security updates; without it, they are beside the releases."""

VARIABLES = (MIRROR_VARIABLE, SECURITY_VARIABLE)

KEYRING = Path(__file__).with_name("debian-archive-keyring.gpg")
"""Debian's keys, as in its package debian-archive-keyring."""

APT_FOLDER = Path("/etc/apt")

RELEASES = ("bookworm", "trixie", "trixie-backports")
"""Releases of Debian of which there are kernels: 6.1, 6.12, and what is newest."""

DEFAULT_RELEASE = RELEASES[0]
"""Whose kernel guests boot on hosts that are not Debian."""

SECURITY_SUFFIX = "-security"

_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")
_FILE_BYTES_MAX = 1 << 20
_NAMES = ("stable", "oldstable", "testing", "bullseye", "bookworm", "trixie", "forky", "sid")
_SUITE = re.compile(rf"({'|'.join(_NAMES)})(-updates|-backports|{SECURITY_SUFFIX}|/updates)?")
_ARCHIVES = ("debian", "debian-security")
"""How the paths of Debian's mirrors end; other publishers have suites of the same names."""

_TOKEN = re.compile(r'//[^\n]*|#[^\n]*|/\*.*?\*/|"([^"\n]*)"|([{};])|([^\s{};"]+)', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Mirrors:
    """Where Debian's archive is fetched from.

    Attributes:
        releases: URL of the folder that has `dists/bookworm`, without a slash at its end.
        security: URL of that which has `dists/bookworm-security`.
        proxies: The proxy for each scheme, `http` or `https`, as this host's apt has it.
    """

    releases: str = "http://deb.debian.org/debian"
    security: str = "http://deb.debian.org/debian-security"
    proxies: Mapping[str, str] = field(default_factory=dict)

    def of(self, suite: str) -> str:
        """Return the mirror that has a suite."""
        return self.security if suite.endswith(SECURITY_SUFFIX) else self.releases


@dataclass(frozen=True, slots=True)
class _Source:
    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str

    @property
    def is_debian(self) -> bool:
        ours = self.url.rpartition("/")[2] in _ARCHIVES or "debian-archive" in self.signed_by
        return ours and "main" in self.components and _URL.fullmatch(self.url) is not None


def find_mirrors(apt: Path = APT_FOLDER) -> Mirrors:
    """Return the mirrors to use: those of the variables, else of this host's apt, else Debian's.

    Raises:
        InvalidRequest: A variable has no URL.
    """
    set_releases, set_security = (_said(name) for name in VARIABLES)
    proxies = apt_proxies(_texts(apt, "apt.conf", "apt.conf.d/*"))
    found = parse_sources(
        _texts(apt, "sources.list", "sources.list.d/*.list"),
        _texts(apt, "sources.list.d/*.sources"),
    )
    beside = f"{set_releases}{SECURITY_SUFFIX}" if set_releases else found.security
    return Mirrors(set_releases or found.releases, set_security or beside, proxies)


def _said(variable: str) -> str | None:
    said = (proc.environment().get(variable) or "").rstrip("/")
    if said and _URL.fullmatch(said) is None:
        raise InvalidRequest(
            f"{variable} is {said[:200]!r}: must be the URL of a mirror of Debian, such as "
            f"{Mirrors().releases}",
            field=variable,
        )
    return said or None


def _texts(folder: Path, *patterns: str) -> Iterator[str]:
    for pattern in patterns:
        for path in folders.matching(folder, pattern):
            if files.is_file(path):
                yield (files.read(path, _FILE_BYTES_MAX) or b"").decode(errors="replace")


def parse_sources(lists: Iterable[str], paragraphs: Iterable[str]) -> Mirrors:
    """Return the first mirrors of Debian in apt's sources; Debian's own where they have none.

    Args:
        lists: Texts in the format of `sources.list`.
        paragraphs: Texts in the format of `debian.sources`.
    """
    releases = security = None
    for source in (*_in_lists(lists), *_in_paragraphs(paragraphs)):
        for suite in source.suites if source.is_debian else ():
            match = _SUITE.fullmatch(suite)
            if match is None:
                continue
            if match[2] in {SECURITY_SUFFIX, "/updates"}:
                security = security or source.url
            else:
                releases = releases or source.url
    default = Mirrors()
    return Mirrors(releases or default.releases, security or default.security)


def _in_lists(texts: Iterable[str]) -> Iterator[_Source]:
    line_form = re.compile(r"^deb\s+(?:\[([^\]\n]*)\]\s+)?(\S+)\s+(\S+)\s+(\S.*)$", re.MULTILINE)
    for text in texts:
        for options, url, suite, components in line_form.findall(text):
            words = components.partition("#")[0].split()
            yield _Source(url.rstrip("/"), (suite,), tuple(words), options)


def _in_paragraphs(texts: Iterable[str]) -> Iterator[_Source]:
    for text in texts:
        plain = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
        for paragraph in re.split(r"\n\s*\n", plain):
            pairs = re.findall(r"^([\w-]+):((?:.*)(?:\n[ \t].*)*)", paragraph, re.MULTILINE)
            fields = {name.lower(): value.split() for name, value in pairs}
            off = [word.lower() for word in fields.get("enabled", [])] in (["no"], ["false"])
            if off or "deb" not in fields.get("types", []):
                continue
            for url in fields.get("uris", []):
                yield _Source(
                    url.rstrip("/"),
                    tuple(fields.get("suites", [])),
                    tuple(fields.get("components", [])),
                    " ".join(fields.get("signed-by", [])),
                )


def apt_proxies(texts: Iterable[str]) -> dict[str, str]:
    """Return the proxy of each scheme that texts in the format of `apt.conf` name."""
    found = {}
    for text in texts:
        for name, value in _settings(text):
            match = re.fullmatch(r"acquire::(https?)::proxy", name.lower())
            if match and _URL.fullmatch(value):
                found[match[1]] = value
    return found


def _settings(text: str) -> Iterator[tuple[str, str]]:
    """Give each setting with its whole name, whether it is written flat or in blocks."""
    scopes: list[str] = []
    words: list[str] = []
    for quoted, mark, plain in _TOKEN.findall(text):
        if mark == "{":
            scopes.append(words[0] if words else "")
        elif mark and len(words) > 1:
            yield "::".join((*filter(None, scopes), words[0])), words[1]
        if mark == "}" and scopes:
            scopes.pop()
        if mark:
            words = []
        elif quoted or plain:
            words.append(quoted or plain)


def release_of_host(path: Path = Path("/etc/os-release")) -> str:
    """Return the release of Debian that this host is, if there are kernels of it; else one."""
    text = (files.read(path, _FILE_BYTES_MAX) or b"").decode(errors="replace")
    fields = dict(re.findall(r'^(ID|VERSION_CODENAME)="?([\w.-]*)"?$', text, re.MULTILINE))
    codename = fields.get("VERSION_CODENAME", "")
    return codename if fields.get("ID") == "debian" and codename in RELEASES else DEFAULT_RELEASE


def suites_of(releases: Iterable[str]) -> list[str]:
    """Return suites that have the packages of releases, security updates with them."""
    return [
        suite
        for release in releases
        for suite in (release, *([] if "-" in release else [f"{release}{SECURITY_SUFFIX}"]))
    ]
