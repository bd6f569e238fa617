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

    from forkd.model.diff import Difference
    from forkd.model.exec import EvalResult, ExecEvent, ExecRequest, TtySize
    from forkd.model.files import FileEntry
    from forkd.model.guest import GuestStatus
    from forkd.model.host import HostInfo
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.image import Image
    from forkd.model.pack import Unpacked, UnpackRequest
    from forkd.model.progress import Progress
    from forkd.model.sandbox import (
        BranchOptions,
        BranchResult,
        ForkOptions,
        ForkResult,
        Promotion,
        Sandbox,
    )
    from forkd.model.snapshot import LinkRequest, Removed, Snapshot, SnapshotRequest
    from forkd.model.tree import TreeBudgets, TreeNode


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

    async def snapshot_sandbox(self, sandbox: SandboxId, tag: Tag, *, wait: bool) -> Snapshot:
        """Write a running sandbox down as a link over the snapshot that it goes back to.

        The sandbox stands still for some milliseconds and goes on; the link is written to its
        end even if the caller goes away.

        Args:
            sandbox: Which one.
            tag: Name of the snapshot.
            wait: Whether to return when it is ready, or as soon as the sandbox goes on; then
                a failure later on is the snapshot's `error`.

        Raises:
            Conflict: The tag is taken, the chain is as long as it may be, or the sandbox does
                not run.
            CapacityError: The disk is full; nothing was left on it.
        """
        ...

    def link_snapshot(self, request: LinkRequest) -> AsyncGenerator[Progress | Snapshot, None]:
        """Take a snapshot of a sandbox, or of a fork in which a command has run; the last event.

        The fork is ended either way; closing the iterator before the snapshot ends the command
        and leaves nothing.

        Raises:
            BuildError: The command failed; the end of what it printed is in the message.
            Conflict: As `snapshot_sandbox`.
            CapacityError: As `snapshot_sandbox`.
        """
        ...

    async def list_snapshots(self) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written and those that failed included."""
        ...

    async def get_snapshot(self, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        ...

    async def delete_snapshot(
        self, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        """Remove a snapshot and its files.

        Args:
            tag: Which one.
            cascade: Remove all that stand on it as well; nothing if one of them is in use.
            force: Remove it from under those that stand on it, which are lost; refused while
                one of them is in use.

        Raises:
            Conflict: Sandboxes or snapshots need it (the message names them), or it
                is being written.
            InvalidRequest: `cascade` and `force` were both asked for.
        """
        ...

    async def compact_snapshot(self, tag: Tag, to: Tag | None = None) -> Snapshot:
        """Write a snapshot so that it needs no other, in its place or under the name `to`.

        What stands on it stays as it is.  A crash leaves the old one or the new one.

        Raises:
            Conflict: It is not ready, `to` is taken, or, in its place, it or what stands on it
                is in use.
            CapacityError: The disk is full; nothing was changed.
        """
        ...

    async def tidy_snapshots(self, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what nobody can use any more; with `dry_run` only say what that is.

        That is what crashes left, records of snapshots that failed, snapshots whose chain lacks
        a link, and images under no snapshot.
        """
        ...


class PackService(Protocol):
    """Snapshots out of the store, and into it, as one stream of bytes with all they stand on."""

    def pack_snapshot(self, tag: Tag) -> AsyncGenerator[bytes, None]:
        """Yield an unsigned pack of a snapshot.

        Raises:
            Conflict: It is being written.
            StoreError: Something of it is missing or damaged.
        """
        ...

    async def unpack_snapshot(
        self, request: UnpackRequest, pieces: AsyncIterable[bytes]
    ) -> Unpacked:
        """Take a pack into the store; nothing is left of one that is refused.

        Raises:
            PackError: It is damaged, hostile, unsigned or not trusted.
            Conflict: Another snapshot has the name.
            CapacityError: There is no room for it.
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


class TreeService(Protocol):
    """Running sandboxes and what is branched from them."""

    async def branch(
        self,
        sandbox: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        tag: Tag | None = None,
        wait: bool = True,
    ) -> BranchResult:
        """Branch a running sandbox into `count` siblings, all of one instant.

        The sandbox stands still for some milliseconds and goes on; its siblings have what it
        had at that instant, and an identity of their own.

        Args:
            sandbox: Which one.
            count: How many siblings; 0 only with `tag`.
            options: How they are made.
            tag: Write that instant down as a snapshot of this name, too.
            wait: Whether to return when the snapshot is ready, or while it is being written.

        Raises:
            Conflict: The sandbox does not run; also as `snapshot_sandbox`.
            BudgetError: Its tree may not grow so much.
            CapacityError: The host has no room for so many, or the disk is full.
            EngineError: With `all_or_nothing`, a sibling failed; none remains.
        """
        ...

    async def reset(self, sandbox: SandboxId, *, deadline_s: float) -> float:
        """Take a sandbox back to its fork point in place; return how long, in milliseconds.

        It keeps its id and its address; connections to it and what runs in it end.

        Raises:
            Conflict: The sandbox does not run, or the seed of its branch was killed.
            EngineError: The agent did not answer in time, or the machine ended; so has it.
        """
        ...

    async def promote(self, sandbox: SandboxId) -> Promotion:
        """Let a sandbox take its parent's id, name, address and place.

        The parent ends, and all that was branched from it but the sandbox and its own.  A
        crash leaves this done or undone.

        Raises:
            Conflict: It has no parent, that is gone, it does not run, or its tree is changing.
        """
        ...

    async def diff(self, before: SandboxId | Tag, after: SandboxId | Tag) -> Difference:
        """Say how the files of one machine differ from another's, and how far memory does.

        Each is a running sandbox, or a snapshot.  A copy of each is made for as long as that takes,
        and their disks are compared; what is mounted over the root file system is not on them.

        Raises:
            Conflict: They have no common ancestor, or one does not run.
            BudgetError: The tree of one has no room for its copy.
            GuestError: The file system of one cannot be compared: it is damaged, of another kind,
                or has more files than a comparison looks at.
            CapacityError: The host has no room for what they have written.
        """
        ...

    async def tree(self, member: SandboxId | None = None) -> tuple[TreeNode, ...]:
        """Return every tree, or the one that a sandbox is, or was, in."""
        ...

    async def tree_budgets(self) -> TreeBudgets:
        """Return how far a tree may grow."""
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


class Service(
    ImageService,
    SnapshotService,
    PackService,
    SandboxService,
    TreeService,
    GuestService,
    Protocol,
):
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
