"""Who talks to the daemon.

A Unix socket is guarded by its mode, and whoever may open it may do anything.  TCP is guarded by a
bearer token, at least `TOKEN_CHARS_MIN` characters long; whoever has it may do anything, too.

`/healthz` and `/readyz` answer anybody: they say that the daemon lives and serves, nothing more.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from forkd.errors import Denied, InvalidRequest
from forkd.host import files
from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, Caller

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import Scope

TOKEN_CHARS_MIN = 16
"""Shorter tokens are refused: they can be guessed."""

TOKEN_BYTES_MAX = 4096
"""A token file longer than this is not a token file."""

OPEN_PATHS = frozenset({"/healthz", "/healthz/", "/readyz", "/readyz/"})


def new_token() -> str:
    """Return a token nobody can guess: 256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(path: Path) -> str:
    """Return the token in a file, without the white space around it.

    Raises:
        InvalidRequest: The file cannot be read, or holds no usable token.
    """
    data = files.read(path, TOKEN_BYTES_MAX)
    if data is None:
        raise InvalidRequest(f"token file {path} does not exist", field="token_file")
    try:
        token = data.decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"token file {path}: {error}", field="token_file") from error
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"token file {path} must hold one word of {TOKEN_CHARS_MIN} characters or more",
            field="token_file",
        )
    return token


def by_socket(_: Scope, request_id: str) -> Caller:
    """Return who asks over the Unix socket, whose mode says who may open it."""
    return Caller("unix-socket", DEFAULT_TENANT, ALL_SCOPES, request_id)


class ByToken:
    """Tells who asks over TCP, by a bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def __call__(self, scope: Scope, request_id: str) -> Caller:
        """Return who asks.

        Raises:
            Denied: The token is missing, or another.
        """
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return Caller("anybody", DEFAULT_TENANT, frozenset(), request_id)
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            raise Denied("missing or invalid bearer token")
        return Caller("token", DEFAULT_TENANT, ALL_SCOPES, request_id)
