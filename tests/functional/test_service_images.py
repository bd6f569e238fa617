"""Builds of images take nothing of what other requests need."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

import pytest

from forkd.errors import CapacityError, ForkdError, QuotaExceeded
from forkd.images.recipe import RECIPE_FILE_NAME
from forkd.limits import BUILD_MEMORY_BYTES_MAX, BUILD_MEMORY_BYTES_MIN, BUILDS_MAX
from forkd.model.sandbox import ForkOptions
from forkd.model.tenant import Amounts, Quotas
from forkd.service.admission import Admission
from forkd.service.images import BUILDS_WAITING_MAX, Images
from forkd.service.ledger import Ledger
from forkd.service.recipes import Recipes
from forkd.service.settings import AdmissionPolicy
from forkd.service.supervision import Supervisor
from forkd.service.workers import Workers
from forkd.store.recipes import RecipeStore
from forkd.telemetry.telemetry import Telemetry
from tests.support.builds import blocked_builds, drain
from tests.support.callers import CALLER
from tests.support.service_host import TAG, UNTIL_DEADLINE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.host.cells import Cell
    from forkd.service.cells import Cells
    from tests.support.service_host import FakeHost


async def test_as_many_builds_as_may_be_wanted_hold_up_nobody_and_one_more_is_refused(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as host:
        recipe = fake_host.recipe()  # written once: the builds under way read it
        await fake_host.bake(host, recipe)
        wanted = BUILDS_MAX + BUILDS_WAITING_MAX
        async with blocked_builds(host, fake_host, wanted, monkeypatch):
            await until(lambda: host.images.waiting == BUILDS_WAITING_MAX)

            with pytest.raises(CapacityError, match="one more of image builds was asked for"):
                await drain(host.images.build(CALLER, recipe))

            async with asyncio.timeout(UNTIL_DEADLINE_S / 2):  # builds end by themselves then
                forked = await host.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
                await host.sandboxes.delete(CALLER, forked.sandboxes[0].id)


class BuildStopped(ForkdError):
    """What ends a build when it has come far enough."""


class StoppingCells:
    """Cells of which each ends the build that gets it."""

    def __init__(self) -> None:
        self.memory_mib: list[int] = []

    @contextlib.contextmanager
    def build(self, memory_bytes: int) -> Iterator[Cell]:
        self.memory_mib.append(memory_bytes >> 20)
        raise BuildStopped("far enough")
        yield


async def test_a_build_takes_no_more_memory_than_its_tenant_may_have(fake_host: FakeHost) -> None:
    cells, recipe = StoppingCells(), fake_host.recipe()
    text = (recipe / RECIPE_FILE_NAME).read_text()
    packages = text.replace('rootfs = "rootfs.ext4"', 'debian = { suite = "stable" }')
    (recipe / RECIPE_FILE_NAME).write_text(packages)
    admission = Admission(AdmissionPolicy(memory_reserve_mib=0), Ledger(), fake_host.folder, 0)
    ledger, least_mib = admission.ledger, BUILD_MEMORY_BYTES_MIN >> 20
    async with Supervisor() as tasks:
        folders = (fake_host.folder / "recipes",)
        store, workers = RecipeStore(fake_host.settings.state_dir), Workers()
        recipes = Recipes(Telemetry(), folders, store, workers, ledger, tasks)
        given = (recipes, cast("Cells", cells), ledger, admission)
        made = Images(Telemetry(), fake_host.settings, tasks, *given)
        with workers:
            async with made as images:

                async def build(quota_mib: int | None) -> None:
                    ledger.quotas[CALLER.tenant] = Quotas(memory_mib=quota_mib)
                    await images.built(CALLER, recipe, lambda _: None)

                with pytest.raises(QuotaExceeded):
                    await build(least_mib - 1)
                for quota_mib in (least_mib, least_mib + 1, None):
                    with pytest.raises(BuildStopped):
                        await build(quota_mib)

    most_mib = BUILD_MEMORY_BYTES_MAX >> 20
    assert cells.memory_mib == [least_mib, least_mib + 1, most_mib]
    assert ledger.promised() == Amounts()
