"""New work is refused, and says why and when to ask again, while what runs goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import CapacityError
from forkd.host import files, proc
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.service.admission import RETRY_AFTER_S
from tests.support.callers import CALLER
from tests.support.chains import value
from tests.support.served_host import served_host
from tests.support.service_host import TAG, FakeHost

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.service.host import Host

MIB = 1 << 20
GUEST_MIB = 128


def having(host: FakeHost, **admission: float) -> FakeHost:
    """Return the host with another policy."""
    policy: dict[str, Any] = {**admission}
    settings = replace(host.settings, admission=replace(host.settings.admission, **policy))
    return replace(host, settings=settings)


async def check_all_is_refused(host: FakeHost, service: Host, match: str) -> None:
    """Forks, branches and bakes are, with nothing half-made; what runs answers."""
    (running,) = await service.sandboxes.list(CALLER)
    asks = (
        service.sandboxes.fork(CALLER, TAG, 2, ForkOptions()),
        service.branches.branch(CALLER, running.id, 1, BranchOptions()),
        host.bake(service, host.recipe(name="other"), "other"),
    )
    for ask in asks:
        with pytest.raises(CapacityError, match=match) as caught:
            await ask
        assert caught.value.context["retry_after_s"] == RETRY_AFTER_S
    assert [each.id for each in await service.sandboxes.list(CALLER)] == [running.id]
    assert await value(service, running.id, "answer") == 42


async def test_memory_of_which_less_is_left_than_is_kept(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = having(fake_host, memory_reserve_mib=100)
    async with host.service() as service:
        await host.bake(service, host.recipe())
        monkeypatch.setattr(proc, "memory_bytes", lambda: (1000 * MIB, 100 * MIB))
        (running,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

        monkeypatch.setattr(proc, "memory_bytes", lambda: (1000 * MIB, 100 * MIB - 1))
        await check_all_is_refused(host, service, "has 99 MiB of memory left, and keeps 100 MiB")
        await service.sandboxes.delete(CALLER, running.id)
    assert fake_host.left_over() == []


@pytest.mark.parametrize(
    ("what", "words"), [("memory", "memory"), ("io", "I/O"), ("cpu", "processors")]
)
async def test_pressure(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    host = having(fake_host, **{f"{what}_pressure_max": 20})
    monkeypatch.setattr(proc, f"{what}_pressure", lambda: 0.0)  # this host may be busy
    async with host.service() as service:
        await host.bake(service, host.recipe())
        for percent in (20.0, None):
            monkeypatch.setattr(proc, f"{what}_pressure", lambda said=percent: said)
            (running,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
            if percent is not None:
                await service.sandboxes.delete(CALLER, running.id)

        monkeypatch.setattr(proc, f"{what}_pressure", lambda: 20.01)
        match = (
            rf"waited for {words} 20\.01 % of the last 10 seconds, of at most 20 % "
            rf"\(FORKD_{what.upper()}_PRESSURE_MAX\)"
        )
        await check_all_is_refused(host, service, match)
        await service.sandboxes.delete(CALLER, running.id)
    assert fake_host.left_over() == []


async def test_busy_disks_and_processors_are_no_reason_unless_it_is_said(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        for what in ("io", "cpu"):
            monkeypatch.setattr(proc, f"{what}_pressure", lambda: 100.0)
        (running,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        await service.sandboxes.delete(CALLER, running.id)


async def test_a_disk_that_has_nothing_but_its_reserve(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve_mib = fake_host.settings.disks.reserve_mib
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        monkeypatch.setattr(files, "free_bytes", lambda _: reserve_mib * MIB)
        (running,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

        monkeypatch.setattr(files, "free_bytes", lambda _: reserve_mib * MIB - 1)
        await check_all_is_refused(fake_host, service, f"keeps {reserve_mib} MiB")
        await service.sandboxes.delete(CALLER, running.id)
    assert fake_host.left_over() == []


async def test_one_mib_more_than_guests_may_be_promised_together(fake_host: FakeHost) -> None:
    total_bytes, _ = proc.memory_bytes()
    most_mib = 3 * GUEST_MIB + 1 - 0.5  # three guests and a zygote, but for half a MiB
    host = having(fake_host, memory_overcommit=most_mib * MIB / total_bytes)
    async with host.service() as service:
        await host.bake(service, host.recipe())
        (running, other) = (await service.sandboxes.fork(CALLER, TAG, 2, ForkOptions())).sandboxes

        with pytest.raises(CapacityError, match=r"guests would have 385 MiB .* 128 MiB of it new"):
            await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())

        await service.sandboxes.delete(CALLER, other.id)
        (third,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        for each in (running, third):
            await service.sandboxes.delete(CALLER, each.id)


async def test_a_client_is_told_when_to_ask_again(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served_host(fake_host) as served:
        monkeypatch.setattr(proc, "memory_bytes", lambda: (1000 * MIB, 0))

        answer = await served.http.post("/v2/sandboxes", json={"snapshot_tag": TAG})

        assert answer.status_code == 503, answer.text
        assert answer.headers["Retry-After"] == str(RETRY_AFTER_S)
        assert "FORKD_MEMORY_RESERVE_MIB" in answer.json()["error"]
    assert fake_host.left_over() == []


@pytest.mark.parametrize("measure", [proc.memory_pressure, proc.io_pressure, proc.cpu_pressure])
def test_this_kernel_says_how_much_pressure_there_is(measure: Callable[[], float | None]) -> None:
    percent = measure()
    assert percent is None or 0 <= percent <= 100
