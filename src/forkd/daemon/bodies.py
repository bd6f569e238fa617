"""Bound the body of every request, and all of them together, before anything parses them.

Each route declares what its body is: JSON, which is read into memory and so is bounded, or an
upload, which is streamed on.  It also declares the scopes that its request needs: nothing of a body
is read for a caller without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request

from forkd.daemon import repeats
from forkd.daemon.clients import RETRY_AFTER_S
from forkd.daemon.peers import CALLER, HELD
from forkd.errors import CapacityError
from forkd.limits import BODY_BYTES_MAX
from forkd.model.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import ExitStack

    from starlette.responses import Response
    from starlette.types import Message, Receive

    from forkd.model.caller import Caller, Scope

TOO_LARGE = 413
WORDS = f"the body is longer than {BODY_BYTES_MAX} bytes"

OURS = "/v2/"
"""Begins the paths of routes that know the header Idempotency-Key."""

DECLARED = "__request_body__"
"""Where the function of a route has its `RequestBody`."""

F = TypeVar("F", bound="Callable[..., object]")


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What a route says of the bodies of its requests.

    Attributes:
        scopes: All of which a caller must have before the body is read.
        is_upload: Whether it is streamed on and so may be of any length; else it is read whole.
        creates: Whether what is asked for must not be done twice.
    """

    scopes: tuple[Scope, ...]
    is_upload: bool
    creates: bool = False


def takes_body(*scopes: Scope, creates: bool = False) -> Callable[[F], F]:
    """Declare that a route takes a body of JSON, from a caller with these scopes.

    One that `creates` takes an Idempotency-Key.
    """
    return _declare(RequestBody(scopes, is_upload=False, creates=creates))


def takes_upload(*scopes: Scope) -> Callable[[F], F]:
    """Declare that a route streams a body on, from a caller with these scopes."""
    return _declare(RequestBody(scopes, is_upload=True))


def _declare(declared: RequestBody) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        setattr(function, DECLARED, declared)
        return function

    return decorate


class BoundedRoute(APIRoute):
    """A route that reads a body only from callers with its scopes, and only so much of it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request.

        Raises:
            TypeError: The route takes a body, and says nothing of it.
        """
        handle = super().get_route_handler()
        declared: RequestBody | None = getattr(self.endpoint, DECLARED, None)
        if declared is None and self.body_field is not None:
            raise TypeError(f"{self.path}: a route with a body needs @takes_body or @takes_upload")

        is_ours = self.path.startswith(OURS)

        async def answer(request: Request) -> Response:
            if declared is not None:
                caller: Caller = request.scope[CALLER]
                for scope in declared.scopes:
                    caller.require(scope)
            if declared is None or not declared.is_upload:
                request = bounded(request)
            key = repeats.key_of(request) if request.method == "POST" and is_ours else None
            if key is None:
                return await handle(request)
            if declared is None or not declared.creates:
                raise repeats.refuse(self.path)
            return await repeats.once(request, key, handle)

        return answer


def bounded(request: Request) -> Request:
    """Return a request with a body that breaks off with an error at a limit.

    Raises:
        HTTPException: It says that it is longer.
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > BODY_BYTES_MAX:
        raise HTTPException(TOO_LARGE, WORDS)
    held: ExitStack = request.scope[HELD]
    counted = _Counted(request.receive, request.app.state.bodies, request.scope[CALLER])
    held.callback(counted.release)
    return Request(request.scope, counted)


class Room:
    """The memory that the bodies of requests, or answers, may take together; tenants share it.

    Args:
        what: What is held there.
        bytes_max: So much of it.
    """

    def __init__(self, what: str, bytes_max: int) -> None:
        self._what = what
        self._shares = Shares(bytes_max)

    @property
    def used_bytes(self) -> int:
        """What they take."""
        return self._shares.used

    def take(self, caller: Caller, more: int) -> None:
        """Have so many more bytes used.

        Raises:
            CapacityError: There is no room for them, or the caller's tenant has its share.
        """
        shares = self._shares
        if shares.take(caller.tenant, more, whole=caller.is_admin):
            return
        has_all = caller.is_admin or shares.used + more > shares.most
        whose = "" if has_all else f" of tenant {caller.tenant}"
        used = shares.used if has_all else shares.of(caller.tenant)
        raise CapacityError(
            f"all {self._what} together may have {shares.most} bytes, and those{whose} have "
            f"{used}: {more} more find no room; try again in {RETRY_AFTER_S} s",
            asked=more,
            limit=shares.most,
            used=used,
            retry_after_s=RETRY_AFTER_S,
        )

    def give_back(self, caller: Caller, count: int) -> None:
        """Have so many bytes used no more."""
        if count:
            self._shares.give_back(caller.tenant, count)


class _Counted:
    """The messages of a request.

    Attributes:
        bytes: How much of a body they were, all taken from `room`.
    """

    def __init__(self, receive: Receive, room: Room, caller: Caller) -> None:
        self._receive = receive
        self._room = room
        self._caller = caller
        self.bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        more = len(message.get("body", b""))
        if self.bytes + more > BODY_BYTES_MAX:
            raise HTTPException(TOO_LARGE, WORDS)
        self._room.take(self._caller, more)
        self.bytes += more
        return message

    def release(self) -> None:
        """Take no room any more: the request was answered."""
        self._room.give_back(self._caller, self.bytes)
        self.bytes = 0
