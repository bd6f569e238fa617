"""What a front end is given that goes on: a command that runs, a file that is read, a connection.

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


class PortSession(Protocol):
    """A connection to a program in a guest: an async context manager and an iterator of bytes."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """Return what the program sends, `b""` when it has ended that; ends when both have."""
        ...

    async def send(self, data: bytes) -> None:
        """Send bytes to the program; returns when the guest has room for more.

        Raises:
            Conflict: After `send_end`.
        """
        ...

    async def send_end(self) -> None:
        """Let the program see the end of what is sent; idempotent."""
        ...

    async def aclose(self) -> None:
        """Let go; a connection that has not ended is reset.  Idempotent."""
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
