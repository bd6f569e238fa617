"""A machine that was taken over, in the very jail of machines: it gets at nothing.

Without the filter of system calls, which would end it at its first try: what is refused here is
refused by the jail alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.configs import ChildConfig, Identity, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import end, start_zygote
from forkd.engine.replies import ChildFailed
from forkd.host import ownership
from forkd.model.sandbox import ForkOptions
from forkd.service.chain_files import load_chain
from forkd.service.jail import Jail
from forkd.store.snapshots import SnapshotStore
from tests.support.docs import tries_in
from tests.support.real_host import FORK_DEADLINE_S, REAL, TAG, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.engine.replies import ChildReady
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
CAPTIVE = ROOT / "build/bin/forkd-captive"
TRIES_LEAST = 60
NAME = "captive"


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(real_host: RealHost) -> AsyncIterator[Sandbox]:
    async with real_host.forked(1, ForkOptions()) as (forked,):
        yield forked


async def captured(host: RealHost, sibling: Sandbox) -> list[dict[str, str]]:
    """Have a machine that was taken over try what it can; return what came of each try."""
    settings = host.settings
    assert settings.uids is not None
    jail = Jail(settings.uids, settings.jail_dirs, settings.tops_dir)
    (base,) = load_chain(SnapshotStore(settings.state_dir), TAG)
    zygote_folder, folder = settings.zygotes_dir / NAME, settings.sandboxes_dir / NAME
    uid = settings.uids.first + settings.uids.count - 1
    for each in (zygote_folder, folder):
        each.mkdir(mode=0o700)
    ownership.give(folder, uid)
    said: list[ChildReady | ChildFailed] = []
    try:
        config = ZygoteConfig(zygote_folder, base.state, (base.memory,), base.disk, jail.config())
        with await start_zygote(CAPTIVE, config, filtered=False) as process:
            async with await Control.connect(zygote_folder / "zygote.sock") as control:
                identity = Identity(sibling.id, "0" * 32, "00000000-0000-4000-8000-000000000000")
                child = ChildConfig(NAME, folder, identity, uid=uid)
                await control.fork([child], deadline_s=FORK_DEADLINE_S, on_outcome=said.append)
            await end(process)
        (outcome,) = said
        assert isinstance(outcome, ChildFailed)
        assert "a captive ran" in outcome.message, outcome
        report = await asyncio.to_thread((folder / "captive.json").read_text)
        found: list[dict[str, str]] = json.loads(report)
        return found
    finally:
        for each in (zygote_folder, folder):
            shutil.rmtree(each)


def programs_with(word: bytes) -> set[str]:
    return {each.name for each in CAPTIVE.parent.iterdir() if word in each.read_bytes()}


async def test_a_captured_machine_is_refused_everything(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    tries = await captured(real_host, sandbox)

    assert [each for each in tries if "refused" not in each] == []
    assert len(tries) >= TRIES_LEAST
    told = tries_in("What a captured machine was refused")
    assert {(each["group"], each["try"]) for each in tries} == told
    assert await value(real_host, sandbox.id, "1 + 1") == 2


async def test_no_program_that_is_shipped_has_a_captive_in_it() -> None:
    assert programs_with(b"captive.json") == {CAPTIVE.name}
