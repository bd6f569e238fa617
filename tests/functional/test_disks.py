"""Disks of real siblings: each as good as a disk of its own, and none seen by another."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import pytest

from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET
from forkd.model.sandbox import ForkOptions
from tests.support import nameless
from tests.support.real_host import REAL, value

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.engine.replies import DiskMetrics
    from forkd.model.ids import SandboxId
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

SIBLINGS = 20

EXERCISE = """
import os, random

MOST = 1 << 20
dice = random.Random(socket_name)
path = "/root/exercise"
model = bytearray()


def check(file, start, length):
    found = os.pread(file, length, start)
    assert found == model[start:start + length], f"step {step}: wrong bytes at {start}"


file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
for step in range(steps):
    start, length = dice.randrange(MOST), dice.randrange(1, 1 << 16)
    action = dice.choice(["write", "write", "write", "read", "sync", "truncate", "forget"])
    if action == "write":
        data = dice.randbytes(length)
        model.extend(bytes(max(0, start + length - len(model))))
        model[start:start + length] = data
        assert os.pwrite(file, data, start) == length
        check(file, start, length)
    elif action == "read":
        check(file, start, length)
    elif action == "sync":
        os.fsync(file)
    elif action == "truncate":
        model = model[:start] + bytes(max(0, start - len(model)))
        os.ftruncate(file, start)
    else:
        os.sync()
        with open("/proc/sys/vm/drop_caches", "w") as caches:
            caches.write("3")
    assert os.fstat(file).st_size == len(model)

os.sync()
with open("/proc/sys/vm/drop_caches", "w") as caches:
    caches.write("3")
check(file, 0, MOST + (1 << 16))
os.close(file)
open("/root/" + socket_name, "w").close()
sorted(os.listdir("/root"))
"""
"""Writes, reads, cuts and syncs at random beside a model in memory, and compares each time."""

FILL = """
import os
space = os.statvfs("/")
with open("/root/filler", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, (space.f_bavail - 64) * space.f_frsize)
found = None
try:
    with open("/root/last", "wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
except OSError as error:
    found = error.errno
found
"""

SYNCED = """
import os
with open("/root/synced", "wb") as file:
    file.write(os.urandom(1 << 18))
    file.flush()
    os.fsync(file.fileno())
"""


@pytest.mark.soak
async def test_siblings_at_once_read_what_they_wrote_and_see_nobody_elses(
    real_host: RealHost, soak: Soak
) -> None:
    count, steps = soak.count(4, SIBLINGS), soak.count(10, 150)
    before = lower_layers(real_host)
    async with real_host.forked(count, ForkOptions()) as siblings:
        asked = [
            value(
                real_host,
                sibling.id,
                f"socket_name, steps = {sibling.hostname!r}, {steps}\n{EXERCISE}",
            )
            for sibling in siblings
        ]
        seen = await asyncio.gather(*asked)

    for sibling, names in zip(siblings, seen, strict=True):
        others = {other.hostname for other in siblings} - {sibling.hostname}
        assert {sibling.hostname, "exercise"} <= set(names)
        assert not others & set(names)
    assert lower_layers(real_host) == before


async def test_a_file_system_that_is_full_in_one_child_has_room_in_its_sibling(
    real_host: RealHost,
) -> None:
    async with real_host.forked(2, ForkOptions()) as (full, other):
        assert await value(real_host, full.id, FILL) == errno.ENOSPC
        await value(real_host, other.id, SYNCED + "1")
        free = "os.statvfs('/').f_bavail * os.statvfs('/').f_frsize"
        assert await value(real_host, other.id, free) > 1 << 27
        assert await value(real_host, full.id, free) < 1 << 20


async def test_a_guests_flush_reaches_its_private_file(real_host: RealHost) -> None:
    async with real_host.forked(1, ForkOptions()) as (sandbox,):
        before = await metrics(real_host, sandbox.id)
        await value(real_host, sandbox.id, SYNCED + "1")
        after = await metrics(real_host, sandbox.id)
        assert sandbox.pid is not None
        stored = nameless.stored_bytes(sandbox.pid, real_host.settings.state_dir / "tops")

    assert after.flushes > before.flushes
    assert after.top_bytes - before.top_bytes >= 1 << 18
    assert stored >= 1 << 18


async def metrics(host: RealHost, sandbox: SandboxId) -> DiskMetrics:
    """Return what the machine says of its disk."""
    path = host.settings.sandboxes_dir / sandbox / CONTROL_SOCKET
    async with await Control.connect(path) as control:
        disk = (await control.metrics()).disk
    assert disk is not None
    return disk


def lower_layers(host: RealHost) -> dict[Path, tuple[int, int, int]]:
    """Return what would change if someone wrote below the private layers."""
    folder, (image,) = host.snapshot.directory, host.settings.state_dir.glob("images/*/rootfs.ext4")
    found = {path: path.stat() for path in (folder / "disk.layer", folder / "memory", image)}
    return {path: (st.st_mtime_ns, st.st_blocks, st.st_size) for path, st in found.items()}
