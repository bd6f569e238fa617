"""A sandbox from outside: what it is, how long it lives, what it may take of its host."""

from __future__ import annotations

import codecs
import os
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import TypeAdapter

from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.sdk import _notebook
from forkd.sdk._notebook import Shown
from forkd.sdk._opening import AsyncOpening
from forkd.sdk._requests import build, explicit, patch
from forkd.sdk._transport import async_pause
from forkd.wire.v2 import LimitsPatch, Pong, SandboxInfo, SandboxPatch
from forkd.wire.v2_events import UsageInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from types import TracebackType

    from forkd.sdk._async.http import AsyncHttp

WAIT_PAUSE_S_MIN, WAIT_PAUSE_S_MAX = 0.05, 1.0
"""How long after a sandbox was found alive it is looked at again; doubled each time."""

_SANDBOXES = TypeAdapter(list[SandboxInfo])


class AsyncLife(AsyncOpening, Shown):
    """The part of a sandbox that is seen from outside; `AsyncSandbox` has all of it.

    Attributes:
        info: The sandbox as the daemon last described it; `refresh` asks again.
    """

    info: SandboxInfo
    _http: AsyncHttp
    _path: str
    _is_borrowed: bool = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.tag}>"

    def __str__(self) -> str:
        return f"{self.id}  {self.tag}  {self.info.condition}"

    @property
    def id(self) -> str:
        """Its id."""
        return self.info.id

    @property
    def sandbox_id(self) -> str:
        """Its id, under E2B's name."""
        return self.info.id

    @property
    def target(self) -> str:
        """Its id, under the reference's name."""
        return self.info.id

    @property
    def tag(self) -> str:
        """The snapshot it was forked from."""
        return self.info.snapshot_tag

    @property
    def name(self) -> str | None:
        """What it can be found by, beside its id; None if it has no name."""
        return self.info.name

    @property
    def labels(self) -> dict[str, str]:
        """Names and values by which it can be found."""
        return dict(self.info.labels)

    async def __aenter__(self) -> Self:
        return await self._opened()

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
            exc.add_note(f"sandbox {self.id} was not killed: {error}")

    async def refresh(self) -> SandboxInfo:
        """Ask the daemon how the sandbox is, and return that.

        Raises:
            NotFound: It was killed.
        """
        self.info = await self._http.call(SandboxInfo, "GET", self._path)
        return self.info

    async def get_info(self) -> SandboxInfo:
        """Return what `refresh` does, under E2B's name."""
        return await self.refresh()

    async def is_running(self) -> bool:
        """Return whether it runs now."""
        try:
            return (await self.refresh()).condition == "running"
        except NotFound:
            return False

    async def wait(self, *, timeout_s: float | None = None) -> str | None:
        """Wait until the sandbox has ended, and return why; it is asked for each second.

        Args:
            timeout_s: Wait no longer than this; None: for as long as it takes.

        Returns:
            Why it ended, "deleted" if the daemon knows no more of it; None if it lives still.
        """
        until_s = inf if timeout_s is None else monotonic() + timeout_s
        pause_s = WAIT_PAUSE_S_MIN
        while True:
            try:
                info = await self.refresh()
            except NotFound:
                return "deleted"
            if info.condition == "exited":
                return info.exit_reason or info.condition
            left_s = until_s - monotonic()
            if left_s <= 0:
                return None
            await async_pause(min(pause_s, left_s))
            pause_s = min(2 * pause_s, WAIT_PAUSE_S_MAX)

    async def kill(self) -> bool:
        """End the sandbox and remove everything that was its own.

        A sandbox that has ended already is no error.  One that was not made for this object, by
        `Sandbox(target=…, spawn=False)`, lives on, as in the reference's package.

        Returns:
            Whether it was there.
        """
        if self._is_borrowed:
            return False
        try:
            await self._http.send("DELETE", self._path)
            was_there = True
        except NotFound:
            was_there = False
        gone = {"status": "exited", "paused": False, "pid": None, "exit_reason": "deleted"}
        self.info = self.info.model_copy(update=gone)
        return was_there

    async def set_ttl(self, ttl_s: float | Literal["default"] | None) -> SandboxInfo:
        """Change when it is ended, and return it as it is then.

        Args:
            ttl_s: In so many seconds from now; None: never; "default": after the daemon's default.

        Raises:
            InvalidRequest: The time is out of range.
        """
        return await self._change(ttl_secs=ttl_s)

    async def set_idle_ttl(self, idle_ttl_s: float | None) -> SandboxInfo:
        """Change for how long nobody may use it before it is ended; return it as it is then.

        Programs, evaluations, files, connections to ports, a followed console and changes of the
        sandbox are use.  A ping is not.  The time goes on while the sandbox is paused.

        Args:
            idle_ttl_s: In seconds; None: it is not ended for that.

        Raises:
            InvalidRequest: The time is out of range.
        """
        return await self._change(idle_ttl_secs=idle_ttl_s)

    async def set_timeout(self, timeout: float) -> None:
        """Do what `set_ttl` does, under E2B's name."""
        await self.set_ttl(timeout)

    async def rename(self, name: str | None) -> SandboxInfo:
        """Give it another name, and return it as it is then.

        Args:
            name: The name; None: it has none any more.

        Raises:
            Conflict: Another live sandbox has the name.
        """
        return await self._change(name=name)

    async def set_labels(self, labels: Mapping[str, str]) -> SandboxInfo:
        """Give it other labels in the place of those that it has; return it as it is then.

        Args:
            labels: Names and values.
        """
        return await self._change(labels=dict(labels))

    async def change_labels(self, changes: Mapping[str, str | None]) -> SandboxInfo:
        """Set some labels and remove others; return it as it is then.

        Args:
            changes: New values by name; None removes a label.  All others stay.

        Raises:
            InvalidRequest: A name or a value is no label, or it would have too many.
        """
        return await self._change(label_changes=dict(changes))

    async def pause(self) -> SandboxInfo:
        """Stop its virtual CPUs and keep its memory; return it as it is then.

        Until it is resumed, what needs the guest raises `Conflict`.  Its time to live goes on.  One
        that is paused already stays so.

        Raises:
            Conflict: It does not run.
        """
        self.info = await self._http.call(SandboxInfo, "POST", f"{self._path}/pause")
        return self.info

    async def resume(self) -> SandboxInfo:
        """Let it go on where it was paused; return it as it is then.

        One that runs already goes on.

        Raises:
            Conflict: It has ended.
        """
        self.info = await self._http.call(SandboxInfo, "POST", f"{self._path}/resume")
        return self.info

    async def _change(self, **members: Any) -> SandboxInfo:  # noqa: ANN401 - of the request
        body = patch(SandboxPatch, **members)
        self.info = await self._http.call(SandboxInfo, "PATCH", self._path, body=body)
        return self.info

    async def ping(self) -> Pong:
        """Ask the agent in the guest how it is."""
        return await self._http.call(Pong, "POST", f"{self._path}/ping")

    async def usage(self) -> UsageInfo:
        """Return what it uses of the host: CPU time, memory, disk, network.

        Raises:
            Conflict: It does not run.
        """
        return await self._http.call(UsageInfo, "GET", f"{self._path}/usage")

    @explicit
    async def set_limits(  # noqa: PLR0913 - one for each limit
        self,
        *,
        memory_limit_mib: int | None = None,
        cpu_limit: float | None = None,
        cpu_weight: int | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        io_limit_ops: int | None = None,
        bandwidth_limit_mbit: int | None = None,
    ) -> SandboxInfo:
        """Change what it may take of the host, at once; limits that are None stay as they are.

        Args:
            memory_limit_mib: Memory of the sandbox and its VMM, in MiB; no swap.
            cpu_limit: CPU time, in cores.
            cpu_weight: Share of CPU time beside other sandboxes; 100 is the usual one.
            pids_limit: Threads of the sandbox's process on the host, not of its guest.
            io_limit_mib_s: Disk bandwidth, each way, in MiB a second.
            io_limit_ops: Disk operations, each way, in a second.
            bandwidth_limit_mbit: Network bandwidth, each way, in millions of bits a second.

        Returns:
            The sandbox as it is then.

        Raises:
            InvalidRequest: No limit is given.
            Conflict: It does not run, has no cgroup, has no network whose bandwidth could be
                limited, or has more memory in use than that.
            HostError: The daemon's host cannot limit disk I/O.
        """
        request = build(
            LimitsPatch,
            memory_limit_mib=memory_limit_mib,
            cpu_limit=cpu_limit,
            cpu_weight=cpu_weight,
            pids_limit=pids_limit,
            io_limit_mib_s=io_limit_mib_s,
            io_limit_ops=io_limit_ops,
            bandwidth_limit_mbit=bandwidth_limit_mbit,
        )
        path = f"{self._path}/limits"
        self.info = await self._http.call(SandboxInfo, "PATCH", path, body=request)
        return self.info

    async def console(self) -> str:
        """Return the end of what the guest wrote to its console, as text."""
        return (await self.logs()).decode(errors="replace")

    async def follow_console(self) -> AsyncIterator[str]:
        """Yield the console's text so far, then what is added, until the sandbox ends."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async for piece in self.follow_logs():
            if text := decoder.decode(piece):
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    async def logs(self) -> bytes:
        """Return the end of what the guest wrote to its console, at most 1 MiB."""
        async with self._http.streamed(f"{self._path}/logs") as answer:
            return await answer.aread()

    async def follow_logs(self) -> AsyncIterator[bytes]:
        """Yield the console's log so far, then what is added, until the sandbox ends."""
        async with self._http.streamed(f"{self._path}/logs", {"follow": True}) as answer:
            async for piece in answer.aiter_bytes():
                yield piece

    def _repr_html_(self) -> str:
        return sandbox_table([self.info])


def sandbox_table(sandboxes: list[SandboxInfo]) -> str:
    """Return sandboxes as a notebook shows them."""
    columns = ("id", "name", "snapshot", "status", "address")
    rows = [
        (each.id, each.name, each.snapshot_tag, each.condition, each.guest_addr)
        for each in sandboxes
    ]
    return _notebook.table(columns, rows)


async def find_sandbox(http: AsyncHttp, target: str | None) -> SandboxInfo:
    """Return the sandbox of an id, a name or an address."""
    wanted = target or os.environ.get("FORKD_TARGET", "")
    if not wanted:
        raise InvalidRequest("spawn=False needs a target: the id of a sandbox", field="target")
    try:
        return await http.call(SandboxInfo, "GET", f"/v2/sandboxes/{http.quoted(wanted)}")
    except (NotFound, InvalidRequest):
        address = wanted.partition(":")[0]
    for each in await http.call(_SANDBOXES, "GET", "/v2/sandboxes"):
        if each.guest_addr is not None and each.guest_addr == address:
            return each
    raise NotFound(f"no sandbox has the id, the name or the address {wanted!r}")
