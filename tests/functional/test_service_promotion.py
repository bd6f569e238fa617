"""A promoted child is its parent from then on, or nothing has changed, wherever a crash falls."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, EngineExited, GuestError, NotFound, StoreError
from forkd.model.ids import new_sandbox_id
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from forkd.service.trees import promotion as promotions
from tests.support.callers import CALLER
from tests.support.service_host import ROOT, TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

OPTIONS = BranchOptions()

DAEMON = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.support.callers import CALLER
from tests.support.service_host import make_host

async def main():
    host = make_host(Path({folder!r}), Path({run_dir!r}))
    async with host.service() as service:
        await service.promotions.promote(CALLER, {child!r})

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def family(
    host: FakeHost, knobs: str = "", count: int = 3
) -> AsyncIterator[tuple[Host, Sandbox, tuple[Sandbox, ...]]]:
    """Run a service with a sandbox that was branched, each sibling with a thought of its own."""
    async with host.service() as service:
        await host.bake(service, host.recipe(knobs=knobs))
        (parent,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        children = (await service.branches.branch(CALLER, parent.id, count, OPTIONS)).fork.sandboxes
        for number, child in enumerate(children):
            await value(service, child.id, f"globals().update(thought={number})")
        yield service, parent, children


async def value(service: Host, sandbox: SandboxId, code: str) -> object:
    result = await service.guests.eval(CALLER, sandbox, code)
    assert result.error is None
    return result.value


async def clear(service: Host, host: FakeHost) -> None:
    """Delete everything; nothing may be left but the snapshot's zygote."""
    for each in await service.sandboxes.list(CALLER):
        await service.sandboxes.delete(CALLER, each.id)
    assert host.left_over() == []
    await until(lambda: len(host.vmm_processes()) <= 1)


async def end(service: Host, sandbox: SandboxId) -> None:
    """Have a sandbox's machine die; returns when it is known to be dead."""
    with contextlib.suppress(EngineExited):
        await service.guests.eval(CALLER, sandbox, "die")
    async for _ in service.sandboxes.follow_console_log(CALLER, sandbox):
        pass


async def test_a_promoted_child_has_its_parents_id_and_name_and_its_own_thoughts(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host) as (service, parent, (winner, *losers)):
        promotion = await service.promotions.promote(CALLER, winner.id)

        assert promotion.sandbox == await service.sandboxes.get(CALLER, parent.id)
        assert set(promotion.ended) == {winner.id, *(each.id for each in losers)}
        assert await service.sandboxes.list(CALLER) == (promotion.sandbox,)
        assert promotion.sandbox.pid == winner.pid
        assert (promotion.sandbox.parent, promotion.sandbox.hostname) == (None, parent.hostname)
        assert await value(service, parent.id, "thought") == 0
        assert await value(service, parent.id, "identity['hostname']") == parent.hostname
        assert len(fake_host.vmm_processes()) == 1 + 1
        with pytest.raises(NotFound):
            await service.sandboxes.get(CALLER, winner.id)
        await clear(service, fake_host)


@pytest.mark.parametrize("held", [True, False])
async def test_a_promoted_child_reaches_as_much_as_its_parent_might_and_no_more(
    fake_host: FakeHost, *, held: bool
) -> None:
    async with family(fake_host) as (service, parent, (winner, *_)):
        roster = service.sandboxes.roster
        for each, is_held in ((parent.id, held), (winner.id, not held)):
            owner = roster.find(each)
            assert owner is not None
            owner.lease.held = is_held
            owner.sandbox = replace(owner.sandbox, egress_held=is_held)

        promotion = await service.promotions.promote(CALLER, winner.id)

        promoted = roster.find(parent.id)
        assert promoted is not None
        assert (promotion.sandbox.egress_held, promoted.lease.held) == (held, held)
        await clear(service, fake_host)


async def test_a_promoted_child_can_be_branched_and_promoted_over(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host) as (service, parent, children):
        await service.promotions.promote(CALLER, children[1].id)
        (leaf,) = (await service.branches.branch(CALLER, parent.id, 1, OPTIONS)).fork.sandboxes
        assert leaf.ancestors == (parent.id,)
        assert await value(service, leaf.id, "thought") == 1

        await service.promotions.promote(CALLER, leaf.id)

        assert [each.id for each in await service.sandboxes.list(CALLER)] == [parent.id]
        assert await value(service, parent.id, "thought") == 1
        assert await value(service, parent.id, "identity['hostname']") == parent.hostname
        await clear(service, fake_host)


async def test_what_was_branched_of_the_winner_stays_and_of_the_losers_ends(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host, count=2) as (service, parent, (winner, loser)):
        (heir,) = (await service.branches.branch(CALLER, winner.id, 1, OPTIONS)).fork.sandboxes
        (lost,) = (await service.branches.branch(CALLER, loser.id, 1, OPTIONS)).fork.sandboxes

        promotion = await service.promotions.promote(CALLER, winner.id)

        assert set(promotion.ended) == {winner.id, loser.id, lost.id}
        assert (await service.sandboxes.get(CALLER, heir.id)).ancestors == (parent.id,)
        (tree,) = await service.trees.draw(CALLER)
        assert [node.id for node in tree.children] == [heir.id]
        await clear(service, fake_host)


async def test_a_promotion_in_the_middle_of_a_tree_leaves_what_is_above(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host, count=2) as (service, root, (middle, other)):
        (leaf,) = (await service.branches.branch(CALLER, middle.id, 1, OPTIONS)).fork.sandboxes

        promoted = (await service.promotions.promote(CALLER, leaf.id)).sandbox

        assert (promoted.id, promoted.ancestors) == (middle.id, (root.id,))
        assert {each.id for each in await service.sandboxes.list(CALLER)} == {
            root.id,
            middle.id,
            other.id,
        }
        await clear(service, fake_host)


async def test_a_child_takes_the_place_of_a_parent_that_has_ended(fake_host: FakeHost) -> None:
    async with family(fake_host) as (service, parent, (winner, *_)):
        await end(service, parent.id)

        promoted = (await service.promotions.promote(CALLER, winner.id)).sandbox

        assert (promoted.id, promoted.state) == (parent.id, SandboxState.RUNNING)
        assert await value(service, parent.id, "thought") == 0
        await clear(service, fake_host)


async def test_who_has_no_parent_or_does_not_run_is_not_promoted(fake_host: FakeHost) -> None:
    async with family(fake_host) as (service, parent, (dead, orphan, *_)):
        await end(service, dead.id)
        with pytest.raises(Conflict, match="exited"):
            await service.promotions.promote(CALLER, dead.id)
        with pytest.raises(Conflict, match="not branched"):
            await service.promotions.promote(CALLER, parent.id)
        with pytest.raises(NotFound):
            await service.promotions.promote(CALLER, new_sandbox_id())

        await service.sandboxes.delete(CALLER, parent.id)
        with pytest.raises(Conflict, match="its parent, is gone"):
            await service.promotions.promote(CALLER, orphan.id)
        await clear(service, fake_host)


async def test_a_tree_that_is_being_branched_promotes_nobody(fake_host: FakeHost) -> None:
    async with family(fake_host) as (service, parent, (winner, *_)):
        branch = asyncio.ensure_future(service.branches.branch(CALLER, parent.id, 10, OPTIONS))
        await until(lambda: len(fake_host.left_over()) > 4)

        with pytest.raises(Conflict, match="being branched"):
            await service.promotions.promote(CALLER, winner.id)

        await branch
        await service.promotions.promote(CALLER, winner.id)
        await clear(service, fake_host)


async def test_one_of_two_promotions_at_once_is_refused(fake_host: FakeHost) -> None:
    async with family(fake_host) as (service, parent, (one, other, *_)):
        asked = [
            service.promotions.promote(CALLER, one.id),
            service.promotions.promote(CALLER, other.id),
        ]
        results = await asyncio.gather(*asked, return_exceptions=True)

        assert [isinstance(each, Conflict) for each in results] == [False, True]
        assert [each.id for each in await service.sandboxes.list(CALLER)] == [parent.id]
        await clear(service, fake_host)


async def test_a_promotion_that_cannot_be_written_down_changes_nothing(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with family(fake_host) as (service, parent, children):
        before = await service.sandboxes.list(CALLER)

        def full(*_: object) -> None:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr("forkd.store.database.Database.put", full)
            with pytest.raises(StoreError):
                await service.promotions.promote(CALLER, children[0].id)

        assert await service.sandboxes.list(CALLER) == before
        assert await value(service, children[0].id, "thought") == 0
        assert await value(service, parent.id, "answer") == 42
        await clear(service, fake_host)


async def test_a_guest_that_refuses_its_new_name_is_promoted_and_told_again_at_the_next_start(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host, "rename=fail") as (service, parent, (winner, *_)):
        with pytest.raises(GuestError, match="as asked"):
            await service.promotions.promote(CALLER, winner.id)

        assert [each.id for each in await service.sandboxes.list(CALLER)] == [parent.id]

    async with fake_host.service() as service:
        assert await value(service, parent.id, "thought") == 0
        await clear(service, fake_host)


async def test_a_guest_that_refuses_its_new_name_twice_is_told_again_by_the_same_daemon(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotions, "RETRY_S_MIN", 0.01)
    async with family(fake_host, "rename=once rename=once") as (service, parent, (winner, *_)):
        with pytest.raises(GuestError, match="as asked"):
            await service.promotions.promote(CALLER, winner.id)

        await until(lambda: not service.sandboxes.roster.get(CALLER, parent.id).renaming)
        assert await value(service, parent.id, "renamed") == 1
        await clear(service, fake_host)


async def test_a_machine_of_an_earlier_forkd_is_promoted_and_keeps_its_hostname(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host, "rename=unknown") as (service, parent, (winner, *_)):
        promotion = await service.promotions.promote(CALLER, winner.id)

        assert promotion.sandbox.id == parent.id
        assert not service.sandboxes.roster.get(CALLER, parent.id).renaming
        assert await value(service, parent.id, "identity['hostname']") == winner.hostname
        await clear(service, fake_host)


class Doomed:
    """A service in a process of its own that promotes, and is killed."""

    def __init__(self, host: FakeHost, child: SandboxId, patch: str = "") -> None:
        script = patch + DAEMON.format(
            root=str(ROOT),
            folder=str(host.folder),
            run_dir=str(host.settings.run_dir),
            child=str(child),
        )
        self._process = subprocess.Popen([sys.executable, "-c", script])  # noqa: S603 - our own

    async def kill_when(self, condition: Callable[[], bool]) -> None:
        """Kill it as soon as `condition` holds."""
        try:
            await until(lambda: self._process.poll() is not None or condition())
        finally:
            self._process.kill()
            self._process.wait()


DIE_BEFORE = """
import os, signal
from forkd.store.database import Database
put = Database.put

def die(self, rows):
    rows = list(rows)
    if any(row.renaming for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, rows)

Database.put = die
"""

DIE_AFTER = """
import os, signal
from forkd.store.database import Database
put = Database.put

def die(self, rows):
    rows = list(rows)
    put(self, rows)
    if any(row.renaming for row in rows):
        os.kill(os.getpid(), signal.SIGKILL)

Database.put = die
"""


async def test_a_daemon_killed_before_the_transaction_leaves_the_promotion_undone(
    fake_host: FakeHost,
) -> None:
    async with family(fake_host) as (service, _, children):
        before = await service.sandboxes.list(CALLER)
    await Doomed(fake_host, children[0].id, DIE_BEFORE).kill_when(lambda: False)

    async with fake_host.service() as service:
        assert set(await service.sandboxes.list(CALLER)) == set(before)
        assert await value(service, children[0].id, "thought") == 0
        await clear(service, fake_host)


@pytest.mark.parametrize(
    ("patch", "knobs"),
    [(DIE_AFTER, ""), ("", "rename=hang")],
    ids=["after-the-transaction", "while-it-tells"],
)
async def test_a_daemon_killed_after_the_transaction_leaves_the_promotion_to_its_successor(
    fake_host: FakeHost, patch: str, knobs: str
) -> None:
    async with family(fake_host, knobs) as (service, parent, (_, winner, _)):
        pass
    doomed = Doomed(fake_host, winner.id, patch)
    console = fake_host.settings.sandboxes_dir / winner.id / "console.log"
    await doomed.kill_when(lambda: b"hanging" in console.read_bytes())

    async with fake_host.service() as service:
        assert [each.id for each in await service.sandboxes.list(CALLER)] == [parent.id]
        await until_named(service, parent)
        assert await value(service, parent.id, "thought") == 1
        assert fake_host.vmm_processes() == [winner.pid]
        await clear(service, fake_host)


async def until_named(service: Host, parent: Sandbox) -> None:
    """Return once the guest has heard who it is; the successor tells it in the background."""
    async with asyncio.timeout(30.0):
        while await value(service, parent.id, "identity['hostname']") != parent.hostname:  # noqa: ASYNC110 - the event is another task's
            await asyncio.sleep(0.01)
