"""Programs in the middle of many things are branched, and none of them can tell."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.guest import busy
from tests.support.callers import CALLER
from tests.support.real_host import REAL, ROOT, TAG, real_host, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROGRAM = ROOT / "tests" / "guest" / "busy.py"

ALONE = """
mkdir /root/alone && cd /root/alone
setsid -f flock lock python3 ../busy.py . 2>log | grep -q begun
"""
"""Begin a process of its own; whoever gets its lock knows that it has ended."""

END_ALONE = """
cd /root/alone
echo 3 >/proc/sys/vm/drop_caches
echo >stop
flock lock cat log report.json
"""
"""In the end all files are looked at, and are read from the disk."""

WARM = """
import sys
sys.path.append("/root")
import busy
work = busy.Busy("/root/warm")
"""
"""Begin threads of the warm runtime, and the other end of their connection."""

FOLDERS = ("/root/alone", "/root/warm")

STEPS = 3
"""How far each thread must have come before and after a branch."""

DEADLINE_S = 120.0

OPTIONS = BranchOptions()


@pytest_asyncio.fixture(loop_scope="module")
async def source(real_host: RealHost) -> AsyncIterator[Sandbox]:
    """A sandbox in which both programs are at work."""
    (sandbox,) = (await real_host.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

    async def program() -> AsyncIterator[bytes]:
        yield PROGRAM.read_bytes()

    await real_host.service.guests.write_file(CALLER, sandbox.id, "/root/busy.py", program())
    await value(real_host, sandbox.id, WARM)
    await shell(real_host, sandbox.id, ALONE)
    await gone_on(real_host, sandbox.id, [0] * len(FOLDERS) * len(busy.PARTS))
    yield sandbox
    await real_host.clear()


async def read(host: RealHost, sandbox: SandboxId, path: str) -> bytes:
    """Return what is in a file."""
    async with await host.service.guests.read_file(CALLER, sandbox, path) as file:
        return b"".join([piece async for piece in file])


async def counted(host: RealHost, sandbox: SandboxId) -> list[int]:
    """Return how far each thread of both programs has come."""
    files = [await read(host, sandbox, f"{folder}/counters") for folder in FOLDERS]
    return [number for each in files for (number,) in busy.COUNTER.iter_unpack(each)]


def has_come(steps: list[int], least: list[int]) -> bool:
    """Whether each thread has come at least so far."""
    return all(each >= limit for each, limit in zip(steps, least, strict=True))


async def gone_on(host: RealHost, sandbox: SandboxId, since: list[int]) -> None:
    """Return once each thread has come some steps further than it had."""
    async with asyncio.timeout(DEADLINE_S):
        while not has_come(await counted(host, sandbox), [steps + STEPS for steps in since]):
            pass


async def check_undisturbed(host: RealHost, sandbox: SandboxId, since: list[int]) -> list[Any]:
    """Let both programs go on and end; return what only they can know."""
    found = await counted(host, sandbox)
    assert has_come(found, since)
    await gone_on(host, sandbox, found)
    alone = json.loads(await shell(host, sandbox, END_ALONE))
    warm = await value(host, sandbox, "work.stop()")
    for folder, report in zip(FOLDERS, (alone, warm), strict=True):
        check_report(report, await read(host, sandbox, f"{folder}/written"))
    return [(report["secret"], report["pid"]) for report in (alone, warm)]


def check_report(report: dict[str, Any], written: bytes) -> None:
    """Compare what a program says in the end with what it must have come to."""
    assert report["errors"] == []
    seeds = {name: busy.seed_of(bytes.fromhex(report["secret"]), name) for name in busy.PARTS}
    for name in ("left", "right"):
        steps, digest = report[name]
        undisturbed = busy.Computer(seeds[name])
        for _ in range(steps):
            undisturbed.step()
        assert undisturbed.digest() == digest
    assert busy.Writer.expected(seeds["writer"], report["written"]) == written.decode()
    sent, answered, served = report["messages"]
    assert sent == answered == served
    steps = dict(zip(busy.PARTS, report["counted"], strict=True))
    assert (steps["left"], steps["right"]) == (report["left"][0], report["right"][0])
    assert (steps["writer"], steps["sender"]) == (report["written"], sent)


@pytest.mark.soak(only=True)  # in every run: test_branch_soundness, and threads in test_branch_vmm
async def test_threads_files_and_a_connection_go_on_in_siblings_source_and_snapshot(
    real_host: RealHost, source: Sandbox
) -> None:
    service, tag = real_host.service, parse_tag("mid-thought")
    selves = []

    async def check(sandbox: Sandbox, since: list[int]) -> None:
        selves.append(await check_undisturbed(real_host, sandbox.id, since))

    branches, siblings = 10, 3
    for name in (*[None] * (branches - 1), tag):
        await shell(real_host, source.id, "sync")
        before = await counted(real_host, source.id)
        branched = await service.branches.branch(CALLER, source.id, siblings, OPTIONS, tag=name)
        assert branched.fork.failures == ()
        for sibling in branched.fork.sandboxes:
            await check(sibling, before)
            await service.sandboxes.delete(CALLER, sibling.id)
    (restored,) = (await service.sandboxes.fork(CALLER, tag, 1, ForkOptions())).sandboxes
    await check(restored, before)
    await check(source, before)

    assert len(selves) == siblings * branches + 2
    assert all(each == selves[0] for each in selves)
