"""One repository of a registry, over the OCI distribution protocol.

What is asked for by its digest is compared with it.  If the connection breaks while a blob comes,
the rest of it is asked for (`forkd.registry.attempts`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING, Self
from urllib.parse import urljoin, urlsplit

import httpx

from forkd.registry import limits
from forkd.registry.attempts import Attempts
from forkd.registry.session import Fault, Kind, Session, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.registry.credentials import Login
    from forkd.registry.names import InRegistry

_MISSING = 404
_PARTIAL = 206


class Registry:
    """A repository of a registry.

    Args:
        reference: Something in it.
        what: What that is, in a word.
        accept: Media types of manifests that are taken, the first of which is written.
        login: Who asks; None for anybody.
        trust: How the registry is asked.
        explain: Makes an error of what goes wrong.
        transport: What sends requests; None for the network.
        wait: Waits for so many seconds before a registry is asked again.
    """

    def __init__(  # noqa: PLR0913 - what is asked for, by whom, and how
        self,
        reference: InRegistry,
        what: str,
        accept: tuple[str, ...],
        login: Login | None,
        *,
        trust: Trust,
        explain: Callable[[Fault], Exception],
        transport: httpx.BaseTransport | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._reference = reference
        self._what = what
        self._accept = accept
        self._session = Session(
            reference, login, trust=trust, explain=explain, transport=transport, wait=wait
        )
        self._base = self._session.base

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def manifest(self, which: str) -> tuple[bytes, str]:
        """Return the manifest with a tag or a digest, and its digest."""
        answer = self._session.send(
            "GET",
            f"{self._base}manifests/{which}",
            headers={"Accept": ", ".join(self._accept)},
            limit=limits.REGISTRY_MANIFEST_BYTES_MAX,
        )
        if answer.status == _MISSING:
            raise self._session.fault(
                Kind.MISSING,
                f"no {self._what} {self._reference}: {self._reference.registry} has no such "
                "repository or tag",
            )
        self._session.check(answer)
        digest = digest_of(answer.body)
        if which.startswith("sha256:") and digest != which:
            raise self._session.fault(
                Kind.CHANGED, f"the manifest of {self._reference} was changed"
            )
        return answer.body, digest

    def put_manifest(self, which: str, raw: bytes) -> None:
        """Store a manifest under a tag."""
        url = f"{self._base}manifests/{which}"
        self._session.check(
            self._session.send("PUT", url, headers={"Content-Type": self._accept[0]}, content=raw)
        )

    def blob(self, digest: str, size: int) -> bytes:
        """Return a blob."""
        return b"".join(self.pieces(digest, size))

    def pieces(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield a blob in pieces; that they are those of the digest is known after the last."""
        found, length = hashlib.sha256(), 0
        for piece in self._pieces(digest, size):
            found.update(piece)
            length += len(piece)
            yield piece
        if length != size or f"sha256:{found.hexdigest()}" != digest:
            raise self._session.fault(
                Kind.CHANGED,
                f"a part of {self._reference} was changed: {digest} has another digest",
            )

    def _pieces(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield what is there of a blob; the rest of it in another answer if one breaks."""
        length, attempts = 0, Attempts()
        while True:
            begun = length
            try:
                for piece in self._rest(digest, size, length, attempts):
                    length += len(piece)
                    yield piece
            except httpx.HTTPError as error:
                if length == size:
                    return
                if length - begun >= limits.REGISTRY_PROGRESS_BYTES:
                    attempts = Attempts()
                self._session.wait_after(error, "GET", attempts)
            else:
                return

    def _rest(self, digest: str, size: int, begin: int, attempts: Attempts) -> Iterator[bytes]:
        """Yield a blob from a byte on; what httpx raises of an answer that breaks is passed on."""
        asked = {"Range": f"bytes={begin}-"} if begin else None
        with contextlib.closing(
            self._session.ask("GET", f"{self._base}blobs/{digest}", attempts, asked)
        ) as answer:
            if answer.status_code == _MISSING:
                raise self._session.fault(
                    Kind.LOST,
                    f"{self._reference.registry} has lost a part of {self._reference}: {digest}",
                )
            if not answer.is_success:
                self._session.check(self._session.whole(answer, limits.REGISTRY_ANSWER_BYTES_MAX))
            passed = 0 if answer.status_code == _PARTIAL else begin
            for piece in self._session.read(answer, max(size, limits.REGISTRY_ANSWER_BYTES_MAX)):
                dropped = min(passed, len(piece))
                passed -= dropped
                if dropped < len(piece):
                    yield piece[dropped:]

    def put_blob(self, data: bytes) -> bool:
        """Store a blob; return whether it had to be sent."""
        digest = digest_of(data)
        known = self._session.send("HEAD", f"{self._base}blobs/{digest}")
        if known.is_success and known.headers.get("Content-Length") == str(len(data)):
            return False
        if known.status != _MISSING:
            self._session.check(known)
        begun = self._session.send("POST", f"{self._base}blobs/uploads/")
        self._session.check(begun)
        place = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(place).scheme != "https" and not self._session.is_plain:
            raise self._session.fault(
                Kind.FAILED,
                f"{self._reference.registry} wants the layers of {self._reference} without TLS",
            )
        url = httpx.URL(place).copy_merge_params({"digest": digest})
        self._session.check(
            self._session.send(
                "PUT", str(url), headers={"Content-Type": "application/octet-stream"}, content=data
            )
        )
        return True


def digest_of(data: bytes) -> str:
    """Return the digest of a blob or manifest as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
