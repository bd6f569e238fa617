"""An `AsyncSandbox` is forked when it is entered or awaited, and says so before that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd import AsyncSandbox
from forkd.errors import InvalidRequest, NotFound
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from tests.support.daemon import RunningDaemon


@pytest.fixture(autouse=True)
def environment(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.service.stored = some_snapshots("warm")
    monkeypatch.setenv("FORKD_URL", daemon.url)


async def test_one_that_is_not_entered_says_what_to_do(daemon: RunningDaemon) -> None:
    sandbox = AsyncSandbox("warm")

    with pytest.raises(InvalidRequest, match="has not been forked: use `async with"):
        await sandbox.run("ls")
    with pytest.raises(InvalidRequest, match=r"AsyncSandbox\.create"):
        await sandbox.files.read("/tmp")
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        sandbox.runn  # type: ignore[attr-defined]  # noqa: B018 - reading it is the point
    assert daemon.service.running == {}


async def test_one_can_be_awaited_and_is_forked_once(daemon: RunningDaemon) -> None:
    sandbox = await AsyncSandbox("warm")
    assert await sandbox is sandbox

    async with sandbox:
        assert list(daemon.service.running) == [sandbox.id]

    assert daemon.service.running == {}


async def test_one_that_cannot_be_forked_leaves_nothing(daemon: RunningDaemon) -> None:
    with pytest.raises(NotFound, match="nothing"):
        async with AsyncSandbox("nothing"):
            pass

    assert daemon.service.running == {}
