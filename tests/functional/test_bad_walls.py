"""Walls that cannot be: one clear error for each, nothing half-made, and the next fork works."""

from __future__ import annotations

import pwd
from dataclasses import replace
from ipaddress import IPv4Network
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, EngineError, HostError, InvalidRequest
from forkd.host import nftables
from forkd.limits import NETWORK_NAMES_MAX, NETWORK_RULES_MAX
from forkd.model.network import HOST, NetworkPolicy, parse_policy
from forkd.model.sandbox import ForkOptions
from forkd.network.plan import Plan
from forkd.service import jail
from forkd.service.cells import UIDS_MIN
from forkd.service.jail import UidRange
from tests.support import leaks
from tests.support.callers import CALLER
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.model.sandbox import ForkResult
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("root", "tun", "nft"), pytest.mark.timeout(120)]

RULES_THAT_CONTRADICT = ["none", "192.0.2.0/24"]
NAMES = [f"n{number}.example.com" for number in range(10_000)]


async def fork(service: Host, count: int, network: NetworkPolicy | None = HOST) -> ForkResult:
    return await service.sandboxes.fork(
        CALLER, TAG, count, ForkOptions(network=network, all_or_nothing=True)
    )


async def check_nothing_is_half_made(
    host: FakeHost, service: Host, before: leaks.Inventory
) -> None:
    """Only what a fork leaves that worked, its zygote, is here; another fork works."""
    assert await service.sandboxes.list(CALLER) == ()
    assert host.left_over() == []
    after = leaks.take()
    for kind in ("interfaces", "tables", "cgroups", "namespaces", "mounts"):
        assert getattr(after, kind) <= getattr(before, kind), kind
    await end_all(service, await fork(service, 1, None))


async def end_all(service: Host, result: ForkResult) -> None:
    for each in result.sandboxes:
        await service.sandboxes.delete(CALLER, each.id)


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (["192.0.2.0/33"], "192.0.2.0/33"),
        (["192.0.2.1/24"], "192.0.2.1/24"),
        (["2001:db8::/129"], "2001:db8::/129"),
        (["not a name.example.com"], "not a name.example.com"),
        (["-x.example.com"], "-x.example.com"),
        (RULES_THAT_CONTRADICT, "contradict"),
        (["internet", "deny-all"], "contradicts the other rules"),
        (NAMES, f"at most {NETWORK_RULES_MAX} rules, not 10000"),
        (NAMES[: NETWORK_NAMES_MAX + 1], f"at most {NETWORK_NAMES_MAX} names"),
    ],
    ids=[
        "bits",
        "host bits",
        "IPv6",
        "spaces",
        "dash",
        "none and more",
        "two words",
        "10000 names",
        "one name more",
    ],
)
def test_a_policy_that_makes_no_sense(fake_host: FakeHost, network: list[str], says: str) -> None:
    with FakeDaemon(fake_host) as daemon:
        made = daemon.http.post(
            "/v2/snapshots", json={"tag": TAG, "recipe": str(fake_host.recipe())}
        )
        assert made.status_code == 201, made.text
        before = leaks.take()

        answer = daemon.http.post(
            "/v2/sandboxes", json={"snapshot_tag": TAG, "n": 2, "network": network}
        )

        assert answer.status_code in {400, 422}, answer.text
        said = answer.json()
        assert (said["code"], said["field"]) == ("invalid_request", "network")
        assert says in said["error"]
        assert len(said["error"]) < 1_000
        assert daemon.http.get("/v2/sandboxes").json() == []
        assert fake_host.left_over() == []
        assert leaks.leaked(before, leaks.take()) == []


async def test_an_exhausted_pool_of_links(fake_host: FakeHost) -> None:
    plan = Plan(IPv4Network("10.255.255.240/28"), tap_prefix="fkbad")
    host = replace(fake_host, settings=replace(fake_host.settings, network=plan))
    async with host.service() as service:
        await host.bake(service, host.recipe())
        before = leaks.take()
        with pytest.raises(CapacityError, match=f"{plan.slots}"):
            await fork(service, plan.slots + 1)
        await check_nothing_is_half_made(host, service, before)
        all_of_them = await fork(service, plan.slots)
        with pytest.raises(CapacityError):
            await fork(service, 1)
        assert len(await service.sandboxes.list(CALLER)) == plan.slots
        await end_all(service, all_of_them)
        await end_all(service, await fork(service, 1))
        assert leaks.take().interfaces <= before.interfaces


async def test_an_exhausted_range_of_users(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail, "SLOT_USERS_MIN", 4)
    monkeypatch.setattr(jail, "SLOT_BLOCKS", 1)
    uids = UidRange(1_879_048_192, 16)  # a slot of a zygote, which is one of its users
    host = replace(fake_host, settings=replace(fake_host.settings, uids=uids))
    async with host.service() as service:
        await host.bake(service, host.recipe())
        before = leaks.take()
        with pytest.raises(CapacityError, match=r"all 4 users of FORKD_UID_RANGE are used"):
            await fork(service, 4)
        await check_nothing_is_half_made(host, service, before)
        all_of_them = await fork(service, 3, None)
        with pytest.raises(CapacityError, match="FORKD_UID_RANGE"):
            await fork(service, 1, None)
        await end_all(service, all_of_them)
        await end_all(service, await fork(service, 1, None))


async def test_a_host_without_nftables(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        before = leaks.take()
        with monkeypatch.context() as patched:
            patched.setattr(nftables, "LIBRARY", "libnftables.so.missing")
            nftables._library.cache_clear()  # noqa: SLF001 - as in a new daemon
            with pytest.raises(EngineError, match="libnftables1 is needed"):
                await fork(service, 2)
        nftables._library.cache_clear()  # noqa: SLF001
        await check_nothing_is_half_made(fake_host, service, before)
        await end_all(service, await fork(service, 1))


@pytest.mark.parametrize("which", ["uids", "build_uids"])
async def test_a_range_that_overlaps_real_users(fake_host: FakeHost, which: str) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    theirs = UidRange(nobody, UIDS_MIN)
    ranges = {"uids": None, "build_uids": None, which: theirs}
    settings = replace(fake_host.settings, uids=ranges["uids"], build_uids=ranges["build_uids"])
    bad = replace(fake_host, settings=settings)
    before = leaks.take()

    with pytest.raises(InvalidRequest, match=r"overlaps .*nobody") as refused:
        async with bad.service():
            pass

    assert refused.value.context["field"] in {"uid_range", "build_uid_range"}
    assert leaks.leaked(before, leaks.take()) == []
    async with fake_host.service() as service:
        assert await service.sandboxes.list(CALLER) == ()


async def test_a_host_without_cgroup_v2(fake_host: FakeHost, tmp_path: Path) -> None:
    settings = replace(fake_host.settings, cgroups=True, cgroup_root=tmp_path / "none" / "forkd")
    before = leaks.take()

    with pytest.raises(HostError, match="no cgroup v2"):
        async with replace(fake_host, settings=settings).service():
            pass

    assert leaks.leaked(before, leaks.take()) == []
    assert not (tmp_path / "none").exists()


def test_ten_thousand_names_are_refused_without_looking_at_each() -> None:
    with pytest.raises(InvalidRequest, match="at most") as refused:
        parse_policy(NAMES)

    assert len(str(refused.value)) < 700
