"""VMM processes that tests start themselves, beside a service that only baked.

`bench_of` holds the host's snapshot in a zygote; a `Bench` forks, branches, saves and derives with
the engine alone.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd import programs
from forkd.engine.channel import Channel
from forkd.engine.configs import (
    BranchConfig,
    ChildConfig,
    DeriveConfig,
    DiskConfig,
    Identity,
    LinkConfig,
    ZygoteConfig,
)
from forkd.engine.control import Control
from forkd.engine.frames import Kind
from forkd.engine.guest import AGENT_PORT, Guest
from forkd.engine.process import (
    CONTROL_SOCKET,
    VSOCK_SOCKET,
    ZYGOTE_SOCKET,
    end,
    end_listener,
    start_zygote,
)
from forkd.engine.replies import ChildReady
from tests.support.real_host import EVAL_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.engine.replies import Branched, ChildFailed
    from tests.support.real_host import RealHost

FORK_DEADLINE_S = 120.0

GREETING_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """A forked machine and how it is reached."""

    directory: Path
    pid: int

    async def value(self, code: str) -> Any:  # noqa: ANN401 - JSON
        """Evaluate code that must not raise; return its value."""
        with self.guest() as guest:
            result = await guest.eval(code, EVAL_TIMEOUT_S)
        assert result.error is None, result.error.traceback
        return result.value

    @contextlib.contextmanager
    def guest(self) -> Iterator[Guest]:
        """Give the agent; the connections to it end with the block."""
        guest = Guest(self.directory / VSOCK_SOCKET)
        try:
            yield guest
        finally:
            guest.close()

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[int]:
        """Ask the agent something; give the port of the host's that it was asked from.

        The connection ends with the block: a machine without one calls its agent itself.
        """
        async with await Channel.connect(self.directory / VSOCK_SOCKET) as channel:
            greeting = await channel.line(f"CONNECT {AGENT_PORT}", GREETING_BYTES_MAX)
            await channel.send_json(Kind.REQUEST, {"op": "ping"})
            assert (await channel.receive()).kind is Kind.REPLY
            yield int(greeting.removeprefix("OK "))

    async def control(self) -> Control:
        """Connect to its control socket."""
        return await Control.connect(self.directory / CONTROL_SOCKET)

    async def reset(self) -> float:
        """Take it back to its fork point, as another; return how long that took, in ms."""
        async with await self.control() as control:
            return await control.reset(identity("again"), deadline_s=FORK_DEADLINE_S)

    def held(self) -> tuple[int, int, int]:
        """Return its threads, its descriptors, and its own memory in KiB."""
        proc = Path(f"/proc/{self.pid}")
        rollup = (proc / "smaps_rollup").read_text().splitlines()
        (anonymous,) = [line.split()[1] for line in rollup if line.startswith("Anonymous:")]
        entries = [len(list((proc / name).iterdir())) for name in ("task", "fd")]
        return entries[0], entries[1], int(anonymous)


def identity(hostname: str) -> Identity:
    """Make up a machine's identity."""
    return Identity(hostname, secrets.token_hex(16), str(uuid.uuid4()))


@dataclass(frozen=True, slots=True)
class Bench:
    """A snapshot held by a zygote, and a folder for what tests make of it."""

    root: Path
    config: ZygoteConfig

    def folder(self) -> Path:
        """Make a folder for a machine."""
        made = self.root / secrets.token_hex(4)
        made.mkdir()
        return made

    @contextlib.asynccontextmanager
    async def forked(
        self,
        zygote: Path,
        count: int = 1,
        *,
        tops: Path | None = None,
        reserve_bytes: int | None = None,
    ) -> AsyncIterator[list[Machine]]:
        """Fork machines that end with the block.

        Args:
            zygote: Its folder.
            count: How many.
            tops: Where their private disk layers go; None for their folders.
            reserve_bytes: What these leave free there.
        """
        folders = {f"sb-{number}": self.folder() for number in range(count)}
        children = [
            ChildConfig(
                id_,
                folder,
                identity(id_),
                top_directory=tops,
                top_reserve_bytes=reserve_bytes,
            )
            for id_, folder in folders.items()
        ]
        outcomes: list[ChildReady | ChildFailed] = []
        try:
            async with await Control.connect(zygote / ZYGOTE_SOCKET) as control:
                await control.fork(children, deadline_s=FORK_DEADLINE_S, on_outcome=outcomes.append)
            ready = [outcome for outcome in outcomes if isinstance(outcome, ChildReady)]
            assert len(ready) == count, outcomes
            yield [Machine(folders[child.id], child.pid) for child in ready]
        finally:
            for folder in folders.values():
                await end_listener(folder / CONTROL_SOCKET)

    @contextlib.asynccontextmanager
    async def branched(self, machine: Machine) -> AsyncIterator[tuple[Path, Branched]]:
        """Branch a machine; the seed ends with the block."""
        folder = self.folder()
        try:
            async with await machine.control() as control:
                branched = await control.branch(BranchConfig(folder))
            yield folder, branched
        finally:
            await end_listener(folder / ZYGOTE_SOCKET)

    @contextlib.asynccontextmanager
    async def derived(self, parent: Path, config: DeriveConfig) -> AsyncIterator[Path]:
        """Put a delta over a zygote; the new one ends with the block."""
        try:
            async with await Control.connect(parent / ZYGOTE_SOCKET) as control:
                await control.derive(config)
            yield config.directory
        finally:
            await end_listener(config.directory / ZYGOTE_SOCKET)

    async def saved(self, seed: Path) -> DeriveConfig:
        """Have a seed of a child of the snapshot saved as a delta."""
        assert self.config.disk is not None
        layers = self.config.disk.layers
        target = self.folder()
        async with await Control.connect(seed / ZYGOTE_SOCKET) as control:
            await control.save_link(LinkConfig(target, self.config.memory, len(layers)))
        disk = DiskConfig((*layers, target / "disk.layer"), self.config.disk.size_bytes)
        return DeriveConfig(self.folder(), target / "state", target / "memory", disk)


@contextlib.asynccontextmanager
async def bench_of(host: RealHost) -> AsyncIterator[Bench]:
    """Hold the host's snapshot in a zygote of its own; nothing is left of it after the block."""
    root = host.settings.run_dir / "t"
    root.mkdir()
    config = zygote_config(host, root)
    process = await start_zygote(programs.find(programs.VMM), config)
    try:
        yield Bench(root, config)
    finally:
        await end(process)
        process.close()
        shutil.rmtree(root)


def zygote_config(host: RealHost, folder: Path) -> ZygoteConfig:
    """Return what a zygote in `folder` is told, to hold the host's snapshot."""
    stored = host.snapshot.directory
    (rootfs,) = host.settings.state_dir.glob("images/*/rootfs.ext4")
    disk = DiskConfig((rootfs, stored / "disk.layer"), host.snapshot.disk_bytes)
    return ZygoteConfig(folder, stored / "state", (stored / "memory",), disk)
