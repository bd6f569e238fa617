"""A running sandbox is branched within its budgets, drawn, reset, and ended in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import (
    BudgetError,
    CapacityError,
    Conflict,
    EngineError,
    EngineExited,
    InvalidRequest,
    NotFound,
)
from forkd.host import proc
from forkd.limits import FORK_COUNT_MAX
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.model.tree import TreeBudgets
from forkd.service import seeds
from forkd.service.siblings import SiblingUsers
from forkd.service.trees import stalls
from tests.support.branches import OPTIONS, branched, held
from tests.support.callers import CALLER
from tests.support.service_host import TAG, FakeHost, until

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.tree import TreeNode
    from forkd.service.host import Host

DEADLINE_S = 20.0


async def value(service: Host, sandbox: SandboxId, code: str) -> object:
    result = await service.guests.eval(CALLER, sandbox, code)
    assert result.error is None
    return result.value


def seed_of(sibling: Sandbox) -> int:
    """Return the process that holds what a sibling goes back to."""
    assert sibling.pid is not None
    (seed,) = seeds.retired_for([sibling.pid])
    return seed


async def exited(service: Host, sandbox: SandboxId) -> Sandbox:
    """Return what a sandbox is once it has ended."""
    async with asyncio.timeout(DEADLINE_S):
        async for _ in service.sandboxes.follow_console_log(CALLER, sandbox):
            pass
    return await service.sandboxes.get(CALLER, sandbox)


async def test_siblings_have_what_the_source_had_and_an_identity_of_their_own(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await value(service, source.id, "globals().update(thought=7)")

        result = await service.branches.branch(CALLER, source.id, 5, OPTIONS)
        await value(service, source.id, "globals().update(thought=8)")

        siblings = result.fork.sandboxes
        assert (len(siblings), result.fork.failures) == (5, ())
        assert result.pause_ms > 0
        assert [await value(service, each.id, "thought") for each in siblings] == [7] * 5
        assert await value(service, source.id, "thought") == 8
        for name in ("hostname", "machine_id", "boot_id"):
            everybody = (source, *siblings)
            code = f"identity['{name}']"
            assert len({await value(service, each.id, code) for each in everybody}) == 6


async def test_the_answer_says_what_the_guest_noticed(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        result = await service.branches.branch(CALLER, source.id, 1, OPTIONS)
        assert (result.stall_ms, result.stall_unknown) == (1.5, None)


@pytest.mark.parametrize("knob", ["watch=hang", "watched=hang"])
async def test_a_guest_that_does_not_answer_is_branched_all_the_same(
    fake_host: FakeHost, knob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "ANSWER_TIMEOUT_S", 0.05)
    async with held(fake_host, knob) as (service, source):
        result = await service.branches.branch(CALLER, source.id, 1, OPTIONS)

        assert (len(result.fork.sandboxes), result.stall_ms) == (1, None)
        assert "the agent did not" in (result.stall_unknown or "")
        assert await value(service, source.id, "1 + 1") == 2


async def test_siblings_and_a_snapshot_asked_for_at_once_are_of_one_instant(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await value(service, source.id, "globals().update(thought=7)")

        result = await service.branches.branch(CALLER, source.id, 2, OPTIONS, tag=parse_tag("kept"))

        assert result.snapshot is not None
        assert (result.snapshot.status, result.snapshot.parent) == (SnapshotStatus.READY, TAG)
        (fork,) = (
            await service.sandboxes.fork(CALLER, parse_tag("kept"), 1, ForkOptions())
        ).sandboxes
        everybody = (*result.fork.sandboxes, fork)
        assert [await value(service, each.id, "thought") for each in everybody] == [7, 7, 7]
        assert fork.ancestors == ()
        with pytest.raises(Conflict, match="kept"):
            await service.branches.branch(CALLER, source.id, 2, OPTIONS, tag=parse_tag("kept"))
        assert len(await service.sandboxes.list(CALLER)) == 4
        for each in everybody:
            await service.sandboxes.delete(CALLER, each.id)
        await service.snapshots.delete(CALLER, parse_tag("kept"))


async def test_a_seed_lives_for_its_siblings_without_a_folder_and_ends_with_the_last(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        siblings = await branched(service, source.id, 3)

        seed = seed_of(siblings[0])
        assert {seed_of(each) for each in siblings} == {seed}
        assert len(list(fake_host.settings.zygotes_dir.iterdir())) == 1
        for each in siblings[:2]:
            await service.sandboxes.delete(CALLER, each.id)
        await service.sandboxes.delete(CALLER, source.id)
        await service.sandboxes.reset(CALLER, siblings[2].id, deadline_s=5.0)

        await service.sandboxes.delete(CALLER, siblings[2].id)

        await until(lambda: seed not in proc.processes())


async def test_a_seed_of_which_nothing_was_forked_ends_at_once(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        before = fake_host.vmm_processes()

        await service.branches.branch(CALLER, source.id, 0, OPTIONS, tag=parse_tag("alone"))

        assert fake_host.vmm_processes() == before
        await service.snapshots.delete(CALLER, parse_tag("alone"))


async def test_a_sibling_knows_its_ancestors_and_the_instant_that_it_shares(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        before = datetime.now(UTC)
        result = await service.branches.branch(CALLER, source.id, 2, OPTIONS)
        (child, twin) = result.fork.sandboxes
        (leaf,) = await branched(service, child.id)

        assert (child.tag, child.ancestors) == (TAG, (source.id,))
        assert child.branched_at == twin.branched_at == result.branched_at
        assert before < result.branched_at < datetime.now(UTC)
        assert (leaf.ancestors, leaf.root) == ((source.id, child.id), source.id)
        assert (source.ancestors, source.branched_at) == ((), None)


async def test_lineage_and_its_instants_survive_the_daemon(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        await branched(service, source.id, 2)
        before = await service.sandboxes.list(CALLER)

    async with fake_host.service() as service:
        assert set(await service.sandboxes.list(CALLER)) == set(before)
        for each in before:
            await service.sandboxes.delete(CALLER, each.id)
        assert fake_host.left_over() == []


async def test_a_sibling_that_fails_is_reported_and_the_others_live(fake_host: FakeHost) -> None:
    async with held(fake_host, "seed=fail:3") as (service, source):
        result = await service.branches.branch(CALLER, source.id, 7, OPTIONS)

        assert (len(result.fork.sandboxes), len(result.fork.failures)) == (5, 2)
        assert {failure.stage for failure in result.fork.failures} == {"agent"}
        assert len(fake_host.left_over()) == 6


async def test_a_seed_that_names_another_machine_as_its_child_is_not_believed(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host, "seed=lie") as (service, source):
        (sibling,) = await branched(service, source.id)
        assert sibling.pid is not None

        assert proc.parent(sibling.pid) == seed_of(sibling)
        assert await value(service, sibling.id, "1 + 1") == 2


async def test_a_branch_that_fails_before_anything_is_made_gives_back_what_it_reserved(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        owner = service.sandboxes.roster.find(source.id)
        assert owner is not None
        users = SiblingUsers(extents=((7, 1),), namespace=-1)  # its namespace was closed meanwhile
        owner.lease.siblings = users
        for _ in range(2):
            with pytest.raises(Conflict, match="deleted while it was being branched"):
                await branched(service, source.id)
        owner.lease.siblings = None


async def test_all_or_nothing_leaves_only_the_source_when_a_sibling_fails(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host, "seed=fail:3") as (service, source):
        with pytest.raises(EngineError, match="2 of 7 children failed"):
            await service.branches.branch(
                CALLER, source.id, 7, replace(OPTIONS, all_or_nothing=True)
            )

        assert await service.sandboxes.list(CALLER) == (source,)
        assert await value(service, source.id, "answer") == 42


async def test_a_machine_that_cannot_be_branched_goes_on_and_nothing_was_made(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host, "branch=fail") as (service, source):
        with pytest.raises(CapacityError, match="no space"):
            await service.branches.branch(CALLER, source.id, 2, OPTIONS)

        assert await service.sandboxes.list(CALLER) == (source,)
        assert await value(service, source.id, "answer") == 42
        assert len(list(fake_host.settings.zygotes_dir.iterdir())) == 1


async def test_a_machine_that_dies_while_it_is_branched_is_exited(fake_host: FakeHost) -> None:
    async with held(fake_host, "branch=die") as (service, source):
        with pytest.raises(EngineExited):
            await service.branches.branch(CALLER, source.id, 2, OPTIONS)

        assert (await exited(service, source.id)).state is SandboxState.EXITED
        assert len(await service.sandboxes.list(CALLER)) == 1


async def test_branches_of_one_source_at_once_all_succeed(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(branched(service, source.id, 2)) for _ in range(4)]

        assert len({each.id for task in tasks for each in task.result()}) == 8


async def test_a_client_that_goes_away_in_a_branch_leaves_no_sibling(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        branch = asyncio.ensure_future(service.branches.branch(CALLER, source.id, 20, OPTIONS))
        await until(lambda: len(fake_host.left_over()) > 1)

        branch.cancel()

        await until(lambda: len(fake_host.left_over()) == 1)
        assert await value(service, source.id, "answer") == 42


@pytest.mark.parametrize("count", [0, FORK_COUNT_MAX + 1])
async def test_a_count_out_of_range_is_refused(fake_host: FakeHost, count: int) -> None:
    async with held(fake_host) as (service, source):
        with pytest.raises(InvalidRequest, match="n must be"):
            await service.branches.branch(CALLER, source.id, count, OPTIONS)


async def test_only_a_sandbox_that_runs_is_branched_or_reset(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        with contextlib.suppress(EngineExited):
            await service.guests.eval(CALLER, source.id, "die")
        await exited(service, source.id)

        with pytest.raises(Conflict, match="exited"):
            await service.branches.branch(CALLER, source.id, 1, OPTIONS)
        with pytest.raises(Conflict, match="exited"):
            await service.sandboxes.reset(CALLER, source.id, deadline_s=1.0)
        for ask in (
            lambda id_: service.branches.branch(CALLER, id_, 1, OPTIONS),
            lambda id_: service.sandboxes.reset(CALLER, id_, deadline_s=1.0),
        ):
            with pytest.raises(NotFound):
                await ask(new_sandbox_id())


def with_budgets(host: FakeHost, budgets: TreeBudgets) -> FakeHost:
    return FakeHost(host.folder, replace(host.settings, budgets=budgets))


async def test_a_tree_at_its_budget_of_live_descendants_grows_no_more(fake_host: FakeHost) -> None:
    async with held(with_budgets(fake_host, TreeBudgets(live_max=3))) as (service, source):
        (child, _) = await branched(service, source.id, 2)
        (last,) = await branched(service, child.id)

        for each in (source, last):
            with pytest.raises(BudgetError, match="more than 3"):
                await service.branches.branch(CALLER, each.id, 1, OPTIONS)
        assert len(fake_host.left_over()) == 4

        await service.sandboxes.delete(CALLER, last.id)
        await branched(service, source.id)


async def test_branches_at_once_share_a_budget(fake_host: FakeHost) -> None:
    async with held(with_budgets(fake_host, TreeBudgets(live_max=3))) as (service, source):
        branches = [service.branches.branch(CALLER, source.id, 2, OPTIONS) for _ in range(3)]
        results = await asyncio.gather(*branches, return_exceptions=True)

        assert [isinstance(each, BudgetError) for each in results].count(False) == 1
        assert len(await service.sandboxes.list(CALLER)) == 3


async def test_a_tree_at_its_depth_grows_no_deeper_but_wider(fake_host: FakeHost) -> None:
    async with held(with_budgets(fake_host, TreeBudgets(depth_max=2))) as (service, source):
        (child,) = await branched(service, source.id)
        (leaf,) = await branched(service, child.id)

        with pytest.raises(BudgetError, match="2 branches below its root"):
            await service.branches.branch(CALLER, leaf.id, 1, OPTIONS)
        await branched(service, child.id)


async def test_a_tree_that_holds_too_much_memory_grows_no_more(fake_host: FakeHost) -> None:
    async with held(with_budgets(fake_host, TreeBudgets(private_mib_max=1))) as (service, source):
        await value(service, source.id, "globals().update(much=bytearray(4 << 20))")

        with pytest.raises(BudgetError, match="of the 1 MiB"):
            await service.branches.branch(CALLER, source.id, 1, OPTIONS)
        assert await service.sandboxes.list(CALLER) == (source,)


async def test_what_a_retired_seed_alone_holds_counts(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held(with_budgets(fake_host, TreeBudgets(private_mib_max=1))) as (service, source):
        seed: int | None = None

        def bytes_of(pid: int) -> int:
            return 2 << 20 if pid == seed else 0

        monkeypatch.setattr(proc, "anonymous_bytes", bytes_of)
        monkeypatch.setattr(proc, "private_bytes", bytes_of)
        (child,) = await branched(service, source.id)
        seed = seed_of(child)

        with pytest.raises(BudgetError, match="of the 1 MiB"):
            await service.branches.branch(CALLER, source.id, 1, OPTIONS)
        await service.sandboxes.delete(CALLER, child.id)
        await until(lambda: seed not in proc.processes())
        await branched(service, source.id)


def shape(node: TreeNode) -> tuple[str, list[Any]]:
    """Return who is below whom; what they hold changes while they run."""
    return node.id, [shape(each) for each in node.children]


async def test_the_tree_shows_who_is_below_whom_what_they_hold_and_who_is_gone(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        (other,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        (child,) = await branched(service, source.id)
        (leaf,) = await branched(service, child.id)
        await service.sandboxes.delete(CALLER, child.id)

        first, second = await service.trees.draw(CALLER)

        assert (first.id, second.id) == (source.id, other.id)
        assert (first.private_bytes or 0) > 0
        (gone,) = first.children
        assert (gone.id, gone.sandbox, gone.private_bytes) == (child.id, None, None)
        assert [each.sandbox for each in gone.children] == [leaf]
        of_leaf, of_source = [
            await service.trees.draw(CALLER, each) for each in (leaf.id, source.id)
        ]
        assert [*map(shape, of_leaf)] == [*map(shape, of_source)] == [shape(first)]
        assert [each.id for each in await service.trees.draw(CALLER, other.id)] == [other.id]
        with pytest.raises(NotFound):
            await service.trees.draw(CALLER, new_sandbox_id())


async def test_a_sandbox_that_has_lived_as_long_as_it_was_given_is_ended(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        result = await service.branches.branch(CALLER, source.id, 1, replace(OPTIONS, ttl_s=0.5))
        (child,) = result.fork.sandboxes
        assert child.expires_at == child.created_at + timedelta(seconds=0.5)

        found = await exited(service, child.id)
        await until(lambda: child.pid not in fake_host.vmm_processes())

        assert (found.state, found.exit_reason) == (SandboxState.EXITED, "ttl")
        assert (await service.sandboxes.get(CALLER, source.id)).state is SandboxState.RUNNING


async def test_a_sandbox_whose_time_came_without_a_daemon_is_ended_by_the_next(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (
            await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions(ttl_s=1.0))
        ).sandboxes
        assert sandbox.state is SandboxState.RUNNING
    await until(lambda: datetime.now(UTC) > (sandbox.expires_at or datetime.now(UTC)))

    async with fake_host.service() as service:
        assert (await exited(service, sandbox.id)).exit_reason == "ttl"
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_a_reset_sandbox_is_at_its_fork_point_with_its_id_and_can_be_reset_again(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        machine_id = await value(service, source.id, "identity['machine_id']")
        for thought in range(3):
            await value(service, source.id, f"globals().update(answer={thought})")
            boot_id = await value(service, source.id, "identity['boot_id']")

            assert await service.sandboxes.reset(CALLER, source.id, deadline_s=5.0) > 0

            assert await value(service, source.id, "answer") == 42
            assert await value(service, source.id, "identity['hostname']") == source.id
            assert await value(service, source.id, "identity['machine_id']") == machine_id
            assert await value(service, source.id, "identity['boot_id']") != boot_id
        assert await service.sandboxes.get(CALLER, source.id) == source


async def test_a_sibling_goes_back_to_the_instant_of_its_branch(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        await value(service, source.id, "globals().update(thought=7)")
        (child,) = await branched(service, source.id)
        await value(service, child.id, "globals().update(thought=8)")
        boot_id = await value(service, child.id, "identity['boot_id']")

        await service.sandboxes.reset(CALLER, child.id, deadline_s=5.0)

        assert await value(service, child.id, "thought") == 7
        assert await value(service, child.id, "identity['boot_id']") != boot_id
        assert await service.sandboxes.get(CALLER, child.id) == child


async def test_a_sibling_goes_back_under_the_next_daemon_too(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        await value(service, source.id, "globals().update(thought=7)")
        (child,) = await branched(service, source.id)
        await value(service, child.id, "globals().update(thought=8)")

    async with fake_host.service() as service:
        await service.sandboxes.reset(CALLER, child.id, deadline_s=5.0)

        assert await value(service, child.id, "thought") == 7
        for each in (source, child):
            await service.sandboxes.delete(CALLER, each.id)
        await until(lambda: fake_host.vmm_processes() == [])


async def test_a_branch_whose_seed_was_killed_is_not_reset_and_goes_on(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await value(service, source.id, "globals().update(thought=7)")
        (child,) = await branched(service, source.id)
        seed = seed_of(child)
        os.kill(seed, signal.SIGKILL)
        await until(lambda: seed not in proc.processes())

        with pytest.raises(Conflict, match="the seed has ended"):
            await service.sandboxes.reset(CALLER, child.id, deadline_s=5.0)

        assert await value(service, child.id, "thought") == 7
        assert await service.sandboxes.get(CALLER, child.id) == child


async def test_a_machine_that_dies_while_it_is_reset_is_exited(fake_host: FakeHost) -> None:
    async with held(fake_host, "reset=die") as (service, source):
        with pytest.raises(EngineExited):
            await service.sandboxes.reset(CALLER, source.id, deadline_s=5.0)

        assert (await exited(service, source.id)).state is SandboxState.EXITED


async def test_a_sandbox_is_deleted_once_what_is_done_to_it_is_done(fake_host: FakeHost) -> None:
    async with held(fake_host) as (service, source):
        branch = asyncio.ensure_future(service.branches.branch(CALLER, source.id, 3, OPTIONS))
        await until(lambda: len(fake_host.left_over()) > 1)

        await service.sandboxes.delete(CALLER, source.id)

        with contextlib.suppress(NotFound, EngineExited):
            assert len((await branch).fork.sandboxes) == 3
        with pytest.raises(NotFound):
            await service.sandboxes.get(CALLER, source.id)
