"""One repository of a registry, over the OCI distribution protocol.

Every answer is bounded, and what is asked for by its digest is compared with it.  Credentials go
to the registry, and to the token server that it names: over TLS, to this host, or where the user
said that plain HTTP will do.  A registry that is busy or goes away for a moment is asked again
(`forkd.registry.attempts`), for the rest of what it has sent a part of.  What goes wrong for good
is a `Fault`, of which the caller makes an error.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Self
from urllib.parse import urljoin, urlsplit

import httpx

from forkd.errors import InvalidRequest
from forkd.registry import limits
from forkd.registry.attempts import BUSY, Attempts, may_repeat
from forkd.registry.names import is_loopback

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator

    from forkd.registry.credentials import Login
    from forkd.registry.names import InRegistry

_NO_TLS = ("wrong version number", "record layer failure", "http request", "packet length too long")
"""What OpenSSL calls an answer that is no TLS."""

_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_CLIENT = "forkd"
_AS_IT_IS = {"Accept-Encoding": "identity"}
_REFUSED = (401, 403)
_MISSING = 404
_PARTIAL = 206


class Kind(Enum):
    """What can go wrong."""

    MISSING = auto()
    """The registry has no such repository or tag."""

    LOST = auto()
    """It lacks a part of what it has."""

    CHANGED = auto()
    """A manifest or a part has another digest."""

    TOO_LONG = auto()
    """An answer is longer than it may be."""

    REFUSED = auto()
    """It wants other credentials, or some."""

    UNREACHABLE = auto()
    """It does not answer."""

    TLS = auto()
    """It does not answer as it should over TLS."""

    NO_TLS = auto()
    """It speaks plain HTTP where it should not."""

    FAILED = auto()
    """It answers that something is wrong."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that went wrong.

    Attributes:
        kind: What it is.
        text: It in words, with registry and reference.
        reason: What was said of it, without these; empty if nothing was.
    """

    kind: Kind
    text: str
    reason: str = ""


class Trust(Enum):
    """How a registry is asked."""

    TLS = auto()
    """Over TLS, with a certificate of an authority that this host knows."""

    PLAIN = auto()
    """Over HTTP."""

    ANY = auto()
    """Over TLS with any certificate, or else over HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a registry answered.

    Attributes:
        status: The status code.
        headers: The headers.
        body: All of the body.
        url: Where it came from.
    """

    status: int
    headers: httpx.Headers
    body: bytes
    url: str

    @property
    def is_success(self) -> bool:
        """Whether it did what was asked."""
        return 200 <= self.status < 300  # noqa: PLR2004 - what HTTP calls success


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
        self._login = login
        self._explain = explain
        self._plain_asked = trust is not Trust.TLS and not reference.is_loopback
        self._authorization: str | None = None
        self._wait = wait
        self._has_answered = False
        self._client = self._made(trust, transport)
        self._plain = trust is Trust.PLAIN or (trust is Trust.ANY and not self._speaks_tls())
        self._origin = f"{'http' if self._plain else 'https'}://{reference.host}"
        self._base = f"{self._origin}/v2/{reference.repository}/"

    def _made(self, trust: Trust, transport: httpx.BaseTransport | None) -> httpx.Client:
        try:
            return httpx.Client(
                timeout=limits.REGISTRY_TIMEOUT_S,
                max_redirects=limits.REDIRECTS_MAX,
                transport=transport,
                verify=_certificates(trust),
            )
        except OSError as error:
            what, reason = "SSL_CERT_FILE or SSL_CERT_DIR is", error.strerror or str(error)
        except (ValueError, ImportError) as error:
            what, reason = "a proxy of the environment is", str(error)
        registry = self._reference.registry
        raise self._fault(Kind.FAILED, f"cannot reach {registry}: {what} unusable: {reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, which: str) -> tuple[bytes, str]:
        """Return the manifest with a tag or a digest, and its digest."""
        answer = self._send(
            "GET",
            f"{self._base}manifests/{which}",
            headers={"Accept": ", ".join(self._accept)},
            limit=limits.REGISTRY_MANIFEST_BYTES_MAX,
        )
        if answer.status == _MISSING:
            raise self._fault(
                Kind.MISSING,
                f"no {self._what} {self._reference}: {self._reference.registry} has no such "
                "repository or tag",
            )
        self._check(answer)
        digest = digest_of(answer.body)
        if which.startswith("sha256:") and digest != which:
            raise self._fault(Kind.CHANGED, f"the manifest of {self._reference} was changed")
        return answer.body, digest

    def put_manifest(self, which: str, raw: bytes) -> None:
        """Store a manifest under a tag."""
        url = f"{self._base}manifests/{which}"
        self._check(self._send("PUT", url, headers={"Content-Type": self._accept[0]}, content=raw))

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
            raise self._fault(
                Kind.CHANGED,
                f"a part of {self._reference} was changed: {digest} has another digest",
            )

    def _pieces(self, digest: str, size: int) -> Iterator[bytes]:
        """Yield what is there of a blob; the rest of it in another answer if one breaks."""
        length, attempts = 0, Attempts()
        while True:
            begun = length
            try:
                for piece in self._rest(digest, size, length):
                    length += len(piece)
                    yield piece
            except httpx.TransportError as error:
                if length == size:
                    return
                if length - begun >= limits.REGISTRY_PROGRESS_BYTES:
                    attempts = Attempts()
                pause_s = attempts.pause_s()
                if pause_s is None:
                    raise self._unreachable(error) from None
                self._wait(pause_s)
            else:
                return

    def _rest(self, digest: str, size: int, begin: int) -> Iterator[bytes]:
        """Yield a blob from a byte on; what httpx raises of an answer that breaks is passed on."""
        asked = {"Range": f"bytes={begin}-"} if begin else None
        with contextlib.closing(self._asked("GET", f"{self._base}blobs/{digest}", asked)) as answer:
            if answer.status_code == _MISSING:
                raise self._fault(
                    Kind.LOST,
                    f"{self._reference.registry} has lost a part of {self._reference}: {digest}",
                )
            if not answer.is_success:
                self._check(self._whole(answer, limits.REGISTRY_ANSWER_BYTES_MAX))
            passed = 0 if answer.status_code == _PARTIAL else begin
            for piece in self._read(answer, max(size, limits.REGISTRY_ANSWER_BYTES_MAX)):
                dropped = min(passed, len(piece))
                passed -= dropped
                if dropped < len(piece):
                    yield piece[dropped:]

    def put_blob(self, data: bytes) -> bool:
        """Store a blob; return whether it had to be sent."""
        digest = digest_of(data)
        known = self._send("HEAD", f"{self._base}blobs/{digest}")
        if known.is_success and known.headers.get("Content-Length") == str(len(data)):
            return False
        if known.status != _MISSING:
            self._check(known)
        begun = self._send("POST", f"{self._base}blobs/uploads/")
        self._check(begun)
        place = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(place).scheme != "https" and not self._plain:
            raise self._fault(
                Kind.FAILED,
                f"{self._reference.registry} wants the layers of {self._reference} without TLS",
            )
        url = httpx.URL(place).copy_merge_params({"digest": digest})
        self._check(
            self._send(
                "PUT", str(url), headers={"Content-Type": "application/octet-stream"}, content=data
            )
        )
        return True

    def _send(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        content: bytes | None = None,
        limit: int = limits.REGISTRY_ANSWER_BYTES_MAX,
    ) -> Answer:
        """Ask, and return all of the answer."""
        with contextlib.closing(self._asked(method, url, headers, content)) as answer:
            return self._whole(answer, max(limit, limits.REGISTRY_ANSWER_BYTES_MAX))

    def _asked(
        self,
        method: str,
        url: str,
        headers: dict[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        """Ask, and once more with credentials if that is what the registry wants.

        What is returned is not read yet, and the caller's to close.
        """
        sent = _AS_IT_IS | (headers or {})
        ours = _origin(url) == self._origin
        if self._authorization is not None and ours:
            sent["Authorization"] = self._authorization
        follow = method in {"GET", "HEAD"}
        request = self._client.build_request(method, url, headers=sent, content=content)
        answer = self._opened(request, follow=follow)
        if answer.status_code != _REFUSED[0] or not ours:
            return answer
        proof = self._authorized(answer.headers.get("WWW-Authenticate", ""))
        if proof is None:
            return answer
        answer.close()
        self._authorization = sent["Authorization"] = proof
        request = self._client.build_request(method, url, headers=sent, content=content)
        return self._opened(request, follow=follow)

    def _opened(self, request: httpx.Request, *, follow: bool) -> httpx.Response:
        """Send a request, and again while the registry is busy or away."""
        attempts = Attempts()
        while True:
            try:
                answer = self._client.send(request, stream=True, follow_redirects=follow)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                again = self._has_answered and may_repeat(request.method, error)
                pause_s = attempts.pause_s() if again else None
                if pause_s is None:
                    raise self._unreachable(error) from None
            else:
                self._has_answered = True
                busy = answer.status_code in BUSY
                pause_s = attempts.pause_s(answer.headers) if busy else None
                if pause_s is None:
                    return answer
                answer.close()
            self._wait(pause_s)

    def _read(self, answer: httpx.Response, limit: int) -> Iterator[bytes]:
        length = 0
        for piece in answer.iter_raw():
            length += len(piece)
            if length > limit:
                raise self._fault(
                    Kind.TOO_LONG,
                    f"{self._reference.registry} answered with more than {limit} bytes for "
                    f"{self._reference}",
                )
            yield piece

    def _whole(self, answer: httpx.Response, limit: int) -> Answer:
        try:
            body = b"".join(self._read(answer, limit))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return Answer(answer.status_code, answer.headers, body, str(answer.url))

    def _speaks_tls(self) -> bool:
        """Whether the registry answers over TLS, with whatever certificate."""
        request = self._client.build_request("GET", f"https://{self._reference.host}/v2/")
        try:
            self._client.send(request, stream=True).close()
        except httpx.HTTPError:
            return False
        return True

    def _unreachable(self, error: Exception) -> Exception:
        reason = str(error) or type(error).__name__
        kind = Kind.UNREACHABLE
        if "SSL" in reason and not self._plain:
            kind = Kind.NO_TLS if any(words in reason for words in _NO_TLS) else Kind.TLS
        text = f"cannot reach {self._reference.registry} for {self._reference}: {reason}"
        return self._fault(kind, text, reason)

    def _fault(self, kind: Kind, text: str, reason: str = "") -> Exception:
        return self._explain(Fault(kind, text, reason))

    def _authorized(self, challenge: str) -> str | None:
        """Return what to send to a registry that wants to know who asks."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            return None if self._login is None else _basic(self._login)
        if scheme.lower() != "bearer":
            return None
        said = dict(_PARAMETER.findall(rest))
        realm = said.get("realm", "")
        parts = urlsplit(realm)
        if parts.scheme != "https" and not (
            parts.scheme == "http" and (self._plain_asked or is_loopback(parts.netloc))
        ):
            raise self._fault(
                Kind.REFUSED,
                f"{self._reference.registry} names a token server without TLS: {realm[:80]!r}",
                "its token server has no TLS",
            )
        return f"Bearer {self._token(realm, said)}"

    def _token(self, realm: str, said: dict[str, str]) -> str:
        asked: dict[str, str] = {
            name: value for name, value in said.items() if name in {"service", "scope"}
        }
        login = self._login
        if login is not None and login.identity:
            form = {
                **asked,
                "grant_type": "refresh_token",
                "refresh_token": login.identity,
                "client_id": _CLIENT,
            }
            request = self._client.build_request("POST", realm, data=form, headers=_AS_IT_IS)
        else:
            headers = dict(_AS_IT_IS)
            if login is not None:
                headers["Authorization"] = _basic(login)
            request = self._client.build_request("GET", realm, params=asked, headers=headers)
        with contextlib.closing(self._opened(request, follow=False)) as opened:
            answer = self._whole(opened, limits.REGISTRY_ANSWER_BYTES_MAX)
        if answer.status in _REFUSED:
            raise self._refused()
        try:
            found = json.loads(answer.body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not answer.is_success or not isinstance(token, str):
            raise self._fault(
                Kind.FAILED,
                f"the token server of {self._reference.registry} answered {answer.status} "
                "without a token",
            )
        return token

    def _check(self, answer: Answer) -> None:
        if answer.is_success:
            return
        if answer.status in _REFUSED:
            raise self._refused()
        said = f"answered {answer.status}"
        reason = _reason(answer.body)
        raise self._fault(
            Kind.FAILED,
            f"{self._reference.registry} {said} for {self._reference}{reason}",
            f"it {said}{reason}",
        )

    def _refused(self) -> Exception:
        registry, login = self._reference.registry, self._login
        if login is None:
            how = f"it needs credentials, and there are none; `docker login {registry}`"
        else:
            whose = f"of {login.user!r}" if login.user else "with a token"
            how = f"the credentials {whose} in {login.source} do not suffice"
        return self._fault(Kind.REFUSED, f"{registry} refuses {self._reference}: {how}")


def digest_of(data: bytes) -> str:
    """Return the digest of a blob or manifest as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _certificates(trust: Trust) -> ssl.SSLContext | bool:
    """Return whom to believe: the authorities that httpx knows, and those of this host."""
    if trust is not Trust.TLS:
        return False
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context


def _basic(login: Login) -> str:
    if login.identity:
        raise InvalidRequest(f"{login.source} has a token, and the registry wants a password")
    encoded = base64.b64encode(f"{login.user}:{login.secret}".encode()).decode()
    return f"Basic {encoded}"


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _reason(body: bytes) -> str:
    """Return what a registry says of an error, for a message."""
    try:
        first = json.loads(body)["errors"][0]
        text = str(first.get("message") or first.get("code"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return ""
    return f": {text[:200]}"
