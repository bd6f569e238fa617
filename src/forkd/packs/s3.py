"""Buckets: what `s3://BUCKET/KEY` is on the web, and how a request to it is signed.

The variables are those that every tool for buckets reads.  `AWS_ENDPOINT_URL_S3` or
`AWS_ENDPOINT_URL` names a server other than Amazon's.  A request is signed as "Signature
Version 4" says, without its body: who signed a pack is in the pack.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

SCHEME = "s3"
UNSIGNED = "UNSIGNED-PAYLOAD"

_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Bucket:
    """How to reach buckets.

    Attributes:
        endpoint: A server that has buckets as folders; None for Amazon's.
        region: Where the buckets are.
        key_id: Whose key signs; empty to ask as anybody.
        secret: The key.
        session: The token of a key for some hours; empty for others.
    """

    endpoint: str | None
    region: str
    key_id: str
    secret: str
    session: str

    @classmethod
    def from_environment(cls, values: Mapping[str, str]) -> Bucket:
        """Return what the environment says."""
        region = values.get("AWS_REGION") or values.get("AWS_DEFAULT_REGION") or "us-east-1"
        return cls(
            endpoint=values.get("AWS_ENDPOINT_URL_S3") or values.get("AWS_ENDPOINT_URL") or None,
            region=region,
            key_id=values.get("AWS_ACCESS_KEY_ID", ""),
            secret=values.get("AWS_SECRET_ACCESS_KEY", ""),
            session=values.get("AWS_SESSION_TOKEN", ""),
        )

    def address(self, url: str) -> str:
        """Return where on the web `s3://BUCKET/KEY` is."""
        parts = urlsplit(url)
        path = quote(parts.path, safe="/-_.~")
        if self.endpoint is not None:
            return f"{self.endpoint.rstrip('/')}/{parts.netloc}{path}"
        return f"https://{parts.netloc}.s3.{self.region}.amazonaws.com{path}"

    def auth(self) -> httpx.Auth | None:
        """Return what signs requests; None if there is no key."""
        return Signer(self) if self.key_id and self.secret else None


class Signer(httpx.Auth):
    """Signs each request as it is sent."""

    def __init__(
        self, bucket: Bucket, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._bucket = bucket
        self._now = now

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the headers that prove who asks."""
        signed = {"x-amz-date": f"{self._now():%Y%m%dT%H%M%SZ}", "x-amz-content-sha256": UNSIGNED}
        if self._bucket.session:
            signed["x-amz-security-token"] = self._bucket.session
        request.headers.update(signed)
        signed["host"] = request.url.netloc.decode()
        path, _, query = request.url.raw_path.decode().partition("?")
        request.headers["Authorization"] = authorization(
            self._bucket, request.method, (path, query), signed
        )
        yield request


def authorization(
    bucket: Bucket, method: str, target: tuple[str, str], headers: Mapping[str, str]
) -> str:
    """Return the header that proves who asks.

    Args:
        bucket: Whose key signs, and where.
        method: The request's.
        target: Its path and its query, as they are sent; the query is in order.
        headers: What is signed, by lower-case name; among them the date and the body's digest.
    """
    names = sorted(headers)
    lines = [method, *target, *(f"{name}:{headers[name]}" for name in names), "", ";".join(names)]
    canonical = "\n".join([*lines, headers["x-amz-content-sha256"]])
    when = headers["x-amz-date"]
    scope = f"{when[:8]}/{bucket.region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{bucket.secret}".encode()
    for part in scope.split("/"):
        key = _mac(key, part)
    signature = _mac(key, f"{_ALGORITHM}\n{when}\n{scope}\n{digest}").hex()
    proof = f"Credential={bucket.key_id}/{scope},SignedHeaders={';'.join(names)}"
    return f"{_ALGORITHM} {proof},Signature={signature}"


def _mac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
