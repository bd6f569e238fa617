"""A `HostService` over the real VMM with `python-numpy` baked, for the tests of one module.

Needs what `REAL` says; the binaries are those in build/bin.  The image cache is the user's,
where it may be read-only: only its locks and what depends on the agent are ours.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.host.cgroupfs import CGROUP_ROOT
from forkd.images.layout import default_cache_folder
from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import Snapshot, SnapshotRequest
from forkd.network.plan import Plan
from forkd.service.host_service import HostService
from forkd.service.settings import HostSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox

ROOT = Path(__file__).parents[2]

REAL = pytest.mark.needs("kvm", "root", "cgroup2", "tun", "binaries")

TAG = parse_tag("python-numpy")

STATE_PARENT = Path("/var/lib/forkd")
"""On a disk, where the helper machine has one; a snapshot would fill a small /tmp."""


@dataclass
class RealHost:
    """Folders, settings and the service that runs now; `restart` makes another."""

    settings: HostSettings
    service: HostService
    snapshot: Snapshot

    @contextlib.asynccontextmanager
    async def forked(self, count: int, options: ForkOptions) -> AsyncIterator[tuple[Sandbox, ...]]:
        """Fork sandboxes that are deleted after the block."""
        result = await self.service.fork(TAG, count, options)
        try:
            assert result.failures == ()
            yield result.sandboxes
        finally:
            for sandbox in result.sandboxes:
                await self.service.delete_sandbox(sandbox.id)

    async def restart(self, *, warm: bool = True) -> None:
        """Stop the service and start another on the same folders; `warm` starts its zygote."""
        await self.service.stop()
        self.service = HostService(self.settings)
        await self.service.start()
        if warm:
            await self.warm()

    async def warm(self) -> None:
        """Have the zygote started, whose descriptors would look like a test's leak."""
        async with self.forked(1, ForkOptions()):
            pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_host() -> AsyncIterator[RealHost]:
    """Bake once for a module; nothing is left of it afterwards."""
    state, run_dir = _folders()
    service = HostService(_settings(state, run_dir))
    try:
        await service.start()
        snapshot = await _bake(service)
        host = RealHost(_settings(state, run_dir), service, snapshot)
        await host.warm()
        yield host
        service = host.service
    finally:
        await service.stop()
        for folder in (state, run_dir):
            shutil.rmtree(folder)


def _folders() -> tuple[Path, Path]:
    STATE_PARENT.mkdir(exist_ok=True)
    state = tempfile.mkdtemp(prefix="test-", dir=STATE_PARENT)
    run_dir = tempfile.mkdtemp(prefix="fk", dir="/tmp")  # its path must be short
    return Path(state), Path(run_dir)


async def _bake(service: HostService) -> Snapshot:
    request = SnapshotRequest(TAG, ROOT / "recipes" / TAG)
    *_, snapshot = [event async for event in service.create_snapshot(request)]
    assert isinstance(snapshot, Snapshot)
    return snapshot


def _settings(state: Path, run_dir: Path) -> HostSettings:
    cache, shared = state / "cache", default_cache_folder()
    for name in ("locks", "initramfs"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    for name in ("kernels", "images"):
        if not (cache / name).exists():
            (cache / name).symlink_to(shared / name)
    binaries = ROOT / "build" / "bin"
    return HostSettings(
        vmm=binaries / "forkd-vmm",
        agent=binaries / "forkd-agent",
        cache_dir=cache,
        state_dir=state,
        run_dir=run_dir,
        # A daemon reaps what it finds in these and does not know; others run on this host.
        cgroup_root=CGROUP_ROOT / f"forkd-{run_dir.name}",
        network=Plan(IPv4Network("10.214.0.0/16"), tap_prefix="fkt"),
    )
