"""Network slots that are made ahead of need, over a fake VMM and real taps."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import threading
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, HostError
from forkd.host import netlink, nftables, tuntap
from forkd.host.netlink import Ends, Link
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.network import rules, taps
from forkd.network.plan import Plan
from forkd.network.resolver import Resolver, upstreams_of
from forkd.service import egress
from forkd.service.egress import Egress
from forkd.service.slots import Slots
from forkd.service.supervision import Supervisor
from forkd.service.uninstall import uninstall
from tests.support.callers import CALLER
from tests.support.killable import KillableDaemon
from tests.support.outside import listening
from tests.support.service_host import TAG, until
from tests.support.slots import slot_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from forkd.errors import ForkdError
    from forkd.model.sandbox import Sandbox
    from forkd.network.plan import Slot
    from forkd.network.questions import Upstream
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

pytestmark = [pytest.mark.needs("root", "tun", "nft"), pytest.mark.timeout(120)]

KEPT = 4
PLAN = Plan(IPv4Network("10.255.253.0/24"), tap_prefix="fkslt")
SMALL = replace(PLAN, pool=IPv4Network("10.255.253.0/28"))
"""Four slots, which is as many as are kept."""

STRAY = "10.255.252.1"

OPTIONS = ForkOptions(network=HOST, all_or_nothing=True)

FORK = """from forkd.model.network import HOST
        await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions(network=HOST))
        while len(service.figures.slots.ready) < {kept}:
            await asyncio.sleep(0.01)
        Path({ready!r}).touch()"""


@pytest.fixture
def host(fake_host: FakeHost) -> Iterator[FakeHost]:
    """A host that keeps slots ready; what a test that failed has left is removed."""
    settings = replace(fake_host.settings, network=PLAN, network_slots=KEPT)
    yield replace(fake_host, settings=settings)
    netlink.remove(taps.left_over(PLAN, set()))
    nftables.run(rules.remove(PLAN))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The taps that are made from now on, each time that one is."""
    found: list[str] = []
    add_tap = netlink.add_tap

    def note(name: str) -> None:
        found.append(name)
        add_tap(name)

    monkeypatch.setattr(netlink, "add_tap", note)
    return found


async def fork(service: Host, count: int) -> tuple[Sandbox, ...]:
    return (await service.sandboxes.fork(CALLER, TAG, count, OPTIONS)).sandboxes


async def full(service: Host, count: int = KEPT) -> set[str]:
    """Wait until so many slots are ready, and no more are made; return their taps."""
    slots = service.figures.slots
    await until(lambda: len(slots.ready) == count and not slots.is_filling)
    return {PLAN.slot(index).tap for index in slots.ready}


async def first(host: FakeHost, service: Host, kept: int = KEPT) -> Sandbox:
    """Fork the first sandbox, and wait until so many slots are ready."""
    await host.bake(service, host.recipe())
    (sandbox,) = await fork(service, 1)
    await full(service, kept)
    return sandbox


async def clear(service: Host) -> None:
    await service.sandboxes.delete_all(each.id for each in await service.sandboxes.list(CALLER))


def tap_of(sandbox: Sandbox) -> str:
    """Return the tap of a sandbox that was not promoted."""
    return slot_of(PLAN, sandbox).tap


def present() -> set[str]:
    return set(taps.left_over(PLAN, set()))


def guarded() -> set[str]:
    """Return the taps from which nothing passes without a wall; none without a table."""
    try:
        found = nftables.read(f"list set inet {rules.table_name(PLAN)} taps")
    except HostError:
        return set()
    return {each for item in found if "set" in item for each in item["set"].get("elem", ())}


async def test_a_fork_takes_what_is_ready_and_as_many_are_made_again(
    host: FakeHost, made: list[str]
) -> None:
    async with host.service() as service:
        await host.bake(service, host.recipe())
        assert await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())
        assert not service.figures.slots.is_filling
        assert made == []  # until a fork wants a network

        (one,) = await fork(service, 1)
        assert made[0] == tap_of(one)
        ready = await full(service)
        made.clear()

        more = {tap_of(each) for each in await fork(service, KEPT - 1)}

        assert more < ready
        assert len(await full(service)) == KEPT
        assert len(made) == KEPT - 1
        assert not more & {*made}
        text, _ = await service.figures.exposition(CALLER, "text/plain")
        assert f"forkd_network_slots_ready {float(KEPT)}" in text.decode()
        await clear(service)


async def test_the_first_sandbox_after_the_last_finds_what_stands_around_ready_slots(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[str] = []
    starts: list[Resolver] = []
    asked: list[str] = []
    run, start = nftables.run, Resolver.start

    def note_commands(text: str) -> None:
        commands.append(text)
        run(text)

    async def note_start(resolver: Resolver, *, ipv6: bool) -> None:
        starts.append(resolver)
        await start(resolver, ipv6=ipv6)

    def note_upstreams(text: str) -> tuple[Upstream, ...]:
        asked.append(text)
        return upstreams_of(text)

    monkeypatch.setattr(nftables, "run", note_commands)
    monkeypatch.setattr(Resolver, "start", note_start)
    monkeypatch.setattr(egress, "upstreams_of", note_upstreams)
    async with host.service() as service:
        await first(host, service)
        (resolver,) = starts
        port = resolver.port
        await clear(service)
        commands.clear()

        (next_one,) = await fork(service, 1)

        assert tap_of(next_one) in guarded()
        assert (len(starts), resolver.port) == (1, port)
        assert [each for each in commands if "add table" in each] == []
        assert len(asked) == 2  # the host may have other name servers by now
        await full(service)
        await clear(service)


async def test_what_is_more_than_there_are_ready_is_made_and_forks_at_once_share_none(
    host: FakeHost, made: list[str]
) -> None:
    async with host.service() as service:
        await first(host, service)
        made.clear()

        both = await asyncio.gather(fork(service, 3), fork(service, 5))

        forked = [tap_of(each) for sandboxes in both for each in sandboxes]
        assert len({*forked}) == 8
        assert len({*made} & {*forked}) == 8 - KEPT
        await full(service)
        assert len({*made}) == len(made)
        await clear(service)


async def test_what_cannot_be_made_ahead_is_a_warning_and_the_fork_makes_its_own(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = True
    add_tap = netlink.add_tap

    def refuse(name: str) -> None:
        if refusing and name != PLAN.slot(0).tap:
            raise HostError("as asked")
        add_tap(name)

    monkeypatch.setattr(netlink, "add_tap", refuse)
    async with host.service() as service:
        await first(host, service, kept=0)
        await until(lambda: any("as asked" in str(r.__dict__) for r in caplog.records))
        (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING
                     and "as asked" in str(each.__dict__)]  # fmt: skip
        assert (record.levelno, record.__dict__["task"]) == (logging.WARNING, "fill network slots")
        assert (present(), guarded()) == ({PLAN.slot(0).tap}, {PLAN.slot(0).tap})

        refusing = False
        (other,) = await fork(service, 1)

        assert tap_of(other) in present()
        await full(service)
        await clear(service)


async def test_a_crash_in_the_background_is_logged_and_the_next_fork_fills_again(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(_: Slots) -> bool:
        raise RuntimeError("a bug")

    async with host.service() as service:
        with monkeypatch.context() as patched:
            patched.setattr(Slots, "_make_ready", crash)
            await first(host, service, kept=0)
            await until(lambda: "task crashed" in caplog.text)
        assert service.tasks.failure is None

        await fork(service, 1)

        await full(service)
        await clear(service)


@pytest.mark.parametrize("lives", [True, False], ids=["a sandbox lives on", "none does"])
async def test_a_daemon_that_stops_leaves_none(host: FakeHost, *, lives: bool) -> None:
    async with host.service() as service:
        sandbox = await first(host, service)
        assert len(present()) == KEPT + 1
        if not lives:
            await clear(service)
            assert present() == guarded() == await full(service)

    left = {tap_of(sandbox)} if lives else set()
    assert (present(), guarded()) == (left, left)
    async with host.service() as service:
        await clear(service)


def held_up(
    monkeypatch: pytest.MonkeyPatch, which: Callable[[int], bool]
) -> tuple[threading.Event, threading.Event]:
    """Have making so many taps wait; return what says that it began, and what lets it go on."""
    began, going_on = threading.Event(), threading.Event()
    create = taps.create

    def slow(slots: Sequence[Slot]) -> dict[str, ForkdError]:
        if which(len(slots)):
            began.set()
            assert going_on.wait(30)
        return create(slots)

    monkeypatch.setattr(taps, "create", slow)
    return began, going_on


async def test_a_daemon_that_stops_in_the_middle_leaves_none(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, stopping = held_up(monkeypatch, lambda count: count > 1)
    async with host.service() as service:
        await host.bake(service, host.recipe())
        await fork(service, 1)
        await until(began.is_set)
        await clear(service)
        asyncio.get_running_loop().call_later(0.01, stopping.set)

    assert (present(), guarded()) == (set(), set())


@pytest.mark.parametrize("how", ["the next start", "an uninstall"])
async def test_a_daemon_that_is_killed_leaves_none_after(host: FakeHost, how: str) -> None:
    async with host.service() as service:
        await host.bake(service, host.recipe())
    ready = host.folder / "ready"
    settings = replace(host.settings, network=None)  # which the other process derives
    names = replace(host, settings=settings)
    daemon = KillableDaemon(names, FORK.format(ready=str(ready), kept=KEPT))
    await daemon.kill_when(ready.exists)
    prefix = "fk"
    links = {name for name in netlink.names() if name.startswith(prefix)}
    assert len(links) >= KEPT + 1

    if how == "an uninstall":
        found = await uninstall(settings, state=True)
        assert found.left == []
        gone = set(found.removed["links"])
    else:
        async with names.service() as service:
            (sandbox,) = await service.sandboxes.list(CALLER)
            gone = links - {*netlink.names()}
            await clear(service)
            assert sandbox.address is not None

    assert len(gone) == (KEPT + 1 if how == "an uninstall" else KEPT)
    assert not gone & {*netlink.names()}


async def test_all_slots_of_a_plan_can_be_used_though_some_are_kept_ready(host: FakeHost) -> None:
    host = replace(host, settings=replace(host.settings, network=SMALL))
    async with host.service() as service:
        one = await first(host, service, kept=SMALL.slots - 1)

        others = await fork(service, SMALL.slots - 1)

        assert len({one.address, *(each.address for each in others)}) == SMALL.slots
        with pytest.raises(CapacityError):
            await fork(service, 1)
        await service.sandboxes.delete(CALLER, others[1].id)
        (again,) = await fork(service, 1)
        assert again.address == others[1].address
        await clear(service)


async def test_a_fork_waits_for_the_last_slots_if_they_are_being_made(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    host = replace(host, settings=replace(host.settings, network=SMALL))
    began, going_on = held_up(monkeypatch, lambda count: count == SMALL.slots - 1)
    async with host.service() as service:
        await host.bake(service, host.recipe())
        await fork(service, 1)
        await until(began.is_set)

        rest = asyncio.create_task(fork(service, SMALL.slots - 1))
        await until(lambda: service.figures.slots.used == SMALL.slots)
        going_on.set()

        assert len(await rest) == SMALL.slots - 1
        assert sorted(made) == [SMALL.slot(index).tap for index in range(SMALL.slots)]
        await clear(service)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_taps_of_ready_slots_are_kept_open_and_what_they_were_sent_is_dropped(
    host: FakeHost,
) -> None:
    plan = host.settings.network
    assert plan is not None
    before = descriptors()
    async with Supervisor() as tasks:
        slots = Slots(plan, Egress(plan, tasks), tasks, KEPT, opened=True)
        slots.refill()
        await until(lambda: len(slots.ready) == KEPT and not slots.is_filling)
        first, second, *_ = taken = slots.reserve(KEPT - 1)
        assert not await slots.make(taken)
        with pytest.raises(HostError, match=first.tap):
            tuntap.open_tap(first.tap)
        for slot in (first, second):
            with socket.socket(type=socket.SOCK_DGRAM) as sock:
                sock.sendto(b"hello", (str(slot.guest), 9))

        given = slots.open_tap(first.tap)
        with pytest.raises(BlockingIOError):
            os.read(given, 1 << 16)
        slots.close_taps([second])
        os.close(tuntap.open_tap(second.tap))
        os.close(given)
        os.close(slots.open_tap(first.tap))

        await slots.remove(taken)
        for slot in taken:
            slots.free(slot)
        await slots.close()
    assert (present(), guarded()) == (set(), set())
    assert descriptors() == before


def has_ipv6(tap: str) -> bool:
    return Path("/proc/sys/net/ipv6/conf", tap, "disable_ipv6").read_text().strip() == "0"


async def test_siblings_without_ipv6_take_ready_slots_last_and_then_have_none_there(
    host: FakeHost,
) -> None:
    host = replace(host, settings=replace(host.settings, network=SMALL))
    async with host.service() as service:
        await host.bake(service, host.recipe(knobs="ipv6=unknown"))
        (source,) = await fork(service, 1)
        await full(service, SMALL.slots - 1)

        made = await service.branches.branch(CALLER, source.id, 2, BranchOptions())

        siblings = made.fork.sandboxes
        assert [each.address_v6 for each in siblings] == [None, None]
        assert [has_ipv6(tap_of(each)) for each in (source, *siblings)] == [True, False, False]
        await full(service, 1)
        await clear(service)


def frame(slot: Slot, port: int) -> bytes:
    """Return what a guest would send by its link to a port of the host's end, by UDP."""
    payload = b"let me through"
    udp = struct.pack("!4H", 9, port, 8 + len(payload), 0) + payload
    ends = socket.inet_aton(slot.guest) + socket.inet_aton(slot.host)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 1, 0, 64, socket.IPPROTO_UDP, 0) + ends
    total = sum(struct.unpack("!10H", ip))
    checksum = ~(total % 0xFFFF) & 0xFFFF
    mac = Path("/sys/class/net", slot.tap, "address").read_text().strip()
    link = bytes.fromhex((mac + slot.mac).replace(":", "")) + b"\x08\x00"
    return link + ip[:10] + struct.pack("!H", checksum) + ip[12:] + udp


def send(slot: Slot, port: int) -> None:
    """Send it, as a machine would."""
    descriptor = tuntap.open_tap(slot.tap)
    try:
        os.write(descriptor, frame(slot, port))
    finally:
        os.close(descriptor)


async def test_nothing_passes_from_a_slot_that_nobody_has(host: FakeHost) -> None:
    async with host.service() as service:
        sandbox = await first(host, service)
        index = service.figures.slots.ready[0]
        slot = PLAN.slot(index)
        with listening(slot.host, 9_000, socket.SOCK_DGRAM) as heard:
            heard.settimeout(0.0)
            await asyncio.to_thread(send, slot, 9_000)
            with pytest.raises(BlockingIOError):
                heard.recv(64)

            await service.sandboxes.delete(CALLER, sandbox.id)  # the last wall is taken away
            assert slot.tap in guarded()
            await asyncio.to_thread(send, slot, 9_000)
            with pytest.raises(BlockingIOError):
                heard.recv(64)

            nftables.run(rules.unguard(PLAN, [slot.tap]))
            await asyncio.to_thread(send, slot, 9_000)
            assert heard.recv(64) == b"let me through"
            nftables.run(rules.guard(PLAN, [slot.tap]))


async def test_the_next_sandbox_of_a_slot_sees_nothing_of_the_last(host: FakeHost) -> None:
    host = replace(host, settings=replace(host.settings, network=SMALL))
    options = replace(OPTIONS, network=replace(HOST, host=False))
    async with host.service() as service:
        await first(host, service, kept=SMALL.slots - 1)
        result = await service.sandboxes.fork(CALLER, TAG, 1, options)
        (last,) = result.sandboxes
        slot = slot_of(SMALL, last)
        other = Link(slot.tap, slot.mac, (Ends(STRAY, STRAY, 32),))  # which nothing of ours adds
        assert await asyncio.to_thread(netlink.set_up, [other]) == {}
        await asyncio.to_thread(send, slot, 9_000)
        assert (await service.networks.get(CALLER, last.id)).refused_packets == 1

        await service.sandboxes.delete(CALLER, last.id)
        others = await fork(service, SMALL.slots - 1)
        again = next(each for each in others if each.address == slot.guest)

        status = await service.networks.get(CALLER, again.id)
        assert (status.refused_packets, status.refused_destinations) == (0, ())
        with socket.socket() as sock, pytest.raises(OSError, match="assign"):
            sock.bind((STRAY, 0))
        await clear(service)
