"""A service over the fake VMM with one sandbox to branch."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forkd.errors import Conflict, NotFound
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

OPTIONS = BranchOptions()


@contextlib.asynccontextmanager
async def held(host: FakeHost, knobs: str = "") -> AsyncIterator[tuple[Host, Sandbox]]:
    """Run a service with one sandbox; nothing is left of either."""
    async with host.service() as service:
        with contextlib.suppress(Conflict):  # a test may come back to its host
            await host.bake(service, host.recipe(knobs=knobs))
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        yield service, sandbox
        for each in await service.sandboxes.list(CALLER):
            with contextlib.suppress(NotFound):
                await service.sandboxes.delete(CALLER, each.id)
        assert host.left_over() == []
        await until(lambda: len(host.vmm_processes()) <= 1)  # the snapshot's zygote


async def branched(service: Host, source: SandboxId, count: int = 1) -> tuple[Sandbox, ...]:
    result = await service.branches.branch(CALLER, source, count, OPTIONS)
    assert result.fork.failures == ()
    return result.fork.sandboxes
