"""The demo of branches does on real machines what it says that it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd import AsyncClient
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE, TAG
from tools import demo_branch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon

pytestmark = [REAL, pytest.mark.soak(only=True), pytest.mark.timeout(900)]

STEPS = 300
"""How long each goes on, a tenth of the demo's: nobody here looks at how good the tours become."""


@pytest.fixture
def daemon(bakes: Bakes) -> Iterator[Daemon]:
    with running_daemon(bakes.of(RECIPE)) as made:
        yield made


async def test_five_siblings_of_a_thinking_process_go_five_ways_and_the_best_is_promoted(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_branch, "WAYS", [{**way, "steps": STEPS} for way in demo_branch.WAYS])
    async with AsyncClient(daemon.url) as client:
        (parent,) = await client.fork(TAG)

        assert await demo_branch.demo(client, parent) == []

        await demo_branch.end_tree(client, parent.id)
        assert await client.sandboxes.list() == []
    assert daemon.left() == []
