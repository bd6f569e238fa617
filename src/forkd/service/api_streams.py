"""What a front end is given that goes on: a command that runs, a file that is read.

The rules are those of `forkd.service.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from forkd.model.exec import ExecEvent, TtySize


class ExecSession(Protocol):
    """A command that runs in a guest; an async context manager and an iterator of its events."""

    def __aiter__(self) -> AsyncIterator[ExecEvent]:
        """Return the events: `Started`, output as it comes, `Exited` as the last."""
        ...

    async def write_stdin(self, data: bytes) -> None:
        """Hand `data` to the command; returns when the guest has room for more.

        Raises:
            Conflict: The request did not ask for `stdin`, or it is closed.
        """
        ...

    async def close_stdin(self) -> None:
        """Let the command see the end of its input; idempotent."""
        ...

    async def send_signal(self, signal: int) -> None:
        """Send `signal` to the command's process group."""
        ...

    async def resize(self, size: TtySize) -> None:
        """Tell the command that its terminal has another size.

        Raises:
            Conflict: It has no terminal.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the command; the guest kills it if it still runs.  Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class FileReader(Protocol):
    """A file of a guest being read: an async context manager and an iterator of its bytes."""

    @property
    def size_bytes(self) -> int:
        """Length of the whole file when it was opened."""
        ...

    @property
    def mode(self) -> int:
        """Permission bits of the file."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None:
        """Stop reading.  Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
