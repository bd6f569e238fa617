"""Requests of a connection of a guest, passed on with values in the place of placeholders.

Both sides are parsed and written anew (h11), so that where a request ends is the same for the
guest, for us and for the server: nothing can be hidden in what one of them takes for a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import h11

from forkd.errors import HostError
from forkd.limits import PROXY_HEAD_BYTES_MAX
from forkd.network import heads
from forkd.network.heads import BodyMask, Refusal
from forkd.network.upstream import BUFFER_BYTES, Stream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from forkd.model.secret import Bound

IDLE_S = 600.0
"""How long neither side may say anything while one waits for the other; models think for long."""

_Event: TypeAlias = h11.Event | type[h11.PAUSED]

SPLICE_IDLE_S = 3_600.0
"""How long a connection that is passed on as it is may be silent both ways: it takes a place."""

LINGER_S = 1.0
"""How long a guest that was refused may take to read that."""

_PROTOCOLS_SWITCHED = 101
_BAD_GATEWAY, _BAD_REQUEST = 502, 400
_UNANSWERED = (h11.IDLE, h11.SEND_RESPONSE)

log = logging.getLogger(__name__)


class _Side:
    """One end: a connection, and what it says in HTTP/1.1."""

    def __init__(self, stream: Stream, role: type[h11.SERVER | h11.CLIENT]) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=PROXY_HEAD_BYTES_MAX - 1)

    async def next(self) -> _Event:
        """Return what comes next.

        Raises:
            h11.RemoteProtocolError: It is no HTTP.
            OSError: The peer is lost, or silent for too long.
        """
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event  # type: ignore[return-value]  # all that it can be
            async with asyncio.timeout(IDLE_S):
                data = await self.stream.reader.read(self._room)
            self.http.receive_data(data)

    @property
    def _room(self) -> int:
        """How much may be read, so that no head is longer than it may be."""
        return PROXY_HEAD_BYTES_MAX - len(self.http.trailing_data[0])

    async def send(self, event: h11.Event) -> None:
        """Say something, and wait until there is room for more."""
        data = self.http.send(event)
        if data:
            await self.write(data)

    async def write(self, data: bytes) -> None:
        """Send bytes, and wait until there is room for more."""
        self.stream.writer.write(data)
        async with asyncio.timeout(IDLE_S):
            await self.stream.writer.drain()

    @property
    def is_ready(self) -> bool:
        """Whether another request may follow on this connection, which is prepared for it."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True


class _Outcome(Enum):
    """What became of a request that was passed on."""

    ANSWERED = "answered"
    SWITCHED = "both speak another protocol now"
    FAILED = "the server ended the connection, or spoke no HTTP"


class Relay:
    """Passes on what a guest asks one host.

    Args:
        guest: Its connection, for which it was shown a certificate of `name`.
        name: For which host the connection was made.
        port: To which port.
        dial: Connects to that host, and verifies that it is it.
        secrets: Returns which may be used for it now.
        refused: Why nothing may be asked of it, if so.
    """

    def __init__(  # noqa: PLR0913 - what a connection consists of
        self,
        guest: Stream,
        name: str,
        port: int,
        dial: Callable[[], Awaitable[Stream]],
        secrets: Callable[[], Sequence[Bound]],
        *,
        refused: Refusal | None = None,
    ) -> None:
        self._guest = _Side(guest, h11.SERVER)
        self._name = name
        self._port = port
        self._dial = dial
        self._secrets = secrets
        self._refused = refused
        self._upstream: _Side | None = None
        self._is_head = False

    async def run(self) -> None:
        """Pass on requests until one side ends; whatever else ends it is raised.

        Raises:
            OSError: A side was lost.
            ExceptionGroup: Likewise, while both were at work.
        """
        try:
            while (request := await self._next_request()) is not None:
                if not await self._exchange(request):
                    await self._linger()
                    return
        except h11.RemoteProtocolError as error:
            await self._complain(error)
        finally:
            if self._upstream is not None:
                self._upstream.stream.abort()

    async def _next_request(self) -> h11.Request | None:
        """Return the next request; None if the guest, or the server meanwhile, has ended."""
        event: _Event | None
        if self._upstream is not None:
            event = await self._guest_before_end(self._upstream)
        else:
            event = await self._guest.next()
        return event if isinstance(event, h11.Request) else None

    async def _guest_before_end(self, upstream: _Side) -> _Event | None:
        asking = asyncio.ensure_future(self._guest.next())
        ending = asyncio.ensure_future(upstream.stream.reader.read(1))  # or unasked
        try:
            await asyncio.wait([asking, ending], return_when=asyncio.FIRST_COMPLETED)
            return None if ending.done() else await asking
        finally:
            asking.cancel()
            ending.cancel()
            await asyncio.wait([asking, ending])
            for each in (asking, ending):
                if not each.cancelled():
                    each.exception()  # it was looked at

    async def _exchange(self, request: h11.Request) -> bool:
        """Answer one request; return whether another may follow."""
        self._is_head = request.method == b"HEAD"
        headers = request.headers.raw_items()
        refusal = self._refused or heads.refusal(
            request.method, request.target, headers, self._name, self._port
        )
        if refusal is not None:
            await self._answer(refusal)
            return False
        secrets = self._secrets()
        headers, placed = heads.place(headers, secrets)
        if placed:
            headers = heads.without_compression(headers)
        try:
            upstream = await self._connected()
        except HostError as error:
            log.info("upstream failed", extra={"host": self._name, "error": str(error)})
            await self._answer(Refusal(_BAD_GATEWAY, str(error)))
            return False
        passed = h11.Request(method=request.method, target=request.target, headers=headers)
        outcome = await self._pass_on(upstream, passed, secrets)
        if outcome is _Outcome.FAILED:
            await self._report_failure()
            return False
        if outcome is _Outcome.SWITCHED:
            await self._talk(upstream)
            return False
        if not upstream.is_ready:
            upstream.stream.abort()
            self._upstream = None
        return self._guest.is_ready

    async def _connected(self) -> _Side:
        if self._upstream is None:
            self._upstream = _Side(await self._dial(), h11.CLIENT)
        return self._upstream

    async def _pass_on(
        self, upstream: _Side, request: h11.Request, secrets: Sequence[Bound]
    ) -> _Outcome:
        """Pass a request on, and its answer back."""
        try:
            await upstream.send(request)
        except OSError:
            return _Outcome.FAILED
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(self._send_body(upstream), name="body of a request")
            outcome = await self._return_answer(upstream, secrets)
            sending.cancel()
        return outcome

    async def _send_body(self, upstream: _Side) -> None:
        while True:
            event = await self._guest.next()
            if not isinstance(event, h11.Data | h11.EndOfMessage):
                return
            try:
                await upstream.send(event)
            except OSError:
                return  # what the server says, or that it says nothing, is the answer
            if isinstance(event, h11.EndOfMessage):
                return

    async def _return_answer(self, upstream: _Side, secrets: Sequence[Bound]) -> _Outcome:
        mask = BodyMask(())
        while True:
            try:
                event = await upstream.next()
            except (h11.RemoteProtocolError, OSError):
                return _Outcome.FAILED
            if isinstance(event, h11.Data):
                if data := mask.feed(bytes(event.data)):
                    await self._guest.send(h11.Data(data=data))
            elif isinstance(event, h11.EndOfMessage):
                if rest := mask.end():
                    await self._guest.send(h11.Data(data=rest))
                trailers = heads.mask(event.headers.raw_items(), secrets)
                await self._guest.send(h11.EndOfMessage(headers=trailers))
                return _Outcome.ANSWERED
            elif isinstance(event, h11.InformationalResponse | h11.Response):
                headers = heads.mask(event.headers.raw_items(), secrets)
                if heads.is_searchable(headers):
                    mask = BodyMask(secrets)
                await self._guest.send(
                    type(event)(status_code=event.status_code, reason=event.reason, headers=headers)
                )
                if event.status_code == _PROTOCOLS_SWITCHED:
                    return _Outcome.SWITCHED
            else:
                return _Outcome.FAILED

    async def _talk(self, upstream: _Side) -> None:
        """Pass on whatever both say, which is no HTTP any more."""
        await self._guest.write(upstream.http.trailing_data[0])
        await upstream.write(self._guest.http.trailing_data[0])
        await splice(self._guest.stream, upstream.stream)

    async def _report_failure(self) -> None:
        if self._guest.http.our_state in _UNANSWERED:
            ended = f"{self._name} ended the connection without an answer"
            await self._answer(Refusal(_BAD_GATEWAY, ended))
        else:
            self._guest.stream.abort()  # the guest is to see that the answer is not whole

    async def _complain(self, error: h11.RemoteProtocolError) -> None:
        """Tell the guest that its request is none."""
        if self._guest.http.our_state in _UNANSWERED:
            status = error.error_status_hint or _BAD_REQUEST
            await self._answer(Refusal(status, "this is no request of HTTP/1.1, or too long"))
            await self._linger()

    async def _answer(self, refusal: Refusal) -> None:
        """Answer in the server's place, and end the connection."""
        text = f"forkd: {refusal.reason}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(text))),
            ("Connection", "close"),
        ]
        await self._guest.send(h11.Response(status_code=refusal.status, headers=headers))
        await self._guest.send(h11.Data(data=b"" if self._is_head else text))
        await self._guest.send(h11.EndOfMessage())

    async def _linger(self) -> None:
        """Let the guest read its answer: a connection that ends unread is reset, answer and all."""
        with contextlib.suppress(h11.RemoteProtocolError):
            if isinstance(self._guest.http.next_event(), h11.EndOfMessage):
                return  # all that it said was read
        with contextlib.suppress(OSError):
            async with asyncio.timeout(LINGER_S):
                while await self._guest.stream.reader.read(BUFFER_BYTES):
                    pass


async def splice(one: Stream, other: Stream) -> None:
    """Pass on bytes in both directions until both are over.

    Raises:
        ExceptionGroup: A side was lost.
        TimeoutError: Both were silent for too long.
    """
    async with asyncio.timeout(SPLICE_IDLE_S) as silence, asyncio.TaskGroup() as group:
        group.create_task(_pump(one, other, silence), name="there")
        group.create_task(_pump(other, one, silence), name="back")


async def _pump(source: Stream, target: Stream, silence: asyncio.Timeout) -> None:
    clock = asyncio.get_running_loop().time
    while data := await source.reader.read(BUFFER_BYTES):
        silence.reschedule(clock() + SPLICE_IDLE_S)
        target.writer.write(data)
        await target.writer.drain()
    if target.writer.can_write_eof():
        target.writer.write_eof()
    else:
        target.writer.close()  # of TLS nothing is left of the other direction
