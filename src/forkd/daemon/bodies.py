"""Bound the body of every request, before anything parses it.

Contents of files, packs and archives of recipes are the exception: they are streamed on and never
held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from forkd.daemon.errors import plain
from forkd.limits import BODY_BYTES_MAX

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOO_LARGE = 413
WORDS = f"the body is longer than {BODY_BYTES_MAX} bytes"

_UPLOADS = {"PUT": ("/files", "/pack"), "POST": ("/v2/recipes",)}
"""How the paths of those end, by the method of their requests."""


class LimitBodies:
    """The application behind a limit of `BODY_BYTES_MAX` for the body of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that breaks off with an error at the limit."""
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > BODY_BYTES_MAX:
            await plain(TOO_LARGE, WORDS)(scope, receive, send)
            return
        await self._app(scope, _Counted(receive), send)


class _Counted:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > BODY_BYTES_MAX:
            raise HTTPException(TOO_LARGE, WORDS)
        return message


def _is_upload(scope: Scope) -> bool:
    return bool(scope["path"].endswith(_UPLOADS.get(scope["method"], ())))
