"""Who may talk to the daemon.

A Unix socket is guarded by its mode, and whoever may open it is trusted.  TCP is guarded by one
bearer token, at least `TOKEN_CHARS_MIN` characters long, which whoever holds it is root on this
host.  Without a token only loopback may be bound, and `settings` refuses everything else.

`/healthz` alone answers anybody: it says that the daemon lives and nothing more.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from forkd.daemon.errors import render
from forkd.errors import Denied, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

TOKEN_CHARS_MIN = 16
"""Shorter tokens are refused: they can be guessed."""

TOKEN_BYTES_MAX = 4096
"""A token file longer than this is not a token file."""

OPEN_PATHS = frozenset({"/healthz", "/healthz/"})


def new_token() -> str:
    """Return a token nobody can guess: 256 random bits."""
    return secrets.token_urlsafe(32)


def read_token(path: Path) -> str:
    """Return the token in a file, without the white space around it.

    Raises:
        InvalidRequest: The file cannot be read, or holds no usable token.
    """
    try:
        with path.open("rb") as file:
            token = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"token file {path}: {error}", field="token_file") from error
    if len(token) < TOKEN_CHARS_MIN or not token.isprintable() or " " in token:
        raise InvalidRequest(
            f"token file {path} must hold one word of {TOKEN_CHARS_MIN} characters or more",
            field="token_file",
        )
    return token


class RequireToken:
    """The application behind a bearer token, for HTTP and WebSocket alike."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 without reading it."""
        if scope["type"] == "lifespan" or self._allows(scope):
            await self._app(scope, receive, send)
            return
        answer = render(Denied("a bearer token is required, and this is not it"))
        await answer(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] in OPEN_PATHS:
            return True
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        return hmac.compare_digest(given, self._expected)
