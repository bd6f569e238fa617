"""Requests to a registry about one repository: over which protocol, as whom, and how often.

Every answer is bounded.  Credentials go to the registry, and to the token server that it names:
over TLS, to this host, or where the user said that plain HTTP will do.  A registry that is busy or
goes away for a moment is asked again (`forkd.registry.attempts`).  What goes wrong for good is a
`Fault`, of which the caller makes an error.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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


class Session:
    """What asks a registry.

    Args:
        reference: Something in the repository.
        login: Who asks; None for anybody.
        trust: How the registry is asked.
        explain: Makes an error of what goes wrong.
        transport: What sends requests; None for the network.
        wait: Waits for so many seconds before a registry is asked again.

    Attributes:
        base: The URL of the repository, with a slash at the end.
        is_plain: Whether requests are made without TLS.
    """

    def __init__(  # noqa: PLR0913 - what is asked for, by whom, and how
        self,
        reference: InRegistry,
        login: Login | None,
        *,
        trust: Trust,
        explain: Callable[[Fault], Exception],
        transport: httpx.BaseTransport | None,
        wait: Callable[[float], object],
    ) -> None:
        self._wait = wait
        self._reference = reference
        self._login = login
        self._explain = explain
        self._plain_asked = trust is not Trust.TLS and not reference.is_loopback
        self._authorization: str | None = None
        self._has_answered = False
        self._client = self._made(trust, transport)
        self.is_plain = trust is Trust.PLAIN or (trust is Trust.ANY and not self._speaks_tls())
        self._origin = f"{'http' if self.is_plain else 'https'}://{reference.host}"
        self.base = f"{self._origin}/v2/{reference.repository}/"

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
        raise self.fault(Kind.FAILED, f"cannot reach {registry}: {what} unusable: {reason}")

    def close(self) -> None:
        """Let go of its connections."""
        self._client.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        content: bytes | None = None,
        limit: int = limits.REGISTRY_ANSWER_BYTES_MAX,
    ) -> Answer:
        """Ask, and return all of the answer."""

        def ask(attempts: Attempts) -> httpx.Response:
            return self.ask(method, url, attempts, headers, content)

        return self._whole(ask, method, max(limit, limits.REGISTRY_ANSWER_BYTES_MAX))

    def ask(
        self,
        method: str,
        url: str,
        attempts: Attempts,
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
        answer = self._opened(request, attempts, follow=follow)
        if answer.status_code != _REFUSED[0] or not ours:
            return answer
        proof = self._authorized(answer.headers.get("WWW-Authenticate", ""))
        if proof is None:
            return answer
        answer.close()
        self._authorization = sent["Authorization"] = proof
        request = self._client.build_request(method, url, headers=sent, content=content)
        return self._opened(request, attempts, follow=follow)

    def read(self, answer: httpx.Response, limit: int) -> Iterator[bytes]:
        """Yield an answer as it comes, up to a limit; what httpx raises is passed on."""
        length = 0
        for piece in answer.iter_raw():
            length += len(piece)
            if length > limit:
                raise self.fault(
                    Kind.TOO_LONG,
                    f"{self._reference.registry} answered with more than {limit} bytes for "
                    f"{self._reference}",
                )
            yield piece

    def whole(self, answer: httpx.Response, limit: int) -> Answer:
        """Return an answer once all of it is there; what httpx raises is passed on."""
        body = b"".join(self.read(answer, limit))
        return Answer(answer.status_code, answer.headers, body, str(answer.url))

    def wait_after(self, error: Exception, method: str, attempts: Attempts) -> None:
        """Wait before a request is made again that was not answered as a whole.

        Raises what is made of the error, if it is not to be made again.
        """
        again = self._has_answered and may_repeat(method, error)
        pause_s = attempts.pause_s() if again else None
        if pause_s is None:
            raise self._unreachable(error) from None
        self._wait(pause_s)

    def check(self, answer: Answer) -> None:
        """Raise what is wrong if an answer says that something is."""
        if answer.is_success:
            return
        if answer.status in _REFUSED:
            raise self._refused()
        said = f"answered {answer.status}"
        reason = _reason(answer.body)
        raise self.fault(
            Kind.FAILED,
            f"{self._reference.registry} {said} for {self._reference}{reason}",
            f"it {said}{reason}",
        )

    def fault(self, kind: Kind, text: str, reason: str = "") -> Exception:
        """Return the error that is made of something that went wrong."""
        return self._explain(Fault(kind, text, reason))

    def _unreachable(self, error: Exception) -> Exception:
        reason = str(error) or type(error).__name__
        kind = Kind.UNREACHABLE
        if "SSL" in reason and not self.is_plain:
            kind = Kind.NO_TLS if any(words in reason for words in _NO_TLS) else Kind.TLS
        text = f"cannot reach {self._reference.registry} for {self._reference}: {reason}"
        return self.fault(kind, text, reason)

    def _whole(self, ask: Callable[[Attempts], httpx.Response], method: str, limit: int) -> Answer:
        """Ask until all of an answer is there."""
        attempts = Attempts()
        while True:
            try:
                with contextlib.closing(ask(attempts)) as answer:
                    return self.whole(answer, limit)
            except httpx.HTTPError as error:
                self.wait_after(error, method, attempts)

    def _opened(
        self, request: httpx.Request, attempts: Attempts, *, follow: bool
    ) -> httpx.Response:
        """Send a request, and again while the registry is busy or away."""
        while True:
            try:
                answer = self._client.send(request, stream=True, follow_redirects=follow)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                self.wait_after(error, request.method, attempts)
                continue
            self._has_answered = True
            busy = answer.status_code in BUSY
            pause_s = attempts.pause_s(answer.headers) if busy else None
            if pause_s is None:
                return answer
            answer.close()
            self._wait(pause_s)

    def _speaks_tls(self) -> bool:
        """Whether the registry answers over TLS, with whatever certificate."""
        request = self._client.build_request("GET", f"https://{self._reference.host}/v2/")
        try:
            self._client.send(request, stream=True).close()
        except httpx.HTTPError:
            return False
        return True

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
            raise self.fault(
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
        answer = self._whole(
            lambda attempts: self._opened(request, attempts, follow=False),
            request.method,
            limits.REGISTRY_ANSWER_BYTES_MAX,
        )
        if answer.status in _REFUSED:
            raise self._refused()
        try:
            found = json.loads(answer.body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not answer.is_success or not isinstance(token, str):
            raise self.fault(
                Kind.FAILED,
                f"the token server of {self._reference.registry} answered {answer.status} "
                "without a token",
            )
        return token

    def _refused(self) -> Exception:
        registry, login = self._reference.registry, self._login
        if login is None:
            how = f"it needs credentials, and there are none; `docker login {registry}`"
        else:
            whose = f"of {login.user!r}" if login.user else "with a token"
            how = f"the credentials {whose} in {login.source} do not suffice"
        return self.fault(Kind.REFUSED, f"{registry} refuses {self._reference}: {how}")


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
