"""Every sibling and every durable snapshot of a machine at work is of one instant, and goes on.

In the source runs `forkd-witness`: several threads that keep each of many pages, and each block of
their files, a function of one number, and money between accounts.  What a branch tears, leaves out
or does twice, it finds (`crates/witness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support import witness
from tests.support.callers import CALLER
from tests.support.real_host import (
    BAKES_LARGE,
    LARGE_VCPUS,
    REAL_IN_SOAK,
    RECIPE,
    TAG,
    baked_host,
    large,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from forkd.model.ids import SandboxId, Tag
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak
    from tests.support.witness import Report

pytestmark = [*REAL_IN_SOAK, BAKES_LARGE, pytest.mark.timeout(600)]

BRANCHES = 38
"""Of each of the eight cells: 304 in all."""

DEADLINE_S = 240.0
"""For one machine, while several that never rest share a processor."""

FORK = ForkOptions(deadline_s=DEADLINE_S)
BRANCH = BranchOptions(deadline_s=DEADLINE_S)


@dataclass(slots=True)
class Counts:
    """What was done and checked in one cell."""

    branches: int = 0
    siblings: int = 0
    snapshots: int = 0
    sources: int = 0
    pages: int = 0
    blocks: int = 0
    steps: int = 0

    def add(self, report: Report) -> None:
        self.pages += report.pages
        self.blocks += report.blocks
        self.steps += report.transfers


CELLS = [
    pytest.param(vcpus, load, id=f"{vcpus}cpu{'s' * (vcpus > 1)}-{load}")
    for vcpus in (1, LARGE_VCPUS)
    for load in ("idle", "memory", "disk", "fork")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bakes: Bakes
) -> AsyncIterator[RealHost]:
    """A host with a snapshot of a machine with one virtual CPU, or several."""
    folder = tmp_path_factory.mktemp("recipes") / "large"
    async with baked_host(bakes, large(folder) if request.param > 1 else RECIPE) as baked:
        yield baked


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(host: RealHost) -> AsyncIterator[None]:
    yield
    for each in await host.service.sandboxes.list(CALLER):
        await host.service.sandboxes.delete(CALLER, each.id)
    for snapshot in await host.service.snapshots.list(CALLER):
        if snapshot.depth == 1:
            await host.service.snapshots.delete(CALLER, snapshot.tag, cascade=True)
    assert [each.tag for each in await host.service.snapshots.list(CALLER)] == [TAG]


async def forked(host: RealHost, tag: Tag) -> SandboxId:
    result = await host.service.sandboxes.fork(CALLER, tag, 1, FORK)
    assert result.failures == ()
    return result.sandboxes[0].id


async def checked(host: RealHost, sandbox: SandboxId, before: Report, counts: Counts) -> None:
    """Check a machine whose witness was at `before`, and has been asked nothing since."""
    report = await witness.ask(host, sandbox, "check")
    assert report.violations == ()
    assert report.kernel == ()
    assert report.is_later_than(before), f"{report} is not later than {before}"
    assert report.asked == before.asked + 1
    counts.add(report)


async def finished(host: RealHost, source: SandboxId, counts: Counts) -> None:
    """Check a source that is not branched any more, and end it."""
    await checked(host, source, await witness.ask(host, source, "look"), counts)
    counts.sources += 1
    await host.service.sandboxes.delete(CALLER, source)


async def branched(host: RealHost, source: SandboxId, number: int, counts: Counts) -> SandboxId:
    """Branch once, check all that comes of it, and end all but one, who is branched next.

    Mostly the siblings are checked while their instant is still being written.  Now and then there
    are two, and one of them is the next source; sometimes it is what was restored.
    """
    service, tag = host.service, parse_tag(f"instant{number}")
    count = 2 if number % 4 == 1 else 1
    before = await witness.ask(host, source, "look")
    result = await service.branches.branch(
        CALLER, source, count, BRANCH, tag=tag, wait=number % 4 == 0
    )
    assert result.fork.failures == ()
    # Of this, what was branched must know nothing.
    await witness.ask(host, source, "look")
    siblings = [each.id for each in result.fork.sandboxes]
    for each in siblings:
        await checked(host, each, before, counts)
        counts.siblings += 1
    if count == 2:
        await finished(host, source, counts)
        source = siblings.pop()
    for each in siblings:
        await service.sandboxes.delete(CALLER, each)
    restored = await forked(host, tag)
    await checked(host, restored, before, counts)
    counts.snapshots += 1
    counts.branches += 1
    if number % 8 == 7:
        await finished(host, source, counts)
        return restored
    await service.sandboxes.delete(CALLER, restored)
    await service.snapshots.delete(CALLER, tag)
    return source


@pytest.mark.parametrize(("host", "load"), CELLS, indirect=["host"], scope="module")
async def test_all_that_comes_of_a_branch_of_a_machine_at_work_is_whole_and_goes_on(
    host: RealHost,
    load: str,
    soak: Soak,
    tell: Callable[[str], None],
) -> None:
    counts = Counts()
    source = await forked(host, TAG)
    await witness.start(host, source, load)
    for number in range(soak.count(1, BRANCHES)):
        source = await branched(host, source, number, counts)
    await finished(host, source, counts)
    tell(f"{load}: {counts}")
