"""Bound the body of every request, and all of them together, before anything parses them.

Contents of files, packs and archives of recipes are the exception: they are streamed on and never
held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from forkd.daemon.clients import RETRY_AFTER_S
from forkd.daemon.errors import plain
from forkd.errors import CapacityError
from forkd.limits import BODY_BYTES_MAX

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOO_LARGE = 413
WORDS = f"the body is longer than {BODY_BYTES_MAX} bytes"

_UPLOADS = {"PUT": ("/files", "/pack"), "POST": ("/v2/recipes",)}
"""How the paths of those end, by the method of their requests."""


class LimitBodies:
    """The application behind a limit of `BODY_BYTES_MAX` for the body of a request.

    Args:
        app: What answers.
        room: What the bodies of all requests may take that have not been answered.
    """

    def __init__(self, app: ASGIApp, room: Room) -> None:
        self._app = app
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a body that breaks off with an error at a limit."""
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isdecimal() and int(declared) > BODY_BYTES_MAX:
            await plain(TOO_LARGE, WORDS)(scope, receive, send)
            return
        counted = _Counted(receive, self._room)
        try:
            await self._app(scope, counted, send)
        finally:
            self._room.used_bytes -= counted.bytes


class Room:
    """What the bodies of requests, or of answers, may take together.

    Args:
        what: What is held there.
        bytes_max: So much of it.

    Attributes:
        used_bytes: What they take.
    """

    def __init__(self, what: str, bytes_max: int) -> None:
        self._what = what
        self._bytes_max = bytes_max
        self.used_bytes = 0

    def take(self, more: int) -> None:
        """Have so many more bytes used.

        Raises:
            CapacityError: There is no room for them.
        """
        if self.used_bytes + more > self._bytes_max:
            raise CapacityError(
                f"all {self._what} together may have {self._bytes_max} bytes, and have "
                f"{self.used_bytes}: {more} more find no room; try again in {RETRY_AFTER_S} s",
                asked=more,
                limit=self._bytes_max,
                used=self.used_bytes,
                retry_after_s=RETRY_AFTER_S,
            )
        self.used_bytes += more


class _Counted:
    """The messages of a request.

    Attributes:
        bytes: How much of a body they were, all taken from `room`.
    """

    def __init__(self, receive: Receive, room: Room) -> None:
        self._receive = receive
        self._room = room
        self.bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        more = len(message.get("body", b""))
        if self.bytes + more > BODY_BYTES_MAX:
            raise HTTPException(TOO_LARGE, WORDS)
        self._room.take(more)
        self.bytes += more
        return message


def _is_upload(scope: Scope) -> bool:
    return bool(scope["path"].endswith(_UPLOADS.get(scope["method"], ())))
