"""Fetch packages of Debian's archive, verified with Debian's keys, without apt.

    keyring ── InRelease ── Packages.xz ── package.deb
           signature      digest         digest

`InRelease` of a suite is signed.  It has the digests of the lists of packages, which have those of
the packages.  Nothing is used before it is verified, and nothing that has expired is used: a mirror
can withhold packages, but not change them.  The keys are those of Debian's package
`debian-archive-keyring`, and come with forkd.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import hashlib
import itertools
import lzma
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import httpx
import pysequoia

from forkd.errors import BuildError
from forkd.host import files, proc
from forkd.images.mirrors import KEYRING, MIRROR_VARIABLE, SECURITY_SUFFIX, SECURITY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from forkd.images.mirrors import Mirrors
    from forkd.images.steps import Build

RELEASE_BYTES_MAX = 8 << 20
"""Largest `InRelease`; that of a stable release has 150 kB."""

LIST_BYTES_MAX = 128 << 20
"""Largest list of packages as it is sent; that of Debian 13 has 10 MB."""

LIST_UNPACKED_BYTES_MAX = 1 << 30
"""Largest list of packages unpacked; that of Debian 13 has 55 MB."""

PACKAGE_BYTES_MAX = 2 << 30
"""Largest package; a kernel with its modules has 100 MB."""

CLOCK_TOLERANCE = dt.timedelta(days=1)
"""How far in the future a date may be: clocks and time zones of hosts are wrong at times."""

TIMEOUT_S = 60.0
"""How long a mirror may be silent."""

CONNECT_TRIES = 2
"""How often a connection that failed is tried again."""

FETCHED_FRACTION = 0.5
"""How much of the work on a kernel is done once a file of it is here; the rest is unpacking."""

_PIECE_BYTES = 4 << 20
_KEYRING_BYTES_MAX = 1 << 20
_LIST = "main/binary-amd64/Packages.xz"
_DIGEST = re.compile(r"^ ([0-9a-f]{64}) +(\d+) (\S+)$", re.MULTILINE)
_HTTP_OK, _HTTP_MISSING = 200, 404


@dataclass(frozen=True, slots=True)
class Release:
    """What a verified `InRelease` says.

    Attributes:
        suite: Which suite it is of.
        digests: The SHA-256 digest and the length in bytes of each file below it.
        by_hash: Whether files can be had by their digests, so that an update of the mirror between
            two requests does no harm.
    """

    suite: str
    digests: Mapping[str, tuple[str, int]]
    by_hash: bool


@dataclass(frozen=True, slots=True)
class Package:
    """A package, as a list of packages describes it.

    Attributes:
        name: What it is called.
        version: Its version.
        record: All that the list says of it.
        mirror: Which mirror has it.
        path: Where it is there.
        digest: Its SHA-256 digest, as hex.
        length: Its length in bytes.
    """

    name: str
    version: str
    record: str
    mirror: str
    path: str
    digest: str
    length: int


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a mirror; without a length and a digest if these are not known before."""

    what: str
    url: str
    suite: str
    bytes_max: int
    digest: str | None = None
    length: int | None = None


def utc_now() -> dt.datetime:
    """Return what time it is."""
    return dt.datetime.now(dt.UTC)


def read_keyring(path: Path = KEYRING) -> list[pysequoia.Cert]:
    """Return the keys in a file.

    Raises:
        BuildError: It has none.
    """
    try:
        keys = pysequoia.Cert.split_bytes(files.read(path, _KEYRING_BYTES_MAX) or b"")
    except (RuntimeError, ValueError):
        keys = []
    if not keys:
        raise BuildError(f"{path} has no keys of Debian's: install forkd again")
    return keys


def verify_release(
    data: bytes, suite: str, where: str, keys: list[pysequoia.Cert], now: dt.datetime
) -> Release:
    """Return what an `InRelease` says, verified.

    Args:
        data: The file.
        suite: Which suite it has to be of.
        where: Its URL, for errors.
        keys: One of these has to have signed it.
        now: What time it is.

    Raises:
        BuildError: It is not signed by any of `keys`, is of another suite, has expired, or is from
            the future.
    """
    try:
        text = (pysequoia.verify(data, lambda _: keys).bytes or b"").decode()
    except (RuntimeError, ValueError):
        raise BuildError(
            f"{where} is not signed by Debian: the mirror is damaged, or no mirror of Debian; "
            f"{_other(suite)}"
        ) from None
    fields = dict(re.findall(r"^([\w-]+): (.*)$", text, re.MULTILINE))
    said = fields.get("Codename")
    if said != suite:
        raise BuildError(f"{where} is of {said or 'no suite'}, not of {suite}; {_other(suite)}")
    valid_until, date = (_date(fields.get(name)) for name in ("Valid-Until", "Date"))
    if valid_until is not None and valid_until < now:
        raise BuildError(
            f"{where} expired on {valid_until:%Y-%m-%d}: the mirror has not been updated since, or "
            f"this host's clock is wrong; {_other(suite)}"
        )
    if date is None or date > now + CLOCK_TOLERANCE:
        raise BuildError(
            f"{where} is of {fields.get('Date', 'no date')}, which is in the future: this host's "
            "clock is wrong"
        )
    digests = {name: (digest, int(size)) for digest, size, name in _DIGEST.findall(text)}
    return Release(suite, digests, fields.get("Acquire-By-Hash") == "yes")


def _date(said: str | None) -> dt.datetime | None:
    if said is None:
        return None
    try:
        found = email.utils.parsedate_to_datetime(said.replace("UTC", "+0000"))
    except ValueError:
        return None
    return found if found.tzinfo else None


def _other(suite: str) -> str:
    variable = SECURITY_VARIABLE if suite.endswith(SECURITY_SUFFIX) else MIRROR_VARIABLE
    return f"{variable} names another mirror"


class Archive:
    """Debian's archive, as mirrors have it.  Use it in a `with`: it keeps connections."""

    def __init__(
        self,
        mirrors: Mirrors,
        build: Build,
        *,
        keys: list[pysequoia.Cert] | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._build = build
        self._keys = read_keyring() if keys is None else keys
        self._proxies = _proxies(mirrors)
        mounts = {f"{each}://": _transport(proxy) for each, proxy in self._proxies.items()}
        mounts |= {f"all://{each}": _transport(None) for each in _exempt_hosts(mirrors)}
        self._client = httpx.Client(
            transport=_transport(None),
            mounts=mounts,
            timeout=TIMEOUT_S,
            follow_redirects=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def packages(self, suite: str, wanted: Callable[[str], bool]) -> list[Package]:
        """Return packages of a suite, of the component `main`, for amd64.

        Args:
            suite: Such as `bookworm` or `bookworm-security`.
            wanted: Tells by the name of a package whether to return it.

        Raises:
            BuildError: The mirror cannot be reached, or what it has is not what Debian signed.
        """
        release = self._release(suite)
        if _LIST not in release.digests:
            raise BuildError(f"Debian's {suite} has no {_LIST}; {_other(suite)}")
        digest, length = release.digests[_LIST]
        mirror = self._mirrors.of(suite)
        path = _LIST.rpartition("/")[0] + f"/by-hash/SHA256/{digest}" if release.by_hash else _LIST
        url = f"{mirror}/dists/{suite}/{path}"
        file = _File(f"the packages of {suite}", url, suite, LIST_BYTES_MAX, digest, length)
        data = bytearray()
        self._fetch(file, data.extend)
        return list(_parsed(_unpacked(bytes(data), url), mirror, wanted))

    def _release(self, suite: str) -> Release:
        url = f"{self._mirrors.of(suite)}/dists/{suite}/InRelease"
        data = bytearray()
        self._fetch(_File(f"InRelease of {suite}", url, suite, RELEASE_BYTES_MAX), data.extend)
        return verify_release(bytes(data), suite, url, self._keys, utc_now())

    def download(self, package: Package, folder: Path) -> Path:
        """Put the archive of a package into `folder`, verified; return where it is.

        Raises:
            BuildError: As `packages`.
            CapacityError: There is no room for it.
        """
        path = folder / package.path.rpartition("/")[2]
        suite = SECURITY_SUFFIX if package.mirror == self._mirrors.security else ""
        url = f"{package.mirror}/{package.path}"
        file = _File(package.name, url, suite, PACKAGE_BYTES_MAX, package.digest, package.length)
        self._fetch(file, lambda piece: files.append(path, piece))
        return path

    def _fetch(self, file: _File, take: Callable[[bytes], object]) -> None:
        """Hand a file over in pieces, the last of them only once its digest was right."""
        url, most = file.url, file.length or file.bytes_max
        if most > file.bytes_max:
            raise BuildError(f"{url} has {most} bytes; at most {file.bytes_max} are fetched")
        what = f"fetching {file.what} from {urlsplit(url).netloc}"
        self._build.tell("kernel", what)
        hashed, length, held = hashlib.sha256(), 0, b""
        for piece in self._pieces(file):
            before, length = length, length + len(piece)
            if length > most:
                raise BuildError(f"{url} has more than {most} bytes; {_other(file.suite)}")
            hashed.update(piece)
            take(held)
            held = piece
            if file.length and 10 * before // most < 10 * length // most:
                self._build.tell("kernel", what, FETCHED_FRACTION * length / most)
        if file.digest is not None and hashed.hexdigest() != file.digest:
            raise BuildError(
                f"{url} is not what Debian signed (SHA-256 {hashed.hexdigest()}, not "
                f"{file.digest}): the mirror is damaged, or is being updated; try again later, or "
                f"{_other(file.suite)}"
            )
        take(held)

    def _pieces(self, file: _File) -> Iterator[bytes]:
        url, other = file.url, _other(file.suite)
        try:
            with self._client.stream("GET", url) as answer:
                if answer.status_code == _HTTP_MISSING:
                    raise BuildError(f"there is no {url}; {other}")
                if answer.status_code != _HTTP_OK:
                    status = f"{answer.status_code} {answer.reason_phrase}"
                    raise BuildError(f"{url} answers {status}{self._by(url)}; {other}")
                yield from answer.iter_raw(_PIECE_BYTES)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise BuildError(
                f"cannot reach {url}{self._by(url)}: {reason}; {other}, and http_proxy or "
                "https_proxy a proxy"
            ) from None

    def _by(self, url: str) -> str:
        """Say by which proxy a URL is asked for, without its password."""
        asked = urlsplit(url)
        proxy = self._proxies.get(asked.scheme)
        if proxy is None or asked.hostname in _exempt_hosts(self._mirrors):
            return ""
        parts = urlsplit(proxy)
        return f" by the proxy {parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _proxies(mirrors: Mirrors) -> dict[str, str]:
    """Return the proxy of each scheme: the environment's, else apt's."""
    environment = proc.environment()
    found = {}
    for scheme in ("http", "https"):
        names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
        said = next(filter(None, map(environment.get, names)), mirrors.proxies.get(scheme))
        if said:
            found[scheme] = said if "://" in said else f"http://{said}"
    return found


def _exempt_hosts(mirrors: Mirrors) -> set[str]:
    """Return those hosts of mirrors that are asked without a proxy."""
    environment = proc.environment()
    exempt = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    hosts = {urlsplit(each).hostname or "" for each in (mirrors.releases, mirrors.security)}
    return {host for host in hosts if is_exempt(host, exempt)}


def is_exempt(host: str, exempt: str) -> bool:
    """Whether a host is one of those that `no_proxy` lists."""
    names = [each.strip().lstrip(".").lower() for each in exempt.split(",") if each.strip()]
    return any(each == "*" or f".{host}".endswith(f".{each}") for each in names)


def _transport(proxy: str | None) -> httpx.HTTPTransport:
    try:
        return httpx.HTTPTransport(proxy=proxy, retries=CONNECT_TRIES)
    except (ValueError, ImportError) as error:
        shown = (proxy or "").rpartition("@")[2]
        raise BuildError(f"the proxy {shown!r} cannot be used: {error}") from None


def _unpacked(data: bytes, url: str) -> Iterator[str]:
    """Give the lines of a list of packages."""
    unpacker, length, rest = lzma.LZMADecompressor(), 0, b""
    try:
        for at in range(0, len(data), _PIECE_BYTES):
            piece = unpacker.decompress(data[at : at + _PIECE_BYTES])
            length += len(piece)
            if length > LIST_UNPACKED_BYTES_MAX:
                raise BuildError(f"{url} unpacks to more than {LIST_UNPACKED_BYTES_MAX} bytes")
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
    except lzma.LZMAError as error:
        raise BuildError(f"{url} cannot be unpacked: {error}") from error


def _parsed(lines: Iterable[str], mirror: str, wanted: Callable[[str], bool]) -> Iterator[Package]:
    """Give those packages of a list whose names are wanted."""
    record: list[str] = []
    for line in itertools.chain(lines, ("",)):
        if line:
            record.append(line)
            continue
        name = record[0].removeprefix("Package: ") if record else ""
        if wanted(name) and (package := _package("\n".join(record), mirror)) is not None:
            yield package
        record = []


_FIELD = re.compile(r"^(Package|Version|Filename|Size|SHA256): (.*)$", re.MULTILINE)


def _package(record: str, mirror: str) -> Package | None:
    fields = dict(_FIELD.findall(record))
    try:
        return Package(
            name=fields["Package"],
            version=fields["Version"],
            record=record,
            mirror=mirror,
            path=fields["Filename"],
            digest=fields["SHA256"],
            length=int(fields["Size"]),
        )
    except (KeyError, ValueError):
        return None
