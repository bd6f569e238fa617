"""A host over the fake VMM, in folders of its own, with recipes to bake.

`fake_host` gives the folders and makes services.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.ids import parse_tag
from forkd.model.snapshot import Snapshot, SnapshotRequest
from forkd.service.host import Host, open_host
from forkd.service.settings import HostSettings, PackPolicy
from tests.support import processes
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from forkd.model.caller import Caller
    from forkd.model.progress import Progress

ROOT = Path(__file__).parents[2]

UNTIL_DEADLINE_S = 30.0
UNTIL_INTERVAL_S = 0.001

TAG = parse_tag("python")

RECIPE = """
name = "{name}"
image = {{ rootfs = "rootfs.ext4" }}

[machine]
kernel = "kernel"
memory_mib = 128
cmdline = "{knobs}"

[warmup]
runtime = "python"
code = "{code}"
timeout_s = 20.0
"""


@dataclass(frozen=True, slots=True)
class FakeHost:
    """Folders, a VMM that is none, and recipes."""

    folder: Path
    settings: HostSettings

    def recipe(self, *, knobs: str = "", code: str = "answer = 42", name: str = "fake") -> Path:
        """Write a recipe; see `tests.support.fake_vmm` for `knobs`."""
        folder = self.folder / "recipes" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.toml").write_text(RECIPE.format(name=name, knobs=knobs, code=code))
        (folder / "kernel").write_bytes(
            bytes(0x202) + b"HdrS" + struct.pack("<H", 0x20F) + bytes(0x2E) + b"\x03" + bytes(4096)
        )
        superblock = bytearray(4096)
        superblock[1024 + 56 : 1024 + 58] = b"\x53\xef"
        (folder / "rootfs.ext4").write_bytes(bytes(superblock) + bytes(4096 * 15))
        return folder

    def vmm_processes(self) -> list[int]:
        """Return the processes that live in our run folder."""
        return sorted(processes.of(self.settings.run_dir))

    def left_over(self) -> list[str]:
        """Return what a service without sandboxes and bakes should not have."""
        settings = self.settings
        folders = (settings.sandboxes_dir, settings.bakes_dir, settings.state_dir / "staging")
        return [str(entry) for folder in folders for entry in folder.iterdir()]

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[Host]:
        """Run a service."""
        async with open_host(self.settings) as service:
            yield service

    async def bake(
        self, service: Host, recipe: Path, tag: str = TAG, *, caller: Caller = CALLER
    ) -> Snapshot:
        """Bake a snapshot and return it."""
        snapshot: Progress | Snapshot | None = None
        request = SnapshotRequest(parse_tag(tag), recipe)
        async with contextlib.aclosing(service.snapshots.bake(caller, request)) as events:
            async for event in events:
                snapshot = event
        assert isinstance(snapshot, Snapshot)
        return snapshot


def make_host(folder: Path, run_dir: Path) -> FakeHost:
    """Lay out a host below `folder`."""
    vmm = folder / "fake-vmm"
    vmm.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = ['{ROOT / 'src'}', '{ROOT}']\n"
        "from tests.support.fake_vmm import main\nmain()\n"
    )
    vmm.chmod(0o755)
    agent = folder / "agent"
    agent.write_bytes(b"\x7fELF\x02".ljust(64, b"\0"))
    settings = HostSettings(
        vmm=vmm,
        agent=agent,
        cache_dir=folder / "cache",
        state_dir=folder / "state",
        run_dir=run_dir,
        recipe_dirs=(folder / "recipes",),
        cgroup_root=folder / "cgroup" / "forkd",
        settle_s=0.0,  # a fake guest puts nothing off
        packs=PackPolicy(allow_unsigned=True),
    )
    return FakeHost(folder, settings)


async def until(condition: Callable[[], bool], deadline_s: float = UNTIL_DEADLINE_S) -> None:
    """Return once something outside of this process holds, for which there is no event."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - the event is another process'
            await asyncio.sleep(UNTIL_INTERVAL_S)


@pytest.fixture
def fake_host(tmp_path: Path) -> Iterator[FakeHost]:
    """A host of its own; what is left of its processes is killed, and is an error."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir:
        made = make_host(tmp_path, Path(run_dir))
        yield made
        with contextlib.suppress(TimeoutError):  # what was killed last may be ending still
            asyncio.run(until(lambda: made.vmm_processes() == []))
        left = made.vmm_processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert left == []
