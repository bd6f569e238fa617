"""Which addresses sandboxes have, over a fake VMM and real taps: IPv6 if the guest can."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, HostError
from forkd.host import netlink, nftables
from forkd.model.network import HOST, NetworkChange
from forkd.model.sandbox import BranchOptions, ForkOptions, NewLimits, SandboxState
from forkd.network import rules, taps
from forkd.network.walls import Walls
from forkd.service.leases import Leases
from forkd.service.names import choose
from forkd.store.database import Database
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from forkd.model.sandbox import Sandbox
    from forkd.network.plan import Plan
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("root", "tun", "nft"), pytest.mark.asyncio]

OPTIONS = ForkOptions(network=HOST)


@pytest.fixture(autouse=True)
def clean(fake_host: FakeHost) -> Iterator[None]:
    """Remove the taps and walls that a test which failed has left."""
    yield
    plan = plan_of(fake_host)
    netlink.remove(taps.left_over(plan, set()))
    nftables.run(rules.remove(plan))


def plan_of(host: FakeHost) -> Plan:
    with contextlib.closing(Database(host.settings.state_dir / "forkd.db")) as database:
        return choose(host.settings, database).network


@contextlib.asynccontextmanager
async def forked(host: FakeHost, knobs: str = "") -> AsyncIterator[tuple[Host, Sandbox]]:
    """Run a service with a sandbox that has a network; all that there is is deleted at the end."""
    async with host.service() as service:
        await host.bake(service, host.recipe(knobs=knobs))
        (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
        try:
            yield service, made
        finally:
            await clear(service)


async def clear(service: Host) -> None:
    for each in await service.sandboxes.list(CALLER):
        await service.sandboxes.delete(CALLER, each.id)


async def branched(service: Host, source: Sandbox) -> Sandbox:
    result = await service.branches.branch(CALLER, source.id, 1, BranchOptions())
    (child,) = result.fork.sandboxes
    return child


async def addresses(service: Host, sandbox: Sandbox) -> list[str | None]:
    """Return what a sandbox's network has of IPv6, as a caller sees it."""
    status = await service.networks.get(CALLER, sandbox.id)
    return [status.address_v6, status.gateway_v6]


async def test_a_sandbox_has_an_address_of_each_family_also_by_branch_and_promotion(
    fake_host: FakeHost,
) -> None:
    async with forked(fake_host) as (service, made):
        assert made.address_v6 is not None
        assert await addresses(service, made) == [made.address_v6, f"{made.address_v6[:-1]}1"]

        child = await branched(service, made)
        assert child.address_v6 not in {None, made.address_v6}
        promoted = (await service.promotions.promote(CALLER, child.id)).sandbox

        assert (promoted.id, promoted.address_v6) == (made.id, made.address_v6)
        assert (await addresses(service, promoted))[0] == made.address_v6


async def test_the_next_daemon_knows_the_addresses_of_what_it_adopts(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes

    async with fake_host.service() as service:
        assert (await service.sandboxes.get(CALLER, made.id)).address_v6 == made.address_v6
        assert (await addresses(service, made))[0] == made.address_v6
        await clear(service)


async def test_a_guest_that_has_no_ipv6_has_none_by_branch_and_promotion_either(
    fake_host: FakeHost,
) -> None:
    async with forked(fake_host, "ipv6=unknown") as (service, made):
        assert made.address is not None
        assert [made.address_v6, *await addresses(service, made)] == [None, None, None]

        # A machine of an earlier forkd would refuse a request that names IPv6: see the fake.
        child = await branched(service, made)
        assert child.address_v6 is None
        promoted = (await service.promotions.promote(CALLER, child.id)).sandbox

        assert (promoted.address, promoted.address_v6) == (made.address, None)
        assert promoted.state is SandboxState.RUNNING
        await service.sandboxes.reset(CALLER, promoted.id, deadline_s=10.0)


def bandwidths(host: FakeHost) -> list[int]:
    """Return what the packet filter counts, in bytes a second, of all sandboxes and ways."""
    try:
        found = nftables.read(f"list limits table inet {rules.table_name(plan_of(host))}")
    except HostError:
        return []  # there is no table
    return sorted(each["limit"]["rate"] for each in found if "limit" in each)


async def test_a_bandwidth_is_limited_changed_inherited_and_ends_with_its_sandbox(
    fake_host: FakeHost,
) -> None:
    mbit, change = 125_000, NewLimits(bandwidth_limit_mbit=20)
    options = replace(OPTIONS, bandwidth_limit_mbit=10)
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes
        assert made.bandwidth_limit_mbit == 10
        assert bandwidths(fake_host) == [10 * mbit] * 2

        assert (await service.sandboxes.set_limits(CALLER, made.id, change)) == replace(
            made, bandwidth_limit_mbit=20
        )
        child = await branched(service, made)
        assert child.bandwidth_limit_mbit == 20
        await service.networks.change(CALLER, made.id, NetworkChange(hold=True))
        assert bandwidths(fake_host) == [20 * mbit] * 4

    async with fake_host.service() as service:
        assert bandwidths(fake_host) == [20 * mbit] * 4
        await service.sandboxes.delete(CALLER, made.id)
        assert bandwidths(fake_host) == [20 * mbit] * 2
        await clear(service)
    assert bandwidths(fake_host) == []


async def test_there_is_no_bandwidth_to_limit_without_a_network(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

        with pytest.raises(Conflict, match="without a network"):
            await service.sandboxes.set_limits(CALLER, made.id, NewLimits(bandwidth_limit_mbit=1))

        assert await service.sandboxes.get(CALLER, made.id) == made
        await clear(service)


async def test_limits_change_all_or_none(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with forked(fake_host) as (service, made):
        both = NewLimits(bandwidth_limit_mbit=20, memory_limit_mib=512)

        def refuse(*_: object) -> None:
            raise Conflict("as asked")

        monkeypatch.setattr(Leases, "_limit_process", refuse)
        with pytest.raises(Conflict, match="as asked"):
            await service.sandboxes.set_limits(CALLER, made.id, both)

        assert await service.sandboxes.get(CALLER, made.id) == made
        assert bandwidths(fake_host) == []


async def test_what_an_earlier_daemon_forked_goes_on_with_ipv4_alone(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (made,) = (await service.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    with contextlib.closing(Database(fake_host.settings.state_dir / "forkd.db")) as database:
        (row,) = database.rows()  # as a daemon that had no such column has left it
        database.put([replace(row, sandbox=replace(row.sandbox, address_v6=None))])

    async with fake_host.service() as service:
        assert await addresses(service, made) == [None, None]
        assert (await branched(service, made)).address_v6 is None
        await clear(service)


async def test_many_that_end_at_once_are_taken_away_together(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    take = Walls.take

    def count(self: Walls, links: Sequence[str]) -> None:
        calls.append(len(links))
        take(self, links)

    async with forked(fake_host) as (service, _):
        await service.sandboxes.fork(CALLER, TAG, 30, OPTIONS)
        monkeypatch.setattr(Walls, "take", count)

        await service.sandboxes.delete_all(each.id for each in await service.sandboxes.list(CALLER))

        assert sum(calls) == 31
        assert len(calls) < 31 // 2
        assert taps.left_over(plan_of(fake_host), set()) == ()
