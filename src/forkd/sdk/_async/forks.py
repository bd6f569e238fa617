"""Forks of snapshots, by a client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from forkd.errors import EngineError
from forkd.sdk import _requests
from forkd.sdk._async.connection import AsyncConnection
from forkd.sdk._async.recipes import snapshot_of
from forkd.sdk._async.sandbox import fork, fork_one
from forkd.sdk._requests import explicit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from forkd.sdk._async.sandbox import AsyncSandbox, AsyncSandboxes
    from forkd.sdk._image import Image
    from forkd.sdk._requests import ForkOptions, NamedForkOptions
    from forkd.wire.v2 import ProgressEvent, SandboxFailure


class AsyncForks(AsyncConnection):
    """The part of a client that forks; `AsyncClient` has all of it."""

    @explicit
    async def fork(  # noqa: PLR0913 - one for each option of a fork
        self,
        tag: str,
        n: int = 1,
        *,
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
        ttl_s: float | Literal["default"] | None = None,
        idle_ttl_s: float | None = None,
        deadline_s: float | None = None,
        wait: bool = True,
    ) -> AsyncSandboxes:
        """Fork `n` sandboxes from a snapshot: all of them, or an error and none.

        They live until they are killed, unless `ttl_s` says otherwise.  The answer is a sequence,
        and a context manager that kills all of them at the end.

        Args:
            tag: The snapshot to fork.
            n: How many.
            memory_limit_mib: Memory of each sandbox and its VMM, in MiB; no swap.
            disk_limit_mib: Private disk layer of each, in MiB; None for the host's limit.
            cpu_limit: CPU time of each, in cores.
            cpu_weight: Share of CPU time of each beside other sandboxes; 100 if None.
            pids_limit: Threads of each one's process on the host, not of its guest.
            io_limit_mib_s: Disk bandwidth of each, each way, in MiB a second.
            io_limit_ops: Disk operations of each, each way, in a second.
            bandwidth_limit_mbit: Network bandwidth of each, each way, in millions of bits a second.
            network: What each may reach: "none", "internet", "host", "deny-all", or rules such as
                `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; True for "host".
            hold_egress: Whether each may reach nothing until that is changed.
            secrets: Names of secrets that each may use; the host puts them into its requests.
            env: Variables that every program in each gets, below the program's own.
            labels: Names and values by which sandboxes can be found.
            ttl_s: Each is ended after this time, in seconds; None: it lives until it is killed;
                "default": after the daemon's default, five minutes unless it was set.
            idle_ttl_s: Each is ended once nobody has used it for so many seconds; None: never.
            deadline_s: Time each has until its agent has answered, in seconds.
            wait: Wait for a snapshot that is being written, instead of raising `Conflict`.

        Raises:
            NotFound: There is no snapshot of that tag.
            CapacityError: The host has no room for so many.
            EngineError: At least one did not become ready.
        """
        options: ForkOptions = {
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
        ready, failed = await fork(self._http, _requests.fork(tag, n, options, all_or_nothing=True))
        if failed:
            raise EngineError(f"{len(failed)} of {n} did not become ready: {failed[0].error}")
        return ready

    @explicit
    async def try_fork(  # noqa: PLR0913 - one for each option of a fork
        self,
        tag: str,
        n: int = 1,
        *,
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
        ttl_s: float | Literal["default"] | None = None,
        idle_ttl_s: float | None = None,
        deadline_s: float | None = None,
        wait: bool = True,
    ) -> tuple[AsyncSandboxes, list[SandboxFailure]]:
        """Fork up to `n` sandboxes; return the ready ones, and why the others are not.

        Args:
            tag: The snapshot to fork.
            n: How many.
            memory_limit_mib: Memory of each sandbox and its VMM, in MiB; no swap.
            disk_limit_mib: Private disk layer of each, in MiB; None for the host's limit.
            cpu_limit: CPU time of each, in cores.
            cpu_weight: Share of CPU time of each beside other sandboxes; 100 if None.
            pids_limit: Threads of each one's process on the host, not of its guest.
            io_limit_mib_s: Disk bandwidth of each, each way, in MiB a second.
            io_limit_ops: Disk operations of each, each way, in a second.
            bandwidth_limit_mbit: Network bandwidth of each, each way, in millions of bits a second.
            network: What each may reach: "none", "internet", "host", "deny-all", or rules such as
                `["example.com:443", "192.0.2.0/24:80,443/tcp"]`; True for "host".
            hold_egress: Whether each may reach nothing until that is changed.
            secrets: Names of secrets that each may use; the host puts them into its requests.
            env: Variables that every program in each gets, below the program's own.
            labels: Names and values by which sandboxes can be found.
            ttl_s: Each is ended after this time, in seconds; None: it lives until it is killed;
                "default": after the daemon's default, five minutes unless it was set.
            idle_ttl_s: Each is ended once nobody has used it for so many seconds; None: never.
            deadline_s: Time each has until its agent has answered, in seconds.
            wait: Wait for a snapshot that is being written, instead of raising `Conflict`.

        Raises:
            NotFound: There is no snapshot of that tag.
            CapacityError: The host has no room for so many.
            EngineError: Not one became ready.
        """
        options: ForkOptions = {
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
        return await fork(self._http, _requests.fork(tag, n, options, all_or_nothing=False))

    @explicit
    async def sandbox(  # noqa: PLR0913 - one for each option of a fork
        self,
        tag: str | None = None,
        *,
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
    ) -> AsyncSandbox:
        """Fork one sandbox from a snapshot; as `AsyncSandbox`, it has five minutes to live.

        Args:
            tag: The snapshot to fork.
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

        Raises:
            NotFound: There is no snapshot of that tag.
            CapacityError: The host has no room for it.
            EngineError: It did not become ready.
        """
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
        named = await snapshot_of(self._http, tag, image, on_progress)
        return await fork_one(self._http, named, options)
