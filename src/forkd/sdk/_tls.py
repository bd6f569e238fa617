"""What TLS needs of a client: whom to trust, and what to show."""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn

from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.sdk._endpoint import Endpoint

CONTEXTS_MAX = 8
"""Contexts that are kept: making one takes 30 ms, and each WebSocket needs one."""

NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL calls an answer that is no TLS."""

NOT_ANSWERED = "Server disconnected without sending a response"
"""What httpx says of a server that closes at once."""


def context(endpoint: Endpoint) -> ssl.SSLContext | None:
    """Return how to speak TLS with a daemon; None if it speaks none.

    Raises:
        InvalidRequest: A file cannot be used.
    """
    if not endpoint.url.startswith("https:"):
        return None
    named = (endpoint.ca_file, endpoint.client_cert, endpoint.client_key)
    return _made(*named, tuple(map(_changed_at_ns, named)))


@lru_cache(CONTEXTS_MAX)
def _made(
    ca_file: str | None, cert: str | None, key: str | None, _: tuple[int, ...]
) -> ssl.SSLContext:
    try:
        made = ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        _refuse("ca_file", "FORKD_CA_FILE", ca_file, "certificates of a CA, in PEM", error)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        try:
            made.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            wanted = "a certificate and its key, in PEM, without a password"
            _refuse("client_cert", "FORKD_CLIENT_CERT", cert, wanted, error)
    return made


def _changed_at_ns(path: str | None) -> int:
    """Return when a file was changed: a new certificate of the same name is another one."""
    try:
        return 0 if path is None else os.stat(path).st_mtime_ns  # noqa: PTH116 - a name, not a `Path`
    except OSError:
        return 0


def _refuse(field: str, variable: str, path: str | None, wanted: str, error: Exception) -> NoReturn:
    raise InvalidRequest(
        f"{field} ({variable}) {path} cannot be used ({_reason(error)}): it must hold {wanted}",
        field=field,
    ) from error


def advice(url: str, error: BaseException) -> str | None:
    """Return what is wrong with how a daemon was reached, if that is known."""
    said = str(error)
    if url.startswith("http:"):
        hint = f"; if it speaks TLS, its URL is https{url.removeprefix('http')}"
        return (
            f"{url} closed the connection without an answer{hint}" if NOT_ANSWERED in said else None
        )
    if any(each in said or each.replace("_", " ").lower() in said for each in NO_TLS):
        return f"{url} speaks no TLS; its URL is http{url.removeprefix('https')}"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = said.partition("verify failed: ")[2].partition(" (_ssl")[0]
        return (
            f"the certificate of {url} is not trusted ({why or 'unknown'}); --ca-file or "
            "FORKD_CA_FILE names the certificate of the CA that has signed it"
        )
    if "alert certificate required" in said:
        return f"{url} asks for a certificate: set FORKD_CLIENT_CERT and FORKD_CLIENT_KEY"
    if "alert unknown ca" in said or "alert bad certificate" in said:
        return f"{url} does not trust the certificate in FORKD_CLIENT_CERT"
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or str(error)
    return getattr(error, "strerror", None) or str(error)
