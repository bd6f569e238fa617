"""A machine that is baked has what a sandbox may have: of its tenant's quotas, and of the host."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.cgroups.tree import CgroupTree
from forkd.errors import BuildError, CapacityError, ForkdError, InvalidRequest, QuotaExceeded
from forkd.host import cgroupfs, proc
from forkd.model.caller import Caller, Scope, Tenant, local_caller
from forkd.model.ids import parse_tag
from forkd.model.progress import Progress
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import SnapshotRequest
from forkd.model.tenant import Amounts, Quotas
from forkd.service.admission import Admission
from forkd.service.allowance import allow, limits_of
from forkd.service.settings import AdmissionPolicy
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ADMIN = local_caller()
TEAM = Tenant("team")
MEMBER = Caller("token:member", TEAM, frozenset({Scope.READ, Scope.RUN, Scope.SNAPSHOTS}), "test")
GUEST_MIB = 128
DISK_MIB = 100
"""Of the limit of disks; the recipe's own disk is smaller."""


def limited(host: FakeHost) -> FakeHost:
    """Return the host with another limit of disks."""
    disks = replace(host.settings.disks, limit_mib=DISK_MIB)
    return replace(host, settings=replace(host.settings, disks=disks))


async def used(host: Host) -> Amounts:
    usage = {each.name: each.used for each in await host.tenants.list(ADMIN)}
    return usage.get(TEAM, Amounts())


@contextlib.asynccontextmanager
async def booting(fake_host: FakeHost, host: Host) -> AsyncIterator[None]:
    """Have a machine of the team's that boots for ever, for the block."""
    recipe = fake_host.recipe(knobs="boot=never", name="never")
    events = host.snapshots.bake(MEMBER, SnapshotRequest(parse_tag("never"), recipe))
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, Progress) and event.stage == "boot":
                break
        await until(lambda: fake_host.vmm_processes() != [])
        yield


@pytest.mark.parametrize(
    ("name", "needed"), [("vcpus", 1), ("memory_mib", GUEST_MIB), ("disk_mib", DISK_MIB)]
)
async def test_a_bake_beyond_a_quota_is_refused_before_its_machine_starts(
    fake_host: FakeHost, name: str, needed: int
) -> None:
    fake_host = limited(fake_host)
    async with fake_host.service() as host:
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(**{name: needed - 1}))
        with pytest.raises(QuotaExceeded) as refused:
            await fake_host.bake(host, fake_host.recipe(knobs="boot=exit"), caller=MEMBER)
        assert (refused.value.context["quota"], refused.value.context["asked"]) == (name, needed)
        assert await host.snapshots.list(MEMBER) == ()

        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(**{name: needed}))
        await fake_host.bake(host, fake_host.recipe(), caller=MEMBER)
        assert replace(await used(host), snapshot_mib=0) == Amounts()


async def test_the_host_has_room_for_the_machine_of_a_bake_or_refuses_it(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "memory_bytes", lambda: (GUEST_MIB << 20, GUEST_MIB << 20))
    for factor, room in ((1.0, True), (0.99, False)):
        policy = AdmissionPolicy(memory_reserve_mib=1, memory_overcommit=factor)
        made = replace(fake_host, settings=replace(fake_host.settings, admission=policy))
        async with made.service() as host:
            if room:
                await made.bake(host, made.recipe())
                continue
            with pytest.raises(CapacityError, match=f"{GUEST_MIB} MiB of it new"):
                await made.bake(host, made.recipe(), tag="another")


async def refusal(fake_host: FakeHost, host: Host) -> ForkdError:
    """Bake for the team; return the refusal, which comes before anything is built or kept."""
    with pytest.raises(ForkdError) as refused:
        await fake_host.bake(host, fake_host.recipe(knobs="boot=exit"), caller=MEMBER)
    assert list((fake_host.settings.cache_dir / "images").iterdir()) == []
    assert await host.snapshots.list(MEMBER) == ()
    assert fake_host.left_over() == []
    return refused.value


async def test_a_recipe_of_more_memory_than_the_host_has_is_refused_before_it_is_built(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as host:
        total_bytes = (GUEST_MIB << 20) - 1
        monkeypatch.setattr(proc, "memory_bytes", lambda: (total_bytes, 100 << 20))
        monkeypatch.setattr(Admission, "check", lambda *_: None)

        error = await refusal(fake_host, host)

        assert isinstance(error, InvalidRequest)
        assert str(error) == (
            "the recipe fake asks for 128 MiB of memory (machine.memory_mib), but this host has "
            "127 MiB, and 100 MiB of it available; lower machine.memory_mib, bake the recipe on a "
            "larger host, or allow guests that do not use all of theirs (FORKD_MEMORY_OVERCOMMIT)"
        )
        assert error.context == {"field": "machine.memory_mib"}
        monkeypatch.setattr(proc, "memory_bytes", lambda: (GUEST_MIB << 20, 100 << 20))
        await fake_host.bake(host, fake_host.recipe(), caller=MEMBER)


async def test_a_guest_has_more_memory_than_the_host_as_far_as_guests_together_may(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    total_bytes = (GUEST_MIB << 20) // 4
    monkeypatch.setattr(proc, "memory_bytes", lambda: (total_bytes, total_bytes))
    for factor, room in ((4.0, True), (3.99, False)):
        policy = AdmissionPolicy(memory_reserve_mib=1, memory_overcommit=factor)
        made = replace(fake_host, settings=replace(fake_host.settings, admission=policy))
        async with made.service() as host:
            if room:
                await made.bake(host, made.recipe(), caller=MEMBER)
                continue
            with pytest.raises(InvalidRequest, match="FORKD_MEMORY_OVERCOMMIT"):
                await made.bake(host, made.recipe(), caller=MEMBER, tag="another")


async def test_a_recipe_of_more_memory_than_its_tenant_may_have_is_refused_before_it_is_built(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(memory_mib=GUEST_MIB - 1))

        error = await refusal(fake_host, host)

        assert isinstance(error, QuotaExceeded)
        assert str(error) == (
            "the recipe fake asks for 128 MiB of memory (machine.memory_mib): the tenant team may "
            "have memory_mib up to 127: 0 in use, and 128 more asked for; or lower "
            "machine.memory_mib"
        )
        assert error.context["limit"] == GUEST_MIB - 1


async def test_a_recipe_that_would_promise_too_much_is_refused_before_it_is_built(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proc, "memory_bytes", lambda: (GUEST_MIB << 20, GUEST_MIB << 20))
    policy = AdmissionPolicy(memory_reserve_mib=1, memory_overcommit=0.99)
    made = replace(fake_host, settings=replace(fake_host.settings, admission=policy))
    async with made.service() as host:
        error = await refusal(made, host)

        assert isinstance(error, CapacityError)
        assert str(error).startswith("the recipe fake asks for 128 MiB of memory (machine.")
        assert "of at most 126 MiB (FORKD_MEMORY_OVERCOMMIT=0.99)" in str(error)
        assert str(error).endswith("; or lower machine.memory_mib")


async def test_a_snapshot_that_could_be_too_large_is_not_baked(fake_host: FakeHost) -> None:
    """Its disk is smaller than the limit of disks."""
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        most_mib = GUEST_MIB + -(-(await host.snapshots.get(ADMIN, TAG)).disk_bytes >> 20)
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=most_mib - 1))
        with pytest.raises(QuotaExceeded):
            await fake_host.bake(host, fake_host.recipe(), "another", caller=MEMBER)
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=most_mib))
        made = await fake_host.bake(host, fake_host.recipe(), "another", caller=MEMBER)
        assert (await used(host)).snapshot_mib == -(-made.stored_bytes >> 20)


@pytest.mark.soak(only=True)
@pytest.mark.needs("root", "cgroup2")
async def test_the_machine_of_a_bake_is_in_a_group_with_the_limits_of_a_fork(
    fake_host: FakeHost,
) -> None:
    root = cgroupfs.CGROUP_ROOT / "forkd-test"
    tree = CgroupTree(root)
    settings = replace(fake_host.settings, cgroups=True, cgroup_root=root)
    fake_host = replace(limited(fake_host), settings=settings)
    async with fake_host.service() as host:
        snapshot = await fake_host.bake(host, fake_host.recipe(), caller=MEMBER)
        async with booting(fake_host, host):
            (name,) = tree.names()
            (pid,) = fake_host.vmm_processes()
            await until(lambda: cgroupfs.processes(tree.path(name)) == {pid})
            limits = limits_of(allow(ForkOptions(), snapshot))
            assert limits is not None
            read = {
                each: (tree.path(name) / each).read_text().split()[0]
                for each in ("memory.max", "pids.max", "cpu.max")
            }
            assert read == {
                "memory.max": str(limits.memory_bytes),
                "pids.max": str(limits.pids),
                "cpu.max": str(int((limits.cpus or 0) * 100_000)),
            }
            assert (await used(host)).memory_mib == GUEST_MIB
            assert (await used(host)).vcpus == 1
        assert tree.names() == ()
        assert replace(await used(host), snapshot_mib=0) == Amounts()

        recipe = fake_host.recipe(knobs="boot=hungry", name="hungry")
        with pytest.raises(BuildError, match="out of memory: its own limit had no more"):
            await fake_host.bake(host, recipe, "hungry", caller=MEMBER)
        assert tree.names() == ()
        assert fake_host.left_over() == []
