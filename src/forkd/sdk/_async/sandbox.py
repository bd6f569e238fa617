"""A sandbox: fork it, branch it, run programs and code in it, read and write its files, end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self, TypeVar, overload

from pydantic import TypeAdapter

from forkd.errors import EngineError, ForkdError, InvalidRequest
from forkd.sdk import _requests
from forkd.sdk._async.connection import http_of
from forkd.sdk._async.files import AsyncFiles
from forkd.sdk._async.life import find_sandbox, sandbox_table
from forkd.sdk._async.network import AsyncNetwork
from forkd.sdk._async.place import AsyncPlace
from forkd.sdk._async.programs import AsyncCommands
from forkd.sdk._async.recipes import snapshot_of
from forkd.sdk._notebook import Shown
from forkd.sdk._parallel import async_map
from forkd.sdk._requests import either, explicit
from forkd.sdk._results import Branch
from forkd.wire.v2 import SandboxCreate, SandboxFailure, SandboxInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from os import PathLike
    from types import TracebackType

    from forkd.sdk._async.connection import AsyncConnection
    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._image import Image
    from forkd.sdk._requests import BranchOptions, NamedForkOptions
    from forkd.sdk._results import EvalResult, ExecResult
    from forkd.wire.v2 import ProgressEvent
    from forkd.wire.v2_trees import BranchInfo

R = TypeVar("R")

FORK_SECS_PER_CHILD = 1.0
"""Time a fork may take for each of its children; a host without hardware help needs much of it."""

FORK_MARGIN_S = 60.0
"""Time the daemon has beyond a child's own deadline, to clean up after those that failed."""

PARALLEL_MAX = 32
"""Sandboxes of one `Sandboxes` that are asked at the same time, unless a call says otherwise."""

_OUTCOMES = TypeAdapter(list[SandboxInfo | SandboxFailure])


class AsyncSandbox(AsyncPlace):
    """One sandbox, forked from a snapshot.  As a context manager it is killed at the end.

        async with AsyncSandbox("numpy") as sandbox:
            print(await sandbox.run("ls | wc -l"))

    It has five minutes to live, unless `ttl_s` says otherwise.

    Args:
        tag: The snapshot to fork; without one, `FORKD_TAG`, else `pyagent`.
        target: With `spawn` false, the sandbox to use: its id, its name or its address; without
            one, `FORKD_TARGET`.  This is the reference's; new code calls `connect`.
        timeout: Time limit of an `eval` that names none, in seconds; None for none.
        spawn: Whether to fork one.
        image: Instead of a tag: an `Image`; an image of a registry, such as `python:3.12-slim`; the
            path of an OCI layout or a `docker save` archive on this host; or a recipe.  Its
            snapshot is made the first time, and kept for as long as the daemon has room.
        on_progress: Called with each step, if the image's snapshot has to be made.
        name: What it can be found by, beside its id; no other live one may have it.
        memory_limit_mib: Memory of the sandbox and its VMM, in MiB; no swap.
        disk_limit_mib: Its private disk layer, in MiB; None for the host's limit.
        cpu_limit: CPU time, in cores.
        cpu_weight: Share of CPU time beside other sandboxes; 100 if None.
        pids_limit: Threads of its process on the host, not of its guest.
        io_limit_mib_s: Disk bandwidth, each way, in MiB a second.
        io_limit_ops: Disk operations, each way, in a second.
        bandwidth_limit_mbit: Network bandwidth, each way, in millions of bits a second.
        network: What it may reach: "none", "internet", "host", "deny-all", or rules such as
            `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; True for "host".
        hold_egress: Whether it may reach nothing until that is changed.
        secrets: Names of secrets that it may use; the host puts them into its requests.
        env: Variables that every program in it gets, below the program's own.
        labels: Names and values by which it can be found.
        ttl_s: It is ended after this time, in seconds; None: it lives until it is killed;
            "default": after the daemon's default, five minutes unless it was set.
        idle_ttl_s: It is ended once nobody has used it for so many seconds; None: never.
        deadline_s: Time it has until its agent has answered, in seconds.
        wait: Wait for a snapshot that is being written, instead of raising `Conflict`.
        client: The client whose daemon is asked; None for the daemon that `Client()` finds.

    Attributes:
        info: The sandbox as the daemon last described it; `refresh` asks again.
        files: Its file system.
        network: What it may reach.
        commands: Its programs, under E2B's names.

    Raises:
        NotFound: There is no snapshot of that tag.
        CapacityError: The host has no room for it.
        EngineError: It did not become ready.
    """

    files: AsyncFiles
    network: AsyncNetwork
    commands: AsyncCommands

    @explicit
    def __init__(  # noqa: PLR0913 - one for each option of a fork
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: float | None = None,
        *,
        spawn: bool = True,
        image: str | PathLike[str] | Image | None = None,
        on_progress: Callable[[ProgressEvent], object] | None = None,
        name: str | None = None,
        memory_limit_mib: int | None = None,
        disk_limit_mib: int | None = None,
        cpu_limit: float | None = None,
        cpu_weight: int | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        io_limit_ops: int | None = None,
        bandwidth_limit_mbit: int | None = None,
        network: bool | str | list[str] | None = None,
        hold_egress: bool = False,
        secrets: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | Literal["default"] | None = "default",
        idle_ttl_s: float | None = None,
        deadline_s: float | None = None,
        wait: bool = True,
        client: AsyncConnection | None = None,
    ) -> None:
        self.timeout = timeout
        options: NamedForkOptions = {
            "name": name,
            "memory_limit_mib": memory_limit_mib,
            "disk_limit_mib": disk_limit_mib,
            "cpu_limit": cpu_limit,
            "cpu_weight": cpu_weight,
            "pids_limit": pids_limit,
            "io_limit_mib_s": io_limit_mib_s,
            "io_limit_ops": io_limit_ops,
            "bandwidth_limit_mbit": bandwidth_limit_mbit,
            "network": network,
            "hold_egress": hold_egress,
            "secrets": secrets,
            "env": env,
            "labels": labels,
            "ttl_s": ttl_s,
            "idle_ttl_s": idle_ttl_s,
            "deadline_s": deadline_s,
            "wait": wait,
        }

        async def start() -> None:
            http = await http_of(client)
            if spawn:
                named = await snapshot_of(http, tag, image, on_progress)
                self._become(http, (await fork_one(http, named, options)).info)
            else:
                self._become(http, await find_sandbox(http, target))
                self._is_borrowed = True

        self._begin(start)

    @classmethod
    @explicit
    async def create(  # noqa: PLR0913 - one for each option of a fork
        cls,
        tag: str | None = None,
        *,
        template: str | None = None,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        allow_internet_access: bool | None = None,
        image: str | PathLike[str] | Image | None = None,
        on_progress: Callable[[ProgressEvent], object] | None = None,
        name: str | None = None,
        memory_limit_mib: int | None = None,
        disk_limit_mib: int | None = None,
        cpu_limit: float | None = None,
        cpu_weight: int | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        io_limit_ops: int | None = None,
        bandwidth_limit_mbit: int | None = None,
        network: bool | str | list[str] | None = None,
        hold_egress: bool = False,
        secrets: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | Literal["default"] | None = "default",
        idle_ttl_s: float | None = None,
        deadline_s: float | None = None,
        wait: bool = True,
        client: AsyncConnection | None = None,
    ) -> Self:
        """Return a new sandbox, forked from a snapshot; `AsyncSandbox` documents the options.

        Those in the first group are E2B's names for others.

        Args:
            tag: The snapshot to fork; without one, `FORKD_TAG`, else `pyagent`.
            template: E2B's name for `tag`.
            timeout: E2B's name for `ttl_s`.
            metadata: E2B's name for `labels`.
            envs: E2B's name for `env`.
            allow_internet_access: True is `network="internet"`.
            image: Instead of a tag: an image of a registry, such as `python:3.12-slim`; the path
                of an OCI layout or a `docker save` archive on this host; a recipe; or an `Image`.
                Its snapshot is made the first time, and kept for as long as the daemon has room.
            on_progress: Called with each step, if the image's snapshot has to be made.
            name: What it can be found by, beside its id; no other live one may have it.
            memory_limit_mib: Memory of the sandbox and its VMM, in MiB; no swap.
            disk_limit_mib: Its private disk layer, in MiB; None for the host's limit.
            cpu_limit: CPU time, in cores.
            cpu_weight: Share of CPU time beside other sandboxes; 100 if None.
            pids_limit: Threads of its process on the host, not of its guest.
            io_limit_mib_s: Disk bandwidth, each way, in MiB a second.
            io_limit_ops: Disk operations, each way, in a second.
            bandwidth_limit_mbit: Network bandwidth, each way, in millions of bits a second.
            network: What it may reach: "none", "internet", "host", "deny-all", or rules such as
                `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; True for "host".
            hold_egress: Whether it may reach nothing until that is changed.
            secrets: Names of secrets that it may use; the host puts them into its requests.
            env: Variables that every program in it gets, below the program's own.
            labels: Names and values by which it can be found.
            ttl_s: It is ended after this time, in seconds; None: it lives until it is killed;
                "default": after the daemon's default, five minutes unless it was set.
            idle_ttl_s: It is ended once nobody has used it for so many seconds; None: never.
            deadline_s: Time it has until its agent has answered, in seconds.
            wait: Wait for a snapshot that is being written, instead of raising `Conflict`.
            client: The client whose daemon is asked; None for the daemon that `Client()` finds,
                over connections that live as long as the program.
        """
        if allow_internet_access and network is None:
            network = "internet"
        made = cls(
            either("tag", tag, "template", template),
            ttl_s=ttl_s if timeout is None else timeout,
            idle_ttl_s=idle_ttl_s,
            labels=either("labels", labels, "metadata", metadata),
            env=either("env", env, "envs", envs),
            image=image,
            on_progress=on_progress,
            name=name,
            memory_limit_mib=memory_limit_mib,
            disk_limit_mib=disk_limit_mib,
            cpu_limit=cpu_limit,
            cpu_weight=cpu_weight,
            pids_limit=pids_limit,
            io_limit_mib_s=io_limit_mib_s,
            io_limit_ops=io_limit_ops,
            bandwidth_limit_mbit=bandwidth_limit_mbit,
            network=network,
            hold_egress=hold_egress,
            secrets=secrets,
            deadline_s=deadline_s,
            wait=wait,
            client=client,
        )
        return await made._opened()

    @classmethod
    async def connect(cls, id: str, *, client: AsyncConnection | None = None) -> Self:  # noqa: A002 - the word for it
        """Return a sandbox that is there.

        Args:
            id: Its id, a beginning of its id that no other has, or its name.
            client: The client whose daemon is asked; None as for `AsyncSandbox`.

        Raises:
            NotFound: There is none.
        """
        http = await http_of(client)
        path = f"/v2/sandboxes/{http.quoted(id)}"
        return cls._of(http, await http.call(SandboxInfo, "GET", path))

    @explicit
    async def branch(  # noqa: PLR0913 - one for each option
        self,
        n: int = 1,
        *,
        ttl_s: float | Literal["default"] | None = None,
        labels: Mapping[str, str] | None = None,
        network: bool | str | list[str] | None = None,
        hold_egress: bool = False,
        deadline_s: float | None = None,
    ) -> AsyncSandboxes:
        """Branch it into `n` siblings while it runs: all of them, or an error and none.

        They have what it had at one instant, and go on from there; it is paused for some
        milliseconds, and goes on, too.  They have its limits and its variables.

        Args:
            n: How many siblings.
            ttl_s: Each is ended after this time, in seconds; None: it lives until it is killed;
                "default": after the daemon's default.
            labels: Labels of each; None for those of the source.
            network: What each may reach, as of a fork; None for what the source may.
            hold_egress: Whether each may reach nothing until it is promoted.
            deadline_s: Time each has until its agent has answered, in seconds.

        Raises:
            BudgetError: Its tree may not grow so much.
            Conflict: It does not run.
            EngineError: At least one did not become ready.
        """
        options: BranchOptions = {
            "ttl_s": ttl_s,
            "labels": labels,
            "network": network,
            "hold_egress": hold_egress,
            "deadline_s": deadline_s,
        }
        return self._siblings(
            await self._branch(_requests.branch(n, None, options, all_or_nothing=True))
        )

    @explicit
    async def try_branch(  # noqa: PLR0913 - one for each option
        self,
        n: int = 1,
        *,
        tag: str | None = None,
        wait: bool = True,
        ttl_s: float | Literal["default"] | None = None,
        labels: Mapping[str, str] | None = None,
        network: bool | str | list[str] | None = None,
        hold_egress: bool = False,
        deadline_s: float | None = None,
    ) -> Branch[AsyncSandbox]:
        """Branch it into up to `n` siblings, and write the same instant down under `tag`.

        Args:
            n: How many siblings; 0 only with a tag.
            tag: Name of the snapshot; None for none.
            wait: Whether to return when the snapshot is ready, or while it is being written.
            ttl_s: Each is ended after this time, in seconds; None: it lives until it is killed;
                "default": after the daemon's default.
            labels: Labels of each; None for those of the source.
            network: What each may reach, as of a fork; None for what the source may.
            hold_egress: Whether each may reach nothing until it is promoted.
            deadline_s: Time each has until its agent has answered, in seconds.

        Raises:
            EngineError: Not one became ready, and there is no tag.
        """
        options: BranchOptions = {
            "ttl_s": ttl_s,
            "labels": labels,
            "network": network,
            "hold_egress": hold_egress,
            "deadline_s": deadline_s,
        }
        request = _requests.branch(n, tag, options, all_or_nothing=False, wait=wait)
        made = await self._branch(request)
        failures = [each for each in made.sandboxes if isinstance(each, SandboxFailure)]
        siblings = self._siblings(made)
        return Branch(siblings, failures, made.pause_ms, made.stall_ms, made.snapshot)

    @classmethod
    def _of(cls, http: AsyncHttp, info: SandboxInfo) -> Self:
        """Return the object for a sandbox that is there."""
        made = cls.__new__(cls)
        made._become(http, info)  # noqa: SLF001 - ours
        return made

    def _become(self, http: AsyncHttp, info: SandboxInfo) -> None:
        self._http, self.info = http, info
        self._path = f"/v2/sandboxes/{http.quoted(info.id)}"
        self.files = AsyncFiles(http, self._path)
        self.network = AsyncNetwork(http, self._path)
        self.commands = AsyncCommands(self)

    def _siblings(self, made: BranchInfo) -> AsyncSandboxes:
        ready = (each for each in made.sandboxes if isinstance(each, SandboxInfo))
        return AsyncSandboxes(sandbox_of(self._http, each) for each in ready)


def sandbox_of(http: AsyncHttp, info: SandboxInfo) -> AsyncSandbox:
    """Return the object for a sandbox that is there."""
    return AsyncSandbox._of(http, info)  # noqa: SLF001 - ours


async def fork(
    http: AsyncHttp, request: SandboxCreate
) -> tuple[AsyncSandboxes, list[SandboxFailure]]:
    """Fork as `request` says; return the sandboxes that are ready, and why others are not."""
    found = await http.call(
        _OUTCOMES,
        "POST",
        "/v2/sandboxes",
        body=request,
        creates=True,
        timeout_s=request.deadline_secs + FORK_MARGIN_S + FORK_SECS_PER_CHILD * request.n,
    )
    ready = (each for each in found if isinstance(each, SandboxInfo))
    failed = [each for each in found if isinstance(each, SandboxFailure)]
    return AsyncSandboxes(sandbox_of(http, each) for each in ready), failed


async def fork_one(http: AsyncHttp, tag: str, options: NamedForkOptions) -> AsyncSandbox:
    """Fork one sandbox.

    Raises:
        EngineError: It did not become ready.
    """
    ready, failed = await fork(http, _requests.fork(tag, 1, options, all_or_nothing=True))
    if failed:
        raise EngineError(f"the sandbox did not become ready: {failed[0].error}")
    return ready[0]


class AsyncSandboxes(Shown, Sequence[AsyncSandbox]):
    """Sandboxes that were made together: a sequence, which asks all of them at the same time.

        async with await client.fork("numpy", 10) as sandboxes:
            print([each.value for each in await sandboxes.eval("numpy.zeros(5).sum()")])

    As a context manager it kills all of them at the end.  Results come in the order of the
    sandboxes.  If a call fails for some, it goes on for the others, and then raises the first
    error.
    """

    def __init__(self, sandboxes: Iterable[AsyncSandbox]) -> None:
        self._sandboxes = list(sandboxes)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {[each.id for each in self._sandboxes]}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self._sandboxes))

    def __len__(self) -> int:
        return len(self._sandboxes)

    @overload
    def __getitem__(self, index: int) -> AsyncSandbox: ...

    @overload
    def __getitem__(self, index: slice) -> AsyncSandboxes: ...

    def __getitem__(self, index: int | slice) -> AsyncSandbox | AsyncSandboxes:
        if isinstance(index, slice):
            return AsyncSandboxes(self._sandboxes[index])
        return self._sandboxes[index]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.kill()
        except ForkdError as error:
            if exc is None:
                raise
            exc.add_note(f"not all sandboxes were killed: {error}")

    async def map(
        self,
        function: Callable[[AsyncSandbox], Awaitable[R]],
        *,
        parallel_max: int = PARALLEL_MAX,
    ) -> list[R]:
        """Call a function with each sandbox, at the same time; return what it gives.

        Args:
            function: What to call.
            parallel_max: How many calls may run at the same time.

        Raises:
            InvalidRequest: `parallel_max` is not at least 1.
            Exception: What the function raised for the first sandbox for which it raised.
        """
        if parallel_max < 1:
            raise InvalidRequest("parallel_max must be at least 1", field="parallel_max")
        outcomes = await async_map(function, self._sandboxes, parallel_max)
        for each in outcomes:
            if isinstance(each, Exception):
                raise each
        return outcomes  # type: ignore[return-value]  # none is an error

    @explicit
    async def run(  # noqa: PLR0913 - how a program can be run
        self,
        line: str,
        *,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
    ) -> list[ExecResult[str]]:
        """Have a shell in each run a line; as `AsyncSandbox.run`.

        Args:
            line: What `/bin/sh -c` reads.
            check: True: also raise `CommandError` for an exit code other than 0.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Kill the program after this time; None: never.
            env: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
            stdin: The program's whole input.
        """

        async def one(sandbox: AsyncSandbox) -> ExecResult[str]:
            return await sandbox.run(
                line, check=check, timeout_s=timeout_s, env=env, cwd=cwd, user=user, stdin=stdin
            )

        return await self.map(one)

    @explicit
    async def exec(  # noqa: PLR0913 - how a program can be run
        self,
        args: Sequence[str] | str,
        *more: str,
        check: bool | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: str | bytes | None = None,
    ) -> list[ExecResult[str]]:
        """Run a program in each without a shell; as `AsyncSandbox.exec`.

        Args:
            args: The program and its arguments, as `["ls", "-l"]` or as `"ls", "-l"`.
            more: Further arguments, if `args` is the program alone.
            check: True: also raise `CommandError` for an exit code other than 0.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Kill the program after this time; None: never.
            env: Variables added to the sandbox's.
            cwd: Where the program starts; the image's folder if None.
            user: Who the program runs as: a name, or `uid[:gid]`; the image's user if None.
            stdin: The program's whole input.
        """

        async def one(sandbox: AsyncSandbox) -> ExecResult[str]:
            return await sandbox.exec(
                args,
                *more,
                check=check,
                timeout_s=timeout_s,
                env=env,
                cwd=cwd,
                user=user,
                stdin=stdin,
            )

        return await self.map(one)

    @explicit
    async def eval(
        self,
        code: str,
        *,
        runtime: str | None = None,
        check: bool | None = None,
        timeout_s: float | None = None,
    ) -> list[EvalResult]:
        """Run code in each one's warm runtime; as `AsyncSandbox.eval`.

        Args:
            code: Statements; a last expression is the value.
            runtime: Refuse the code if the warm runtime is another one; None: whatever it is.
            check: True: also raise `GuestError` for an exception in the code.  False: raise
                nothing, not even `ExecTimeout`.
            timeout_s: Interrupt the code after this time; None: never.
        """

        async def one(sandbox: AsyncSandbox) -> EvalResult:
            return await sandbox.eval(code, runtime=runtime, check=check, timeout_s=timeout_s)

        return await self.map(one)

    async def kill(self) -> list[bool]:
        """End all of them; return which were there."""

        async def one(sandbox: AsyncSandbox) -> bool:
            return await sandbox.kill()

        return await self.map(one)

    def _repr_html_(self) -> str:
        return sandbox_table([each.info for each in self._sandboxes])
