"""What a front end may ask of a forkd host, one protocol for each component of `Host`.

A route names the component that it asks, so that a fake of that one is enough to test it; the real
ones are those of `forkd.service.host.Host`.

The first argument of each operation is who asks.  Every method may raise `Forbidden` if the caller
lacks the scope that its docstring names, `InvalidRequest` for a malformed field, `NotFound` for a
sandbox or snapshot that does not exist for this caller, and `EngineTimeout` or `EngineExited` if
the machine stopped answering; the docstrings name what else.  Methods that return iterators do
nothing until they are iterated, and undo what is half-done when they are closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from forkd.model.filters import EVERY_SANDBOX

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, Mapping

    from forkd.model.caller import Caller
    from forkd.model.exec import EvalResult, ExecRequest, OnOutput
    from forkd.model.files import ArchiveResult, FileEntry
    from forkd.model.filters import SandboxFilter
    from forkd.model.guest import GuestStatus
    from forkd.model.ids import SandboxId, SandboxName, Tag
    from forkd.model.output import Kept
    from forkd.model.pack import Unpacked, UnpackRequest
    from forkd.model.progress import Progress
    from forkd.model.sandbox import (
        BranchOptions,
        BranchResult,
        ForkOptions,
        ForkResult,
        NewLimits,
        Sandbox,
        SandboxChange,
    )
    from forkd.model.snapshot import LinkRequest, Removed, Snapshot, SnapshotRequest
    from forkd.service.answers import Answers
    from forkd.service.api_images import BuildLinks, ImageCache, Images, ImageSnapshots, Recipes
    from forkd.service.api_streams import ExecSession, FileReader, PortSession
    from forkd.service.api_team import Figures, Journal, Networks, System, Tenants, Tokens, Usages
    from forkd.service.api_trees import Comparisons, Promotions, Trees


class Snapshots(Protocol):
    """Snapshots.  Scope `snapshots` to change them, `read` to look."""

    def bake(
        self, caller: Caller, request: SnapshotRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Bake a snapshot; the last event is the ready `Snapshot`.

        Closing the iterator before that ends the bake and removes what it made.

        Raises:
            NotFound: There is no such recipe.
            Conflict: A snapshot of that tag exists, or is being baked.
            BuildError: The image or the warm-up failed.
            CapacityError: Too many snapshots exist, too many are baked, or the disk is full.
        """
        ...

    async def list(self, caller: Caller) -> tuple[Snapshot, ...]:
        """Return every snapshot, by tag, those being written and those that failed included."""
        ...

    async def get(self, caller: Caller, tag: Tag) -> Snapshot:
        """Return one snapshot."""
        ...

    async def share(self, caller: Caller, tag: Tag, *, shared: bool) -> Snapshot:
        """Let every tenant use a snapshot, or only its own again.  Scope `snapshots`.

        Sandboxes that others have forked from it live on.

        Raises:
            Forbidden: It is another tenant's.
            StoreError: It could not be written down.
        """
        ...

    async def delete(
        self, caller: Caller, tag: Tag, *, cascade: bool = False, force: bool = False
    ) -> None:
        """Remove a snapshot and its files.

        Args:
            caller: Who asks.
            tag: Which one.
            cascade: Remove all that depend on it as well; nothing if one of them is in use.
            force: Remove it even if others depend on it, which become unusable; refused while
                one of them is in use.

        Raises:
            Conflict: Sandboxes or snapshots need it (the message names them), or it
                is being written.
            InvalidRequest: `cascade` and `force` were both asked for.
        """
        ...

    async def tidy(self, caller: Caller, *, dry_run: bool = False) -> tuple[Removed, ...]:
        """Remove what is unused; with `dry_run` only say what that is.

        That is what crashes left, records of snapshots that failed, snapshots whose chain lacks
        a link, images that no snapshot needs, and uploaded recipes that no build has used for
        long.  Scope `admin`.
        """
        ...


class Chains(Protocol):
    """Snapshots that depend on others.  Scope `snapshots`."""

    def extend(
        self, caller: Caller, request: LinkRequest
    ) -> AsyncGenerator[Progress | Snapshot, None]:
        """Take a snapshot of a sandbox, or of a fork in which a command has run; the last event.

        A sandbox is paused for some milliseconds and goes on; the link is written to its end even
        if the caller goes away.  A fork is ended either way; closing the iterator before the
        snapshot ends the command and leaves nothing.

        Raises:
            BuildError: The command failed; the end of what it printed is in the message.
            Conflict: The tag is taken, the chain is as long as it may be, or the sandbox does
                not run.
            CapacityError: The disk is full; nothing was left on it.
        """
        ...

    async def compact(self, caller: Caller, tag: Tag, to: Tag | None = None) -> Snapshot:
        """Write a snapshot so that it needs no other, in its place or under the name `to`.

        What depends on it stays as it is.  A crash leaves the old one or the new one.

        Raises:
            Conflict: It is not ready, `to` is taken, or, in its place, it or what depends on it
                is in use.
            CapacityError: The disk is full; nothing was changed.
        """
        ...


class Packs(Protocol):
    """Snapshots out of the store, and into it, with all their ancestors.  Scope `snapshots`."""

    def pack(self, caller: Caller, tag: Tag) -> AsyncGenerator[bytes, None]:
        """Yield an unsigned pack of a snapshot.

        Raises:
            Conflict: It is being written.
            StoreError: Something of it is missing or damaged.
        """
        ...

    async def unpack(
        self, caller: Caller, request: UnpackRequest, pieces: AsyncIterable[bytes]
    ) -> Unpacked:
        """Take a pack into the store; nothing is left of one that is refused.

        Raises:
            PackError: It is damaged, hostile, unsigned or not trusted.
            Conflict: Another snapshot has the name.
            CapacityError: There is no room for it, or too many packs are read or written.
        """
        ...


class Sandboxes(Protocol):
    """Sandboxes, from fork to delete.  Scope `run` to change them, `read` to look."""

    async def fork(self, caller: Caller, tag: Tag, count: int, options: ForkOptions) -> ForkResult:
        """Fork `count` sandboxes; each is reported as ready or as failed.

        If the caller goes away, those that were made are deleted.

        Raises:
            Conflict: The snapshot is not ready, or another sandbox of the tenant has the name.
            CapacityError: The host has no room for so many.
            EngineError: With `all_or_nothing`, a child failed; nothing remains.
        """
        ...

    async def list(
        self, caller: Caller, wanted: SandboxFilter = EVERY_SANDBOX
    ) -> tuple[Sandbox, ...]:
        """Return every sandbox that is wanted, oldest first."""
        ...

    async def get(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Return one sandbox."""
        ...

    async def find(self, caller: Caller, start: str) -> Sandbox:
        """Return the one sandbox of the name `start`, or whose id begins so, also without `sb-`.

        Raises:
            InvalidRequest: Several ids begin so; the message names some.
        """
        ...

    async def named(self, caller: Caller, ref: SandboxId | SandboxName) -> SandboxId:
        """Return the id of the sandbox that the caller's tenant has so named.

        An id is returned as it is, whether there is such a sandbox or not.  Of two sandboxes of one
        name that which has not ended is found.
        """
        ...

    async def change(self, caller: Caller, sandbox: SandboxId, change: SandboxChange) -> Sandbox:
        """Change a sandbox's name, labels or time to live; return it as it is then.

        Raises:
            Conflict: It has ended, or another sandbox of its tenant has the name.
        """
        ...

    async def pause(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Stop a sandbox's vCPUs and keep its memory; return it as it is then; idempotent.

        Its time to live goes on.  What needs its guest, a branch, a reset or a promotion is a
        `Conflict` until it is resumed.

        Raises:
            Conflict: It does not run, or is still being promoted.
        """
        ...

    async def resume(self, caller: Caller, sandbox: SandboxId) -> Sandbox:
        """Have a paused sandbox go on, with its clock right; return it as it is then; idempotent.

        Raises:
            Conflict: It has ended.
        """
        ...

    async def delete(self, caller: Caller, sandbox: SandboxId) -> None:
        """End a sandbox and remove everything that was its own."""
        ...

    async def reset(self, caller: Caller, sandbox: SandboxId, *, deadline_s: float) -> float:
        """Take a sandbox back to its fork point in place; return how long, in milliseconds.

        It keeps its id and its address; connections to it and what runs in it end.

        Raises:
            Conflict: The sandbox does not run, or the seed of its branch was ended; it goes on.
            EngineError: The agent did not answer in time, or the machine ended; so has it.
        """
        ...

    async def set_limits(self, caller: Caller, sandbox: SandboxId, limits: NewLimits) -> Sandbox:
        """Change what a running sandbox may take of the host; return it as it is then.

        Raises:
            Conflict: It does not run, has no cgroup, has no network whose bandwidth could be
                limited, or has more memory in use than that.
            HostError: This host cannot limit disk I/O.
            QuotaExceeded: Its tenant may not have so much.
        """
        ...

    async def console_log(self, caller: Caller, sandbox: SandboxId) -> bytes:
        """Return the end of what the guest wrote to its console, at most 1 MiB."""
        ...

    def follow_console_log(self, caller: Caller, sandbox: SandboxId) -> AsyncGenerator[bytes, None]:
        """Yield the console log so far, then what is added, until the sandbox ends.

        Raises:
            CapacityError: Too many consoles are followed.
        """
        ...


class Branches(Protocol):
    """What is branched from running sandboxes.  Scope `run`, and `snapshots` for a tag."""

    async def branch(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        count: int,
        options: BranchOptions,
        *,
        tag: Tag | None = None,
        wait: bool = True,
    ) -> BranchResult:
        """Branch a running sandbox into `count` siblings, all of one instant.

        The sandbox is paused for some milliseconds and goes on; its siblings have what it
        had at that instant, and an identity of their own.  If the caller goes away, they are
        deleted.

        Args:
            caller: Who asks.
            sandbox: Which one.
            count: How many siblings; 0 only with `tag`.
            options: How they are made.
            tag: Write that instant down as a snapshot of this name, too.
            wait: Whether to return when the snapshot is ready, or while it is being written;
                then a failure later on is the snapshot's `error`.

        Raises:
            Conflict: The sandbox does not run, the tag is taken, or the chain is as long as it
                may be.
            BudgetError: Its tree may not grow so much.
            CapacityError: The host has no room for so many, or the disk is full.
            EngineError: With `all_or_nothing`, a sibling failed; none remains.
        """
        ...


class Guests(Protocol):
    """What happens inside a sandbox.

    Scope `run`, but for `ping`: `read`.

    Raises, from each method: `GuestError` if the agent refused (`context["guest_code"]`),
    or the narrower `NotFound` and `Conflict` for files that are missing or in the
    way; `Conflict` if the sandbox does not run; from `exec` and `eval` `CapacityError` if there
    are too many at once, its subclass `Busy` if there are in this sandbox.
    """

    async def ping(self, caller: Caller, sandbox: SandboxId) -> GuestStatus:
        """Return the state of the agent."""
        ...

    async def echo(self, caller: Caller, sandbox: SandboxId, data: str) -> str:
        """Have the agent return `data`, and do nothing else: measures the round trip."""
        ...

    async def exec(self, caller: Caller, sandbox: SandboxId, request: ExecRequest) -> ExecSession:
        """Start a command; returns once the agent has accepted it.

        Raises:
            NotFound: There is no such program; `context["program"]` names it.
            InvalidRequest: There is no such user or folder.
            GuestError: The program cannot be executed.
        """
        ...

    async def eval(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        code: str,
        *,
        timeout_s: float | None = None,
        kept: tuple[Kept, Kept] | None = None,
        runtime: str | None = None,
        context: str | None = None,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> EvalResult:
        """Run `code` in the warm runtime; its exceptions are data in the result.

        `kept` takes stdout and stderr if given, so that they can be counted.  `on_output` is
        called with each piece of them as it comes, and the result has none then.

        Raises:
            Conflict: There is no runtime, or none that is called `runtime`, or it knows no
                contexts, or no variables for one evaluation.
        """
        ...

    async def connect(self, caller: Caller, sandbox: SandboxId, port: int) -> PortSession:
        """Connect to the program that listens on a TCP port of the guest's loopback address.

        Raises:
            Conflict: Nothing listens there, or the guest's agent is too old to connect.
            CapacityError: There are too many such connections; `Busy`: in this sandbox.
        """
        ...

    async def read_file(
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
    ) -> FileReader:
        """Open a file for reading; its bytes come as the caller iterates."""
        ...

    async def write_file(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a file, whole or not at all; returns its length in bytes.

        A new file, and each directory made on the way, belongs to `user` (a name or
        `uid[:gid]`), else to the image's user.  A file that exists keeps its owner.
        """
        ...

    async def read_archive(self, caller: Caller, sandbox: SandboxId, path: str) -> FileReader:
        """Open a file or a directory for reading as a tar archive.

        Raises:
            Conflict: The agent is too old for archives.
        """
        ...

    async def write_archive(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        chunks: AsyncIterable[bytes],
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> ArchiveResult:
        """Make a tree below the directory `path` of a tar archive.

        A member that cannot be made is left out and stops no other one.  Everything belongs to
        `user` as for `write_file`, or with `keep_owner` to whom the archive says.

        Raises:
            InvalidRequest: It is no tar archive; what was made before stays.
            Conflict: The agent is too old for archives.
        """
        ...

    async def stat(self, caller: Caller, sandbox: SandboxId, path: str) -> FileEntry:
        """Return one entry; symbolic links are not followed."""
        ...

    async def list_dir(
        self, caller: Caller, sandbox: SandboxId, path: str
    ) -> tuple[FileEntry, ...]:
        """Return a directory's entries, by name."""
        ...

    async def make_dir(  # noqa: PLR0913 - what a caller may ask
        self,
        caller: Caller,
        sandbox: SandboxId,
        path: str,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        """Make a directory; with `parents` also those above it, and one that exists is fine.

        What is made belongs to `user`, as for `write_file`.
        """
        ...

    async def move(self, caller: Caller, sandbox: SandboxId, source: str, target: str) -> None:
        """Rename `source` to `target`."""
        ...

    async def remove(
        self, caller: Caller, sandbox: SandboxId, path: str, *, recursive: bool = False
    ) -> None:
        """Remove a file, or an empty directory, or with `recursive` a whole one."""
        ...


class Host(Protocol):
    """Every component of a host."""

    @property
    def recipes(self) -> Recipes:
        """See `Recipes`."""
        ...

    @property
    def images(self) -> Images:
        """See `Images`."""
        ...

    @property
    def image_cache(self) -> ImageCache:
        """The images that were built."""
        ...

    @property
    def image_snapshots(self) -> ImageSnapshots:
        """Snapshots of images."""
        ...

    @property
    def build_links(self) -> BuildLinks:
        """Results of steps of builds."""
        ...

    @property
    def snapshots(self) -> Snapshots:
        """See `Snapshots`."""
        ...

    @property
    def chains(self) -> Chains:
        """See `Chains`."""
        ...

    @property
    def packs(self) -> Packs:
        """See `Packs`."""
        ...

    @property
    def sandboxes(self) -> Sandboxes:
        """See `Sandboxes`."""
        ...

    @property
    def branches(self) -> Branches:
        """See `Branches`."""
        ...

    @property
    def promotions(self) -> Promotions:
        """See `Promotions`."""
        ...

    @property
    def comparisons(self) -> Comparisons:
        """See `Comparisons`."""
        ...

    @property
    def trees(self) -> Trees:
        """See `Trees`."""
        ...

    @property
    def guests(self) -> Guests:
        """See `Guests`."""
        ...

    @property
    def system(self) -> System:
        """See `System`."""
        ...

    @property
    def tokens(self) -> Tokens:
        """Its tokens."""
        ...

    @property
    def tenants(self) -> Tenants:
        """Its tenants."""
        ...

    @property
    def journal(self) -> Journal:
        """What happens on it."""
        ...

    @property
    def figures(self) -> Figures:
        """What it does, in figures."""
        ...

    @property
    def networks(self) -> Networks:
        """What sandboxes may reach."""
        ...

    @property
    def answers(self) -> Answers:
        """Its answers to requests with a key."""
        ...

    @property
    def usage(self) -> Usages:
        """What its sandboxes use."""
        ...
