"""There are so many zygotes on a host: for one more, the one that was idle longest ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.engine.process import NO_FILTER_OPTION, SHARE_CORES_OPTION
from forkd.errors import CapacityError, ForkdError
from forkd.limits import SHORT_RETRY_S
from forkd.model.ids import Tag, parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.service.host import open_host
from forkd.service.zygotes import REQUESTS_AT_ONCE_MAX
from tests.support.callers import CALLER
from tests.support.chains import A, add_link
from tests.support.fault_world import descriptors
from tests.support.served_host import served_host
from tests.support.service_host import TAG, FakeHost, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.service.host import Host

MOST = 2

WAITING_S = 0.5
"""How long a fork is seen to wait, which takes some milliseconds if it does not."""

FIRST, SECOND, THIRD = (parse_tag(each) for each in ("first", "second", "third"))


@contextlib.asynccontextmanager
async def opened(host: FakeHost, *tags: Tag) -> AsyncGenerator[Host, None]:
    """Open a host that may have two zygotes, with these snapshots."""
    async with open_host(host.settings) as service:
        for each in tags:
            await host.bake(service, host.recipe(), each)
        yield service


@pytest.fixture
def small_host(fake_host: FakeHost) -> FakeHost:
    return replace(fake_host, settings=replace(fake_host.settings, zygotes_max=MOST))


def words_of(pid: int) -> list[str]:
    """Return what a process was started with."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def fork(service: Host, tag: Tag) -> int:
    """Fork once, and end the child; return the zygote that did it, which is the latest."""
    before = set(service.figures.zygotes.pids())
    result = await service.sandboxes.fork(CALLER, tag, 1, ForkOptions())
    await service.sandboxes.delete(CALLER, result.sandboxes[0].id)
    (new,) = set(service.figures.zygotes.pids()) - before or {0}
    return new


@pytest.mark.parametrize("filtered", [True, False])
async def test_a_zygote_is_filtered_unless_the_host_is_not_to(
    fake_host: FakeHost, *, filtered: bool
) -> None:
    host = replace(fake_host, settings=replace(fake_host.settings, filtered=filtered))
    async with opened(host, FIRST) as service:
        zygote = await fork(service, FIRST)

        assert (NO_FILTER_OPTION in words_of(zygote)) is not filtered


@pytest.mark.parametrize("own", [True, False])
async def test_machines_have_cores_to_themselves_unless_the_host_is_not_to_give_them(
    fake_host: FakeHost, *, own: bool
) -> None:
    host = replace(fake_host, settings=replace(fake_host.settings, own_cores=own, filtered=False))
    async with opened(host, FIRST) as service:
        words = words_of(await fork(service, FIRST))

        assert words[-2] == NO_FILTER_OPTION
        assert (words[-3] == SHARE_CORES_OPTION) is not own


async def test_the_zygote_that_was_idle_longest_ends_for_one_more(small_host: FakeHost) -> None:
    async with opened(small_host, FIRST, SECOND, THIRD) as service:
        one, two = await fork(service, FIRST), await fork(service, SECOND)
        assert await fork(service, FIRST) == 0  # it is there, and was used last

        three = await fork(service, THIRD)

        assert set(service.figures.zygotes.pids()) == {one, three}
        assert sorted((one, three)) == small_host.vmm_processes()
        assert two not in small_host.vmm_processes()


async def test_one_more_than_are_used_is_refused_until_one_is_let_go(small_host: FakeHost) -> None:
    async with served_host(small_host) as served:
        service, pool = served.service, served.service.figures.zygotes
        await small_host.bake(service, small_host.recipe(), FIRST)
        await small_host.bake(service, small_host.recipe(), SECOND)
        body = {"snapshot_tag": SECOND, "n": 1}
        async with contextlib.AsyncExitStack() as used:
            for each in (TAG, FIRST):
                await used.enter_async_context(pool.lease(each))
            refused = await served.http.post("/v2/sandboxes", json=body)
        forked = await served.http.post("/v2/sandboxes", json=body)

        assert refused.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert refused.headers["retry-after"] == str(SHORT_RETRY_S)
        said = refused.json()["context"]
        assert (said["asked"], said["limit"], said["used"]) == (1, MOST, MOST)
        assert forked.status_code == httpx.codes.CREATED, forked.text
        (sandbox,) = forked.json()
        assert len(pool.pids()) == MOST
        await served.http.delete(f"/v2/sandboxes/{sandbox['id']}")


async def test_a_fork_more_than_a_zygote_serves_at_once_waits_for_its_turn(
    small_host: FakeHost,
) -> None:
    async with opened(small_host, FIRST) as service:
        pool = service.figures.zygotes
        async with contextlib.AsyncExitStack() as forks:
            for _ in range(REQUESTS_AT_ONCE_MAX):
                await forks.enter_async_context(pool.lease(FIRST))
            one_more = asyncio.ensure_future(fork(service, FIRST))
            others_go_on = await service.sandboxes.list(CALLER)
            done, _ = await asyncio.wait([one_more], timeout=WAITING_S)

            assert done == set()
            assert others_go_on == ()
        assert await one_more == 0  # by the same zygote


async def test_what_others_were_derived_from_stays_and_the_last_of_a_chain_goes(
    small_host: FakeHost,
) -> None:
    async with opened(small_host, TAG, FIRST) as service:
        pool = service.figures.zygotes
        await add_link(service, A)
        await fork(service, A)
        base, link = pool.pids()

        other = await fork(service, FIRST)

        assert set(pool.pids()) == {base, other}
        assert link not in small_host.vmm_processes()


async def test_a_zygote_that_cannot_start_or_has_died_takes_no_place(small_host: FakeHost) -> None:
    async with opened(small_host, FIRST, SECOND, THIRD) as service:
        await fork(service, FIRST)
        broken = (await service.snapshots.get(CALLER, SECOND)).directory / "memory"
        kept = broken.read_bytes()
        broken.write_bytes(b"broken")
        for _ in range(MOST + 1):
            with pytest.raises(ForkdError) as refused:
                await fork(service, SECOND)
            assert not isinstance(refused.value, CapacityError)
        broken.write_bytes(kept)
        await fork(service, SECOND)
        for pid in service.figures.zygotes.pids():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: service.figures.zygotes.pids() == ())
        async with (
            service.figures.zygotes.lease(SECOND),
            service.figures.zygotes.lease(THIRD),
        ):
            assert len(service.figures.zygotes.pids()) == MOST


async def test_forks_of_many_snapshots_at_once_never_have_more(small_host: FakeHost) -> None:
    tags = [parse_tag(f"t{number}") for number in range(5)]
    async with opened(small_host, *tags) as service:
        seen: list[int] = []

        async def ask(tag: Tag) -> bool:
            try:
                result = await service.sandboxes.fork(CALLER, tag, 1, ForkOptions())
            except CapacityError:
                return False
            seen.append(len(list(small_host.settings.zygotes_dir.glob("*[!e]"))))
            await service.sandboxes.delete(CALLER, result.sandboxes[0].id)
            return True

        outcomes = await asyncio.gather(*(ask(each) for each in tags * 4))

        assert any(outcomes)
        assert max(seen) <= MOST
        await until(lambda: len(small_host.vmm_processes()) <= MOST)


async def test_a_zygote_that_ends_while_the_service_is_stopping_leaves_nothing(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    async with opened(fake_host, FIRST) as service:
        zygote = await fork(service, FIRST)
        monkeypatch.setattr(service.tasks, "_stopping", True)

        os.kill(zygote, signal.SIGKILL)
        await until(lambda: zygote not in service.figures.zygotes.pids())

    assert not any(fake_host.settings.zygotes_dir.iterdir())
    assert descriptors() == before
