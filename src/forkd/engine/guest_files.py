"""Files in a guest: described, changed, and streamed both ways."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import TYPE_CHECKING, Self, TypeVar

from forkd.engine.channel import deadline
from forkd.engine.frames import FRAME_PAYLOAD_MAX, Kind
from forkd.engine.guest import ANSWER_TIMEOUT_S, answer
from forkd.engine.replies import (
    ArchiveOpened,
    ArchiveWritten,
    Entries,
    Entry,
    FileOpened,
    FileWritten,
    Reply,
)
from forkd.errors import EngineError, EngineExited
from forkd.model.files import ArchiveResult, FileEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator
    from types import TracebackType

    from forkd.engine.channel import Channel
    from forkd.engine.frames import Frame
    from forkd.engine.guest import Guest
    from forkd.model.json import JsonObject

R = TypeVar("R", bound=Reply)

WRITE_CHUNK_BYTES = FRAME_PAYLOAD_MAX // 4
"""Largest piece in which a file is sent: some frames fit into the buffers on the way."""


class GuestFile:
    """A file being read; `forkd.service.api_streams.FileReader` describes it."""

    def __init__(
        self, channel: Channel, operation: contextlib.AsyncExitStack, size_bytes: int, mode: int
    ) -> None:
        self._channel = channel
        self._operation = operation
        self._size_bytes = size_bytes
        self._mode = mode
        self._over = False

    @classmethod
    async def open(cls, guest: Guest, path: str, *, offset: int, length: int | None) -> Self:
        """Open a file for reading.

        Raises:
            NotFound: There is none.
            ForkdError: As `Guest.ask`.
        """
        members: JsonObject = {"path": path, "offset": offset, "length": length}
        return await cls._open(guest, "read_file", members, FileOpened)

    @classmethod
    async def open_archive(cls, guest: Guest, path: str) -> Self:
        """Open a tree for reading, as a tar archive, whose size and mode are 0; as `open`."""
        return await cls._open(guest, "read_archive", {"path": path}, ArchiveOpened)

    @classmethod
    async def _open(
        cls, guest: Guest, op: str, members: JsonObject, reply: type[FileOpened | ArchiveOpened]
    ) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            async with deadline(ANSWER_TIMEOUT_S, "the agent did not open the file"):
                channel = await stack.enter_async_context(guest.operation(op, members))
                first = await channel.receive()
            if first.kind is not Kind.EVENT:
                answer(first)
                raise EngineError("an agent ended a file that it never opened")
            opened = reply.read(first.members(), op)
            return cls(channel, stack.pop_all(), opened.size_bytes, opened.mode)

    @property
    def size_bytes(self) -> int:
        """Length of the whole file when it was opened."""
        return self._size_bytes

    @property
    def mode(self) -> int:
        """Permission bits of the file."""
        return self._mode

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes; each piece within `ANSWER_TIMEOUT_S` of the last.

        Raises:
            EngineTimeout: The agent stalled.
            ForkdError: As `Guest.ask`.
        """
        while True:
            async with deadline(ANSWER_TIMEOUT_S, "the agent stalled in a file"):
                frame = await self._channel.receive()
            if frame.kind is Kind.DATA:
                yield frame.payload
            elif frame.kind is not Kind.DATA_EOF:
                answer(frame)
                self._over = True
                return

    async def aclose(self) -> None:
        """Stop reading; see the API."""
        if not self._over:
            self._channel.close()
        await self._operation.aclose()


async def write_file(  # noqa: PLR0913 - what a caller may ask
    guest: Guest,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    mode: int | None,
    make_parents: bool,
    user: str | None,
) -> int:
    """Write a file, whole or not at all; returns its length in bytes.

    Raises:
        EngineTimeout: The agent stalled.
        ForkdError: As `Guest.ask`; whatever `chunks` raises, after which no file appears.
    """
    members: JsonObject = {
        "path": path,
        "mode": mode,
        "make_parents": make_parents,
        "user": user,
    }
    return (await _send(guest, "write_file", members, chunks, FileWritten)).bytes


async def write_archive(
    guest: Guest,
    path: str,
    chunks: AsyncIterable[bytes],
    *,
    user: str | None,
    keep_owner: bool,
) -> ArchiveResult:
    """Make a tree of a tar archive.

    Raises:
        ForkdError: As `write_file`; what was made before stays.
    """
    members: JsonObject = {"path": path, "user": user, "keep_owner": keep_owner}
    written = await _send(guest, "write_archive", members, chunks, ArchiveWritten)
    return ArchiveResult(
        entries=written.entries,
        bytes=written.bytes,
        skipped=tuple((each.path, each.reason) for each in written.skipped),
        more_skipped=written.more_skipped,
    )


async def _send(
    guest: Guest, op: str, members: JsonObject, chunks: AsyncIterable[bytes], reply: type[R]
) -> R:
    async with guest.operation(op, members) as channel:
        try:
            outcome = await _exchange(channel, chunks)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # there is one: only `chunks` and we can fail
        if isinstance(outcome, EngineError):
            raise outcome
        return reply.read(answer(outcome), op)


async def _exchange(channel: Channel, chunks: AsyncIterable[bytes]) -> Frame | EngineError:
    """Send a file and return the answer, which may come early: when the disk is full, say."""
    async with asyncio.TaskGroup() as group:
        answering = group.create_task(_outcome(channel), name="answer to a file")
        try:
            await _send_all(channel, chunks, answering)
            async with deadline(ANSWER_TIMEOUT_S, "the agent did not finish a file"):
                return await answering
        except BaseException:
            answering.cancel()
            raise


async def _outcome(channel: Channel) -> Frame | EngineError:
    """Return the agent's answer, or the error that stands in its place."""
    try:
        return await channel.receive()
    except EngineError as error:
        return error


async def _send_all(
    channel: Channel, chunks: AsyncIterable[bytes], answering: asyncio.Task[Frame | EngineError]
) -> None:
    try:
        async for chunk in chunks:
            for start in range(0, len(chunk), WRITE_CHUNK_BYTES):
                if answering.done():
                    return
                async with deadline(ANSWER_TIMEOUT_S, "the agent stalled in a file"):
                    await channel.send(Kind.DATA, chunk[start : start + WRITE_CHUNK_BYTES])
        await channel.send(Kind.DATA_EOF)
    except EngineExited:
        return  # the agent's answer, or its absence, says why


async def stat(guest: Guest, path: str) -> FileEntry:
    """Return one entry; symbolic links are not followed.  Raises as `Guest.ask`."""
    return _entry(await guest.ask("stat", {"path": path}, Entry))


async def list_dir(guest: Guest, path: str) -> tuple[FileEntry, ...]:
    """Return a directory's entries, by name; raises as `Guest.ask`."""
    listed = await guest.ask("list_dir", {"path": path}, Entries)
    return tuple(map(_entry, listed.entries))


async def make_dir(
    guest: Guest, path: str, *, parents: bool, mode: int | None, user: str | None
) -> None:
    """Make a directory; raises as `Guest.ask`."""
    members: JsonObject = {"path": path, "parents": parents, "mode": mode, "user": user}
    await guest.ask("make_dir", members)


async def move(guest: Guest, source: str, target: str) -> None:
    """Rename `source` to `target`; raises as `Guest.ask`."""
    await guest.ask("move", {"source": source, "target": target})


async def remove(guest: Guest, path: str, *, recursive: bool) -> None:
    """Remove a file or directory; raises as `Guest.ask`."""
    await guest.ask("remove", {"path": path, "recursive": recursive})


def _entry(said: Entry) -> FileEntry:
    return FileEntry(
        name=_named(said.name, said.name_b64) or "",
        kind=said.kind,
        size_bytes=said.size_bytes,
        mode=said.mode,
        uid=said.uid,
        gid=said.gid,
        modified_at_ns=said.modified_at_ns,
        target=_named(said.target, said.target_b64),
    )


def _named(text: str | None, digits: str | None) -> str | None:
    """Return a name with its bytes, if it is not UTF-8 (PEP 383)."""
    if digits is None:
        return text
    try:
        return base64.b64decode(digits, validate=True).decode(errors="surrogateescape")
    except ValueError as error:
        raise EngineError("an agent said a name in what is not base64") from error
