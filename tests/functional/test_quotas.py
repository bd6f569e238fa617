"""What a tenant may have is checked before anything is made, however many ask at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from forkd.errors import ForkdError, QuotaExceeded
from forkd.model.caller import Caller, Scope, Tenant, local_caller
from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.tenant import Quotas
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ADMIN = local_caller()
TEAM = Tenant("team")
MEMBER = Caller("token:member", TEAM, frozenset({Scope.READ, Scope.RUN, Scope.SNAPSHOTS}), "test")
AT_ONCE = 200


@pytest.fixture
async def host(fake_host: FakeHost) -> AsyncIterator[Host]:
    """A host whose only snapshot every tenant may use."""
    async with fake_host.service() as opened:
        await fake_host.bake(opened, fake_host.recipe())
        await opened.snapshots.share(ADMIN, TAG, shared=True)
        yield opened
        for each in await opened.sandboxes.list(ADMIN):
            await opened.sandboxes.delete(ADMIN, each.id)


async def fork(host: Host, count: int = 1, **limits: int) -> tuple[Sandbox, ...]:
    options = ForkOptions(**limits)  # type: ignore[arg-type]  # ints are what they take
    return (await host.sandboxes.fork(MEMBER, TAG, count, options)).sandboxes


async def used(host: Host) -> dict[str, int]:
    (usage,) = await host.tenants.list(MEMBER)
    return {name: getattr(usage.used, name) for name in ("sandboxes", "vcpus", "memory_mib")}


@pytest.mark.parametrize(
    ("quotas", "name"),
    [
        (Quotas(sandboxes=2), "sandboxes"),
        (Quotas(vcpus=2), "vcpus"),
        (Quotas(memory_mib=2 * 64), "memory_mib"),
        (Quotas(disk_mib=2 * 100), "disk_mib"),
        (Quotas(forks_per_minute=2), "forks_per_minute"),
    ],
)
async def test_one_more_than_a_quota_is_refused_with_what_is_in_use(
    host: Host, fake_host: FakeHost, quotas: Quotas, name: str
) -> None:
    snapshot = await host.snapshots.get(MEMBER, TAG)
    each = {"memory_mib": snapshot.memory_bytes >> 20, "vcpus": snapshot.vcpus}.get(name, 1)
    limits = {"disk_limit_mib": 100}
    if name in {"memory_mib", "vcpus"}:
        quotas = Quotas(**{name: 2 * each})
    await host.tenants.set_quotas(ADMIN, TEAM, quotas)
    await fork(host, 2, **limits)
    before = fake_host.vmm_processes()

    with pytest.raises(QuotaExceeded) as refused:
        await fork(host, 1, **limits)

    limit = getattr(quotas, name)
    context = refused.value.context
    assert {each: context[each] for each in ("quota", "limit", "used")} == {
        "quota": name, "limit": limit, "used": limit,
    }  # fmt: skip
    assert f"up to {limit}" in str(refused.value)
    assert fake_host.vmm_processes() == before


async def test_two_hundred_at_once_get_exactly_what_there_is(host: Host) -> None:
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=10))

    ended = await asyncio.gather(*(fork(host) for _ in range(AT_ONCE)), return_exceptions=True)

    refused = [each for each in ended if isinstance(each, QuotaExceeded)]
    assert len(refused) == AT_ONCE - 10
    assert len(await host.sandboxes.list(MEMBER)) == 10
    assert (await used(host))["sandboxes"] == 10


async def test_what_ends_counts_no_more_and_a_failed_fork_never_did(host: Host) -> None:
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=2))
    one, _ = await fork(host, 2)
    with pytest.raises(QuotaExceeded):
        await fork(host)

    await host.sandboxes.delete(MEMBER, one.id)

    with pytest.raises(ForkdError):
        await host.sandboxes.fork(MEMBER, parse_tag("none-such"), 1, ForkOptions())
    assert (await used(host))["sandboxes"] == 1
    await fork(host)
    await host.tenants.remove_quotas(ADMIN, TEAM)
    await fork(host, 3)


async def test_siblings_count_for_the_tenant_of_their_source(host: Host) -> None:
    (source,) = await fork(host)
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=2))

    made = await host.branches.branch(ADMIN, source.id, 1, BranchOptions())

    assert made.fork.sandboxes[0].owner.tenant == TEAM
    with pytest.raises(QuotaExceeded):
        await host.branches.branch(ADMIN, source.id, 1, BranchOptions())


async def test_stored_snapshots_are_counted_before_and_after_they_are_written(host: Host) -> None:
    (source,) = await fork(host)
    memory_mib = (await host.snapshots.get(MEMBER, TAG)).memory_bytes >> 20
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=memory_mib))
    link = await host.branches.snapshot(MEMBER, source.id, parse_tag("link"), wait=True)
    (usage,) = await host.tenants.list(MEMBER)
    assert usage.used.snapshot_mib == -(-link.stored_bytes // (1 << 20))

    with pytest.raises(QuotaExceeded):  # it might have as much as all of memory
        await host.branches.snapshot(MEMBER, source.id, parse_tag("another"), wait=True)
    assert [each.tag for each in await host.snapshots.list(MEMBER)] == ["link", TAG]
    await host.sandboxes.delete(MEMBER, source.id)
    await host.snapshots.delete(MEMBER, parse_tag("link"))
    (usage,) = await host.tenants.list(MEMBER)
    assert usage.used.snapshot_mib == 0


async def test_the_next_daemon_counts_what_it_adopts_and_knows_quotas(fake_host: FakeHost) -> None:
    async with fake_host.service() as first:
        await fake_host.bake(first, fake_host.recipe())
        await first.snapshots.share(ADMIN, TAG, shared=True)
        await first.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=2))
        await fork(first, 2)
    async with fake_host.service() as second:
        assert (await used(second))["sandboxes"] == 2
        with pytest.raises(QuotaExceeded):
            await fork(second)
        for each in await second.sandboxes.list(ADMIN):
            await second.sandboxes.delete(ADMIN, each.id)
