"""Builds of images take nothing of what other requests need."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError
from forkd.limits import BUILDS_MAX
from forkd.model.sandbox import ForkOptions
from forkd.service.images import BUILDS_WAITING_MAX
from tests.support.builds import blocked_builds, drain
from tests.support.callers import CALLER
from tests.support.service_host import TAG, UNTIL_DEADLINE_S, until

if TYPE_CHECKING:
    from tests.support.service_host import FakeHost


async def test_as_many_builds_as_may_be_wanted_hold_up_nobody_and_one_more_is_refused(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        wanted = BUILDS_MAX + BUILDS_WAITING_MAX
        async with blocked_builds(host, fake_host, wanted, monkeypatch):
            await until(lambda: host.images.waiting == BUILDS_WAITING_MAX)

            with pytest.raises(CapacityError, match="one more of image builds was asked for"):
                await drain(host.images.build(CALLER, fake_host.recipe()))

            async with asyncio.timeout(UNTIL_DEADLINE_S / 2):  # builds end by themselves then
                forked = await host.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
                await host.sandboxes.delete(CALLER, forked.sandboxes[0].id)
