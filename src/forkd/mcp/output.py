"""The output of a program, of which an answer has the head and the tail.

What is longer goes to a file in the sandbox while it comes, so that neither this process nor the
client ever holds all of it, and `read_file` can read the rest.
"""

from __future__ import annotations

import asyncio
import codecs
import secrets
import time
from typing import TYPE_CHECKING, Self

from forkd.errors import ForkdError
from forkd.limits import MCP_OUTPUT_BYTES_MAX, MCP_OUTPUT_FILE_BYTES_MAX, MCP_OUTPUT_FILES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from forkd.sdk import AsyncFiles

FOLDER = "/tmp/forkd-output"  # noqa: S108 - in the guest
"""Where the outputs of programs are kept, in the sandbox."""

END_BYTES = MCP_OUTPUT_BYTES_MAX // 2
"""How much of the head, and of the tail, an answer has."""

WAITING_PIECES_MAX = 16
"""Most pieces that wait to be written; the program waits, if there are more."""

PATIENCE_S = 10.0
"""How long the program waits for the file; one that takes nothing for longer is given up.  The
daemon gives a program up whose output nobody reads for a minute."""

FINISH_S = 60.0
"""How long the file's end may take, once it has every piece."""


class Output:
    """One output of a program.

    As a context manager it writes what is too long to a file, and has written it at the end.

    Args:
        files: The sandbox's.
        stream: What the output is called.
        patience_s: As `PATIENCE_S`.

    Attributes:
        size: How many bytes there were.
        file: Where all of it is in the sandbox; None if the answer has it, or it was not kept.
        lost: Why it was not kept, if it was to be.
    """

    def __init__(self, files: AsyncFiles, stream: str, *, patience_s: float = PATIENCE_S) -> None:
        self._files = files
        self._patience_s = patience_s
        self._path = f"{FOLDER}/{time.time_ns():020}-{secrets.token_hex(4)}.{stream}"
        self._head = bytearray()
        self._tail = bytearray()
        self._kept = 0
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_PIECES_MAX)
        self._writer: asyncio.Task[None] | None = None
        self._ended = False
        self.size = 0
        self.file: str | None = None
        self.lost: str | None = None

    async def take(self, data: bytes) -> None:
        """Take the next piece."""
        self.size += len(data)
        room = END_BYTES - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if self._writer is None and self.size > MCP_OUTPUT_BYTES_MAX:
            self._writer = asyncio.create_task(self._write())
            data = bytes(self._head + self._tail)
        if self._writer is not None:
            await self._keep(data)
            del self._tail[:-END_BYTES]

    async def _keep(self, data: bytes) -> None:
        room = MCP_OUTPUT_FILE_BYTES_MAX - self._kept
        if len(data) > room:
            self.lost = f"only its first {MCP_OUTPUT_FILE_BYTES_MAX} bytes are kept"
        if room > 0 and not self._ended:
            self._kept += len(data[:room])
            await self._pass_on(data[:room])

    async def _pass_on(self, piece: bytes | None) -> None:
        """Give the file its next piece; None is the end."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._pieces.put(piece)
        except TimeoutError:
            self.lost = f"the sandbox took nothing of it for {self._patience_s:g} s"
            await self._give_up()

    async def _give_up(self) -> None:
        self._ended = True
        if self._writer is not None and not self._writer.done():
            self.lost = self.lost or "the sandbox did not take it in time"
            self._writer.cancel()
            await asyncio.wait([self._writer])

    async def _write(self) -> None:
        """Write the file; where that fails go on without it, so that the program goes on."""
        try:
            await self._files.make_dir(FOLDER, parents=True)
            await self._files.write(self._path, self._waiting(), mode=0o600)
            self.file = self._path
        except ForkdError as error:
            self.lost = str(error)
            self._ended = True
            while not self._pieces.empty():
                self._pieces.get_nowait()  # so that what waits for room goes on

    async def _waiting(self) -> AsyncIterator[bytes]:
        """Yield the pieces that wait, until there will be no more."""
        while not self._ended:
            piece = await self._pieces.get()
            if piece is None:
                self._ended = True
            else:
                yield piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is None:
            return
        if exc_type is not None:
            await self._give_up()
        elif not self._ended:
            await self._pass_on(None)
            await asyncio.wait([self._writer], timeout=FINISH_S)
            await self._give_up()
        if self.file is not None:
            await forget_old(self._files)

    def text(self) -> str:
        """Return the output, or its head, a line about what is left out, and its tail."""
        if self._writer is None:
            return (self._head + self._tail).decode(errors="replace")
        head, tail = whole_head(bytes(self._head)), whole_tail(bytes(self._tail))
        hidden = self.size - len(head) - len(tail)
        where = "it was not kept" if self.file is None else f"read_file {self.file} has it"
        if self.lost is not None:
            where += f": {self.lost}"
        left_out = f"\n[... {hidden} of {self.size} bytes are left out; {where} ...]\n"
        return head.decode(errors="replace") + left_out + tail.decode(errors="replace")


async def forget_old(files: AsyncFiles) -> None:
    """Remove the oldest kept outputs of a sandbox, so that they do not fill its disk."""
    try:
        kept = sorted(each.name for each in await files.list(FOLDER))
        for name in kept[:-MCP_OUTPUT_FILES_MAX]:
            await files.remove(f"{FOLDER}/{name}")
    except ForkdError:
        return  # others remove them, too, or the sandbox has ended


def whole_head(data: bytes) -> bytes:
    """Return the beginning of `data` that ends with a whole character, if it is UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    pending = len(decoder.getstate()[0])
    return data[: len(data) - pending]


def whole_tail(data: bytes) -> bytes:
    """Return the end of `data` that begins with a whole character, if it is UTF-8."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:  # noqa: PLR2004 - UTF-8's
        start += 1
    return data[start:]
