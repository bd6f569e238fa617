"""What a tenant may have is checked before anything is made, however many ask at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import ForkdError, QuotaExceeded
from forkd.model.caller import Caller, Scope, Tenant, local_caller
from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.tenant import QUOTAS, Quotas, QuotasChange
from tests.support.chains import let_go, write
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import Tag
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ADMIN = local_caller()
A, B = parse_tag("a"), parse_tag("b")
TEAM = Tenant("team")
MEMBER = Caller("token:member", TEAM, frozenset({Scope.READ, Scope.RUN, Scope.SNAPSHOTS}), "test")
AT_ONCE = 200
MUCH_BYTES = 3 << 20


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


async def used(host: Host, name: str = "sandboxes") -> int:
    found = [each.used for each in await host.tenants.list(MEMBER)]
    return getattr(found[0], name) if found else 0


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
    assert await used(host) == 10


async def test_what_ends_counts_no_more_and_a_failed_fork_never_did(host: Host) -> None:
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=2))
    one, _ = await fork(host, 2)
    with pytest.raises(QuotaExceeded):
        await fork(host)

    await host.sandboxes.delete(MEMBER, one.id)

    with pytest.raises(ForkdError):
        await host.sandboxes.fork(MEMBER, parse_tag("none-such"), 1, ForkOptions())
    assert await used(host) == 1
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
    most_mib = await most_of_a_link(host)
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=most_mib))
    link = await host.branches.snapshot(MEMBER, source.id, parse_tag("link"), wait=True)
    (usage,) = await host.tenants.list(MEMBER)
    assert usage.used.snapshot_mib == -(-link.stored_bytes // (1 << 20))

    with pytest.raises(QuotaExceeded):  # it might have as much as all of memory, and of the disk
        await host.branches.snapshot(MEMBER, source.id, parse_tag("another"), wait=True)
    assert [each.tag for each in await host.snapshots.list(MEMBER)] == ["link", TAG]
    await host.sandboxes.delete(MEMBER, source.id)
    await host.snapshots.delete(MEMBER, parse_tag("link"))
    (usage,) = await host.tenants.list(MEMBER)
    assert usage.used.snapshot_mib == 0


async def most_of_a_link(host: Host) -> int:
    """Return the most that a link over the host's snapshot can take, in MiB."""
    base = await host.snapshots.get(ADMIN, TAG)
    return -(-(base.memory_bytes + base.disk_bytes) >> 20)


async def test_what_was_written_and_is_more_than_it_could_be_is_no_snapshot(
    host: Host, fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has taken a VMM over can write what they like."""
    monkeypatch.setattr("forkd.service.snapshots.writing.most_stored_bytes", lambda *_: 1)
    (source,) = await fork(host)
    await write(host, source.id, "/much", "x" * MUCH_BYTES)
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=MUCH_BYTES >> 20))

    with pytest.raises(QuotaExceeded):
        await host.branches.snapshot(MEMBER, source.id, parse_tag("link"), wait=True)

    assert [each.tag for each in await host.snapshots.list(MEMBER)] == [TAG]
    assert await used(host, "snapshot_mib") == 0
    await host.sandboxes.delete(MEMBER, source.id)
    assert fake_host.left_over() == []


async def test_a_link_that_would_become_too_large_is_not_compacted(host: Host) -> None:
    """What is under it is another tenant's, and shared."""
    link = parse_tag("link")
    (above,) = (await host.sandboxes.fork(ADMIN, TAG, 1, ForkOptions())).sandboxes
    await write(host, above.id, "/much", "x" * MUCH_BYTES)
    much = await host.branches.snapshot(ADMIN, above.id, parse_tag("much"), wait=True)
    await host.snapshots.share(ADMIN, much.tag, shared=True)
    (source,) = (await host.sandboxes.fork(MEMBER, much.tag, 1, ForkOptions())).sandboxes
    made = await host.branches.snapshot(MEMBER, source.id, link, wait=True)
    await host.sandboxes.delete(MEMBER, source.id)
    whole_mib = -(-(await host.snapshots.get(MEMBER, link)).chain_bytes >> 20)
    link_mib = await used(host, "snapshot_mib")
    assert whole_mib > link_mib

    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=whole_mib - 1))
    with pytest.raises(QuotaExceeded):
        await host.chains.compact(MEMBER, link)
    assert await host.snapshots.get(MEMBER, link) == replace(made, sandboxes=0)
    assert await used(host, "snapshot_mib") == link_mib

    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(snapshot_mib=whole_mib))
    flat = await host.chains.compact(MEMBER, link)
    assert await used(host, "snapshot_mib") == -(-flat.stored_bytes >> 20)


async def test_a_zygote_counts_for_whose_snapshot_it_is_until_somebody_needs_the_room(
    host: Host, fake_host: FakeHost
) -> None:
    own, other = parse_tag("own"), parse_tag("other")
    for tag in (own, other):
        await fake_host.bake(host, fake_host.recipe(), tag, caller=MEMBER)
    guest_mib = (await host.snapshots.get(MEMBER, own)).memory_bytes >> 20
    await host.tenants.set_quotas(ADMIN, TEAM, Quotas(memory_mib=guest_mib + 1))

    async def forked(tag: Tag) -> Sandbox:
        return (await host.sandboxes.fork(MEMBER, tag, 1, ForkOptions())).sandboxes[0]

    first = await forked(own)
    assert await used(host, "memory_mib") == guest_mib + 1
    with pytest.raises(QuotaExceeded):
        await forked(other)
    await host.sandboxes.delete(MEMBER, first.id)
    assert await used(host, "memory_mib") == 1

    second = await forked(other)  # the zygote that nobody uses gives way

    assert await used(host, "memory_mib") == guest_mib + 1
    await host.sandboxes.delete(MEMBER, second.id)
    await host.snapshots.delete(MEMBER, other)
    assert await used(host, "memory_mib") == 0


async def test_the_seed_of_a_branch_counts_once_as_long_as_there_is_a_sibling(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        await host.snapshots.share(ADMIN, TAG, shared=True)
        guest_mib = (await host.snapshots.get(MEMBER, TAG)).memory_bytes >> 20
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(memory_mib=4 * guest_mib))
        (source,) = await fork(host)
        with pytest.raises(QuotaExceeded):  # three siblings and their seed
            await host.branches.branch(MEMBER, source.id, 3, BranchOptions())
        made = await host.branches.branch(MEMBER, source.id, 2, BranchOptions())
        assert await used(host, "memory_mib") == 4 * guest_mib

    async with fake_host.service() as host:
        assert await used(host, "memory_mib") == 4 * guest_mib
        one, other = made.fork.sandboxes
        for sandbox, left in ((one, 3), (other, 1), (source, 0)):
            await host.sandboxes.delete(MEMBER, sandbox.id)
            assert await used(host, "memory_mib") == left * guest_mib


async def test_a_seed_that_writes_counts_until_it_has_written(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe(knobs="link=wait"))
        await host.snapshots.share(ADMIN, TAG, shared=True)
        guest_mib = (await host.snapshots.get(MEMBER, TAG)).memory_bytes >> 20
        (source,) = await fork(host)
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(memory_mib=2 * guest_mib))

        await host.branches.snapshot(MEMBER, source.id, A, wait=False)

        assert await used(host, "memory_mib") == 2 * guest_mib
        with pytest.raises(QuotaExceeded, match="memory_mib"):
            await host.branches.snapshot(MEMBER, source.id, B, wait=False)
        let_go(fake_host)
        (sibling,) = (await host.sandboxes.fork(ADMIN, A, 1, ForkOptions())).sandboxes
        assert (
            await used(host, "memory_mib") < 2 * guest_mib
        )  # the source, and a little for a zygote
        for each in (source, sibling):
            await host.sandboxes.delete(ADMIN, each.id)


async def test_quotas_that_are_changed_at_once_are_all_kept_also_by_the_next_daemon(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await host.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=1, vcpus=9))
        changes = [QuotasChange({name: 5}) for name in QUOTAS if name != "vcpus"]
        changes.append(QuotasChange({"vcpus": None}))

        await asyncio.gather(*(host.tenants.change_quotas(ADMIN, TEAM, each) for each in changes))

        expected = Quotas(**{**dict.fromkeys(QUOTAS, 5), "vcpus": None})
        assert [each.quotas for each in await host.tenants.list(MEMBER)] == [expected]

    async with fake_host.service() as host:
        assert [each.quotas for each in await host.tenants.list(MEMBER)] == [expected]


async def test_the_next_daemon_counts_what_it_adopts_and_knows_quotas(fake_host: FakeHost) -> None:
    async with fake_host.service() as first:
        await fake_host.bake(first, fake_host.recipe())
        await first.snapshots.share(ADMIN, TAG, shared=True)
        await first.tenants.set_quotas(ADMIN, TEAM, Quotas(sandboxes=2))
        await fork(first, 2)
    async with fake_host.service() as second:
        assert await used(second) == 2
        with pytest.raises(QuotaExceeded):
            await fork(second)
        for each in await second.sandboxes.list(ADMIN):
            await second.sandboxes.delete(ADMIN, each.id)
