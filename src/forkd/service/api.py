"""What a front end may ask of a forkd host.

One `Protocol`, so that the daemon and its tests share the seam: the real
one is `forkd.service.host_service.HostService`.  Every method may raise
`InvalidRequest` for a malformed field, `NotFound` for an unknown sandbox or
snapshot, and `EngineTimeout` or `EngineExited` if the machine stopped
answering; the docstrings name what else.  Methods that return iterators do
nothing until they are iterated, and undo what is half-done when they are closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
    from pathlib import Path
    from types import TracebackType

    from forkd.model.exec import EvalResult, ExecEvent, ExecRequest, TtySize
    from forkd.model.files import FileEntry
    from forkd.model.guest import GuestStatus
    from forkd.model.host import HostInfo
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.image import Image
    from forkd.model.progress import Progress
    from forkd.model.sandbox import ForkOptions, ForkResult, Sandbox
    from forkd.model.snapshot import Snapshot, SnapshotRequest


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


class ImageService(Protocol):
    """Images."""

    def build_image(self, recipe_path: Path) -> AsyncGenerator[Progress | Image, None]:
        """Build the image of a recipe, unless it is built already; the last event is the image.

        Raises:
            BuildError: It could not be built.
        """
        ...


class SnapshotService(Protocol):
    """Snapshots."""

    def create_snapshot(
        self, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot; the last event is the ready `Snapshot`.

        Closing the iterator before that ends the bake and removes what it made.

        Raises:
            Conflict: A snapshot of that tag exists, or is being baked.
            BuildError: The image or the warm-up failed.
        """
        ...

    async def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written included."""
        ...

    async def get_snapshot(self, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        ...

    async def delete_snapshot(self, tag: Tag) -> None:
        """Remove a snapshot and its files.

        Raises:
            Conflict: Sandboxes or snapshots need it (the message names them), or it
                is being written.
        """
        ...


class SandboxService(Protocol):
    """Sandboxes, from fork to delete."""

    async def fork(self, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork `count` sandboxes; each is reported as ready or as failed.

        Raises:
            Conflict: The snapshot is not ready.
            CapacityError: The host has no room for so many.
            EngineError: With `all_or_nothing`, a child failed; nothing remains.
        """
        ...

    async def list_sandboxes(self, tag: Tag | None = None) -> tuple[Sandbox, ...]:
        """Return every sandbox, oldest first; only those forked from `tag` if it is given."""
        ...

    async def get_sandbox(self, sandbox: SandboxId) -> Sandbox:
        """Return one sandbox."""
        ...

    async def delete_sandbox(self, sandbox: SandboxId) -> None:
        """End a sandbox and remove everything that was its own."""
        ...

    async def console_log(self, sandbox: SandboxId) -> bytes:
        """Return the end of what the guest wrote to its console, at most 1 MiB."""
        ...

    def follow_console_log(self, sandbox: SandboxId) -> AsyncGenerator[bytes, None]:
        """Yield the console log so far, then what is added, until the sandbox ends."""
        ...


class GuestService(Protocol):
    """What happens inside a sandbox.

    Raises, from each method: `GuestError` if the agent refused (`context["guest_code"]`),
    or the narrower `NotFound` and `Conflict` for files that are missing or in the
    way; `Conflict` if the sandbox does not run.
    """

    async def ping(self, sandbox: SandboxId) -> GuestStatus:
        """Ask the agent how it is."""
        ...

    async def echo(self, sandbox: SandboxId, data: str) -> str:
        """Let the agent return `data`, and do nothing else: measures the way there and back."""
        ...

    async def exec(self, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        """Start a command; returns once the agent has accepted it.

        A program that does not exist is an error here (`guest_code` `exec_failed`
        or `not_found`), not an exit code.
        """
        ...

    async def eval(
        self, sandbox: SandboxId, code: str, *, timeout_s: float | None = None
    ) -> EvalResult:
        """Run `code` in the warm runtime; its exceptions are data in the result."""
        ...

    async def read_file(
        self, sandbox: SandboxId, path: str, *, offset: int = 0, length: int | None = None
    ) -> FileReader:
        """Open a file for reading; its bytes come as the caller iterates."""
        ...

    async def write_file(
        self,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
    ) -> int:
        """Write a file, whole or not at all; returns its length in bytes."""
        ...

    async def stat(self, sandbox: SandboxId, path: str) -> FileEntry:
        """Return one entry; symbolic links are not followed."""
        ...

    async def list_dir(self, sandbox: SandboxId, path: str) -> tuple[FileEntry, ...]:
        """Return a directory's entries, by name."""
        ...

    async def make_dir(
        self, sandbox: SandboxId, path: str, *, parents: bool = False, mode: int | None = None
    ) -> None:
        """Make a directory; with `parents` also those above it, and one that exists is fine."""
        ...

    async def move(self, sandbox: SandboxId, source: str, target: str) -> None:
        """Rename `source` to `target`."""
        ...

    async def remove(self, sandbox: SandboxId, path: str, *, recursive: bool = False) -> None:
        """Remove a file, or an empty directory, or with `recursive` a whole one."""
        ...


class Service(ImageService, SnapshotService, SandboxService, GuestService, Protocol):
    """Everything a front end may ask; the daemon owns one from its start to its end."""

    async def start(self) -> None:
        """Adopt what runs, reap what is dead or half-made, and begin to serve."""
        ...

    async def stop(self) -> None:
        """Let go of everything; sandboxes live on, bakes in progress are undone."""
        ...

    async def host_info(self) -> HostInfo:
        """Say what this host is and how full it is."""
        ...
