"""One repository of a registry, over the OCI distribution protocol.

Every answer is bounded, and what is asked for by its digest is compared with it.  Credentials go
to the registry, and to the token server that it names: over TLS, to this host, or where the user
said that plain HTTP will do.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urljoin, urlsplit

import httpx

from forkd.errors import Denied, InvalidRequest, NotFound, PackError, TransportError
from forkd.packs import limits
from forkd.registry_names import is_loopback

if TYPE_CHECKING:
    from forkd.packs.credentials import Login
    from forkd.packs.references import Reference

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"

REDIRECTS_MAX = 5
"""How often a registry may send us elsewhere for one layer."""

TIMEOUT_S = 60.0
"""Time without a byte after which a registry is taken for gone."""

_PARAMETER = re.compile(r'([a-zA-Z_]+)="([^"]*)"')
_CLIENT = "forkd"
_AS_IT_IS = {"Accept-Encoding": "identity"}
_REFUSED = (401, 403)
_MISSING = 404


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
        reference: A pack in it.
        login: Who asks; None for anybody.
        plain_http: Whether the registry is asked without TLS, though it is not on this host.
        transport: What sends requests; None for the network.
    """

    def __init__(
        self,
        reference: Reference,
        login: Login | None,
        *,
        plain_http: bool,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._reference = reference
        self._login = login
        self._plain = plain_http or reference.is_loopback
        self._plain_asked = plain_http
        scheme = "http" if self._plain else "https"
        self._origin = f"{scheme}://{reference.host}"
        self._base = f"{self._origin}/v2/{reference.repository}/"
        self._authorization: str | None = None
        self._client = httpx.Client(
            timeout=TIMEOUT_S, max_redirects=REDIRECTS_MAX, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, which: str) -> tuple[bytes, str]:
        """Return the manifest with a tag or a digest, and its digest.

        Raises:
            NotFound: There is none.
            PackError: It is too long, or has another digest.
        """
        answer = self._send(
            "GET",
            f"{self._base}manifests/{which}",
            headers={"Accept": MANIFEST_TYPE},
            limit=limits.ARTIFACT_MANIFEST_BYTES_MAX,
        )
        if answer.status == _MISSING:
            raise NotFound(
                f"no pack {self._reference}: {self._reference.registry} has no such repository "
                "or tag"
            )
        self._check(answer)
        digest = digest_of(answer.body)
        if which.startswith("sha256:") and digest != which:
            raise PackError(f"the manifest of {self._reference} was changed", reason="digest")
        return answer.body, digest

    def put_manifest(self, which: str, raw: bytes) -> None:
        """Store a manifest under a tag."""
        url = f"{self._base}manifests/{which}"
        self._check(self._send("PUT", url, headers={"Content-Type": MANIFEST_TYPE}, content=raw))

    def blob(self, digest: str, size: int) -> bytes:
        """Return a blob.

        Raises:
            PackError: The registry has lost it, or it was changed.
        """
        answer = self._send("GET", f"{self._base}blobs/{digest}", limit=size)
        if answer.status == _MISSING:
            raise PackError(
                f"{self._reference.registry} has lost a part of {self._reference}: {digest}",
                reason="lost",
            )
        self._check(answer)
        if len(answer.body) != size or digest_of(answer.body) != digest:
            raise PackError(
                f"a part of {self._reference} was changed: {digest} has another digest",
                reason="digest",
            )
        return answer.body

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
            raise TransportError(
                f"{self._reference.registry} wants the layers of {self._reference} without TLS"
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
        """Ask, and once more with credentials if that is what the registry wants."""
        answer = self._ask(method, url, headers or {}, content, limit)
        if answer.status == _REFUSED[0] and _origin(url) == self._origin:
            self._authorization = self._authorized(answer.headers.get("WWW-Authenticate", ""))
            if self._authorization is not None:
                answer = self._ask(method, url, headers or {}, content, limit)
        return answer

    def _ask(
        self, method: str, url: str, headers: dict[str, str], content: bytes | None, limit: int
    ) -> Answer:
        sent = _AS_IT_IS | headers
        if self._authorization is not None and _origin(url) == self._origin:
            sent["Authorization"] = self._authorization
        request = self._client.build_request(method, url, headers=sent, content=content)
        follow = method in {"GET", "HEAD"}
        return self._read(request, max(limit, limits.REGISTRY_ANSWER_BYTES_MAX), follow=follow)

    def _read(self, request: httpx.Request, limit: int, *, follow: bool) -> Answer:
        try:
            answer = self._client.send(request, stream=True, follow_redirects=follow)
            with contextlib.closing(answer):
                body = bytearray()
                for piece in answer.iter_raw():
                    body += piece
                    if len(body) > limit:
                        raise PackError(
                            f"{self._reference.registry} answered with more than {limit} bytes "
                            f"for {self._reference}",
                            reason="limit",
                        )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        return Answer(answer.status_code, answer.headers, bytes(body), str(answer.url))

    def _unreachable(self, error: Exception) -> TransportError:
        text = str(error) or type(error).__name__
        hint = "; --plain-http asks without TLS" if "SSL" in text and not self._plain else ""
        registry = self._reference.registry
        return TransportError(f"cannot reach {registry} for {self._reference}: {text}{hint}")

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
            raise Denied(
                f"{self._reference.registry} names a token server without TLS: {realm[:80]!r}"
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
        answer = self._read(request, limits.REGISTRY_ANSWER_BYTES_MAX, follow=False)
        if answer.status in _REFUSED:
            raise self._refused()
        try:
            found = json.loads(answer.body)
            token = found.get("token") or found.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not answer.is_success or not isinstance(token, str):
            raise TransportError(
                f"the token server of {self._reference.registry} answered {answer.status} "
                "without a token"
            )
        return token

    def _check(self, answer: Answer) -> None:
        if answer.is_success:
            return
        if answer.status in _REFUSED:
            raise self._refused()
        raise TransportError(
            f"{self._reference.registry} answered {answer.status} for {self._reference}"
            f"{_reason(answer.body)}"
        )

    def _refused(self) -> Denied:
        registry, login = self._reference.registry, self._login
        if login is None:
            how = f"it needs credentials, and there are none; `docker login {registry}`"
        else:
            whose = f"of {login.user!r}" if login.user else "with a token"
            how = f"the credentials {whose} in {login.source} do not suffice"
        return Denied(f"{registry} refuses {self._reference}: {how}")


def digest_of(data: bytes) -> str:
    """Return the digest of a blob or manifest as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def parsed(raw: bytes, what: str) -> dict[str, Any]:
    """Return a manifest.

    Raises:
        PackError: It is no JSON object.
    """
    try:
        said = json.loads(raw)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        raise PackError(f"the manifest of {what} is damaged", reason="damaged")
    return said


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
