"""Packs on the web: plain GET and PUT, to any server that has them, `s3://` buckets included.

A URL is one of two things.  A *folder* ends with `/` and has an `index.json`; a pack in it is
meant by `FOLDER/NAME` or `FOLDER/NAME@VERSION`.  A *file* ends with `.forkpack` or has a query,
as the links do that buckets sign in advance; it is fetched or stored as it is.

What a server sends is not believed: it is bounded, and the caller checks it as any pack.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self
from urllib.parse import SplitResult, urlsplit, urlunsplit

import httpx
from blake3 import blake3

from forkd.errors import Conflict, Denied, InvalidRequest, NotFound, PackError, TransportError
from forkd.packs import index as indexes
from forkd.packs import limits, s3
from forkd.packs.index import INDEX_FILE, SUFFIX, Index, Published

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

PUSH_ATTEMPTS_MAX = 5
"""How often a push begins anew when somebody else changed the index meanwhile."""

REDIRECTS_MAX = 5
"""How often a server may send us elsewhere for one file."""

TIMEOUT_S = 60.0
"""Time without a byte after which a server is taken for gone."""

PIECE_BYTES = 1024 * 1024

_SCHEMES = ("http", "https", s3.SCHEME)
_CHANGED = (409, 412)
_ERRORS = {401: Denied, 403: Denied, 404: NotFound, 409: Conflict, 412: Conflict}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pack is, or goes.

    Attributes:
        url: The file, or the folder, which then ends with `/`.
        name: The pack's name in the folder; None for a file.
        version: Its version; None for the newest, or the next.
    """

    url: str
    name: str | None = None
    version: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether there is an index."""
        return self.url.endswith("/")


def source_of(text: str, folder: str | None) -> Place:
    """Return where to fetch what a user calls `text`: a URL, or a name in `folder`.

    Raises:
        InvalidRequest: It is neither, or a name without a folder.
    """
    if "://" not in text:
        if not folder:
            raise InvalidRequest(
                f"{text[:80]!r} is a name: --from, or FORKD_PACKS_URL, says in which folder",
                field="source",
            )
        return Place(_folder(folder), *indexes.parse_name(text))
    parts = _checked(text)
    if parts.query or parts.path.endswith(SUFFIX):
        return Place(text)
    above, _, name = text.rpartition("/")
    if not name:
        raise InvalidRequest("which pack of that folder? write FOLDER/NAME", field="source")
    return Place(f"{above}/", *indexes.parse_name(name))


def target_of(text: str, name: str, version: str | None) -> Place:
    """Return where to store a pack that a user pushes to `text`.

    Raises:
        InvalidRequest: It is no URL, or a version was given for a file.
    """
    parts = _checked(text)
    if parts.query or not parts.path.endswith("/"):
        if version is not None:
            raise InvalidRequest("only a folder has versions; its URL ends with /", field="version")
        return Place(text)
    return Place(text, name, None if version is None else indexes.check_version(version))


def _folder(text: str) -> str:
    _checked(text)
    return text if text.endswith("/") else f"{text}/"


def _checked(text: str) -> SplitResult:
    parts = urlsplit(text)
    if parts.scheme not in _SCHEMES or not parts.hostname or parts.fragment:
        raise InvalidRequest(f"not an http, https or s3 URL: {shown(text)!r}", field="url")
    return parts


def shown(url: str) -> str:
    """Return a URL without what in it may be secret."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))[:300]


class Remote:
    """One server's packs.

    Args:
        token: Sent as a bearer token, over TLS or to this host only.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = token
        self._bucket = s3.Bucket.from_environment(os.environ)
        self._client = httpx.Client(
            timeout=TIMEOUT_S, follow_redirects=True, max_redirects=REDIRECTS_MAX
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def find(self, place: Place) -> tuple[str, Published | None]:
        """Return the URL of the file that `place` means, and what the index says of it.

        Raises:
            NotFound: The index has no such pack.
        """
        if place.name is None:
            return place.url, None
        index, _ = self.index(place.url)
        published = index.find(place.name, place.version)
        return place.url + published.file, published

    def index(self, folder: str) -> tuple[Index, str | None]:
        """Return the index of a folder, and its entity tag; an empty one if there is none."""
        url = folder + INDEX_FILE
        try:
            with self._get(url) as answer:
                raw = b""
                for piece in answer.iter_bytes():
                    raw += piece
                    if len(raw) > limits.INDEX_BYTES_MAX:
                        break
                return indexes.parse(raw), answer.headers.get("etag")
        except NotFound:
            return Index(), None

    @contextlib.contextmanager
    def fetch(self, url: str, published: Published | None) -> Iterator[Iterator[bytes]]:
        """Open a pack; its pieces raise `PackError` if it is not what the index said."""
        with self._get(url) as answer:
            yield _held(answer.iter_raw(PIECE_BYTES), published)

    def push(self, file: BinaryIO, place: Place, signed_by: bytes | None) -> Published | None:
        """Store the pack in `file`; with an index, where `place` is a folder.

        Raises:
            Conflict: There is such a version, or others change the index all the time.
        """
        if place.name is None:
            self._put(place.url, file)
            return None
        published = _published(file, place.name, signed_by)
        for attempt in range(PUSH_ATTEMPTS_MAX):
            index, tag = self.index(place.url)
            version = place.version or index.next_version(place.name)
            published = published.model_copy(update={"version": version})
            changed = index.with_version(place.name, published)
            if attempt == 0:
                self._put(place.url + published.file, file)
            condition = {"If-None-Match": "*"} if tag is None else {"If-Match": tag}
            if self._put_index(place.url + INDEX_FILE, indexes.encode(changed), condition):
                return published
        raise Conflict(f"{shown(place.url)} is changed by others all the time; try again")

    def _put_index(self, url: str, data: bytes, condition: dict[str, str]) -> bool:
        """Return whether the index was still the one that was read."""
        with self._errors(url):
            answer = self._client.request(
                "PUT",
                self._address(url),
                content=data,
                headers=self._headers(url) | condition,
                auth=self._auth(url),
            )
            if answer.status_code in _CHANGED:
                return False
            _check(answer, url)
        return True

    def _put(self, url: str, file: BinaryIO) -> None:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        headers = self._headers(url) | {"Content-Length": str(size)}
        pieces = iter(lambda: file.read(PIECE_BYTES), b"")
        with self._errors(url):
            answer = self._client.request(
                "PUT", self._address(url), content=pieces, headers=headers, auth=self._auth(url)
            )
            _check(answer, url)

    @contextlib.contextmanager
    def _get(self, url: str) -> Iterator[httpx.Response]:
        headers = self._headers(url) | {"Accept-Encoding": "identity"}
        stream = self._client.stream(
            "GET", self._address(url), headers=headers, auth=self._auth(url)
        )
        with self._errors(url), stream as answer:
            _check(answer, url)
            yield answer

    def _address(self, url: str) -> str:
        return self._bucket.address(url) if _is_bucket(url) else url

    def _auth(self, url: str) -> httpx.Auth | None:
        return self._bucket.auth() if _is_bucket(url) else None

    def _headers(self, url: str) -> dict[str, str]:
        if self._token is None or _is_bucket(url):
            return {}
        parts = urlsplit(url)
        if parts.scheme != "https" and not _is_here(parts.hostname or ""):
            raise InvalidRequest(f"the token is not sent to {shown(url)} without TLS", field="url")
        return {"Authorization": f"Bearer {self._token}"}

    @contextlib.contextmanager
    def _errors(self, url: str) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise TransportError(f"{shown(url)}: {type(error).__name__}: {error}") from None


def _check(answer: httpx.Response, url: str) -> None:
    if answer.is_success:
        return
    kind = _ERRORS.get(answer.status_code, TransportError)
    raise kind(f"{shown(url)} answered {answer.status_code} {answer.reason_phrase}")


def _held(pieces: Iterator[bytes], published: Published | None) -> Iterator[bytes]:
    limit = limits.PACK_FILE_BYTES_MAX if published is None else published.bytes
    hasher, size = blake3(), 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise PackError(f"the pack is longer than {limit} bytes", reason="limit")
        hasher.update(piece)
        yield piece
    if published is not None and hasher.hexdigest() != published.digest:
        raise PackError("the pack is not the one that the index means", reason="digest")


def _published(file: BinaryIO, name: str, signed_by: bytes | None) -> Published:
    file.seek(0)
    hasher = blake3()
    while piece := file.read(PIECE_BYTES):
        hasher.update(piece)
    return Published(
        version="1",
        file=indexes.file_name(name, hasher.hexdigest()),
        bytes=file.tell(),
        digest=hasher.hexdigest(),
        created_at=datetime.now(UTC),
        signed_by=None if signed_by is None else signed_by.hex(),
    )


def _is_bucket(url: str) -> bool:
    return urlsplit(url).scheme == s3.SCHEME


def _is_here(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
