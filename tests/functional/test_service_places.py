"""What takes memory or processes of the host has so many places; one more is refused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError
from forkd.limits import (
    BAKED_MACHINES_MAX,
    BAKES_MAX,
    DIFFS_MAX,
    EVALS_MAX,
    EXECS_MAX,
    LOG_FOLLOWERS_MAX,
    LONG_RETRY_S,
    PACKS_MAX,
    SHORT_RETRY_S,
)
from forkd.model.exec import ExecRequest
from forkd.model.ids import parse_tag
from forkd.model.progress import Progress
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import SnapshotRequest
from tests.support.callers import CALLER, tenant
from tests.support.served_host import served_host
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import httpx

    from forkd.model.caller import Caller
    from forkd.model.recipe import RecipeSource
    from forkd.service.host import Host
    from forkd.service.places import Places
    from tests.support.served_host import Served
    from tests.support.service_host import FakeHost


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work: its places, what they are said to be, and a request for one more."""

    places: Callable[[Host], Places]
    limit: int
    retry_after_s: int
    words: str
    method: str
    path: str
    body: object = None
    ready: int = 200

    async def ask(self, served: Served, sandbox: str) -> httpx.Response:
        """Ask over REST."""
        path = self.path.format(id=sandbox)
        return await served.http.request(self.method, path, json=self.body)


CASES = {
    "exec": Case(
        *(lambda host: host.guests.execs, EXECS_MAX, SHORT_RETRY_S, "execs"),
        *("POST", "/v2/sandboxes/{id}/exec", {"args": ["echo", "hello"]}),
    ),
    "eval": Case(
        *(lambda host: host.guests.evals, EVALS_MAX, SHORT_RETRY_S, "evals"),
        *("POST", "/v2/sandboxes/{id}/eval", {"code": "1"}),
    ),
    "diff": Case(
        *(lambda host: host.comparisons.places, DIFFS_MAX, LONG_RETRY_S, "comparisons"),
        *("POST", "/v2/diff", {"a": "python", "b": "python"}),
    ),
    "pack": Case(
        *(lambda host: host.packs.places, PACKS_MAX, LONG_RETRY_S, "packs"),
        *("GET", "/v2/snapshots/python/pack"),
    ),
    "unpack": Case(
        *(lambda host: host.packs.places, PACKS_MAX, LONG_RETRY_S, "packs"),
        *("PUT", "/v2/snapshots/other/pack?allow_unsigned=true", None, 422),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_one_more_is_refused_with_what_is_in_use_and_works_when_a_place_is_free(
    fake_host: FakeHost, case: Case
) -> None:
    async with served_host(fake_host) as served:
        (sandbox,) = await served.fork()
        with ExitStack() as others:
            for _ in range(case.limit - 1):
                others.enter_context(case.places(served.service).take(CALLER))
            last = await case.ask(served, sandbox)
            others.enter_context(case.places(served.service).take(CALLER))
            refused = await case.ask(served, sandbox)
            with pytest.raises(CapacityError):
                others.enter_context(case.places(served.service).take(CALLER))
        freed = await case.ask(served, sandbox)

        assert (last.status_code, freed.status_code) == (case.ready, case.ready), last.text
        assert (refused.status_code, refused.json()["code"]) == (503, "capacity")
        assert refused.headers["retry-after"] == str(case.retry_after_s)
        assert refused.json()["error"] == (
            f"one more of {case.words} was asked for; this host has at most {case.limit} at once, "
            f"and {case.limit} are in use: try again in {case.retry_after_s} s"
        )
        counted = {"asked": 1, "limit": case.limit, "used": case.limit}
        assert refused.json()["context"] == {**counted, "retry_after_s": case.retry_after_s}
        assert case.places(served.service).used == 0
        assert (await served.http.delete(f"/v2/sandboxes/{sandbox}")).status_code == 204


async def test_one_more_follower_of_a_console_is_refused_until_one_leaves(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

        def follow() -> AsyncGenerator[bytes, None]:
            return service.sandboxes.follow_console_log(CALLER, sandbox.id)

        async with AsyncExitStack() as followers:
            leaving = await followers.enter_async_context(aclosing(follow()))
            await anext(leaving)
            for _ in range(LOG_FOLLOWERS_MAX - 1):
                await anext(await followers.enter_async_context(aclosing(follow())))
            with pytest.raises(CapacityError, match="one more of followed consoles") as refused:
                await anext(follow())
            await leaving.aclose()
            await anext(await followers.enter_async_context(aclosing(follow())))

        assert refused.value.context["retry_after_s"] == SHORT_RETRY_S
        assert service.sandboxes.log_followers.used == 0
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_an_attached_command_has_a_place_until_it_is_let_go(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes

        request = ExecRequest(("cat",), stdin=True)
        async with await service.guests.exec(CALLER, sandbox.id, request):
            assert service.guests.execs.used == 1

        assert service.guests.execs.used == 0
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_one_more_bake_than_may_wait_is_refused_and_so_many_machines_run(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        recipe = fake_host.recipe(knobs="boot=never")
        machines: list[int] = []

        async def bake(number: int) -> None:
            request = SnapshotRequest(parse_tag(f"t{number}"), recipe)
            async with aclosing(service.snapshots.bake(CALLER, request)) as steps:
                async for step in steps:
                    if isinstance(step, Progress) and step.stage == "boot":
                        machines.append(number)
                        booting.set()

        booting = asyncio.Event()
        bakes = [asyncio.ensure_future(bake(number)) for number in range(BAKES_MAX)]
        try:
            async with asyncio.timeout(30):
                while len(machines) < BAKES_MAX:  # as many boot, or say that they wait
                    await booting.wait()
                    booting.clear()
            with pytest.raises(CapacityError, match="one more of bakes was asked for"):
                await bake(BAKES_MAX)

            assert len(list(fake_host.settings.bakes_dir.iterdir())) == BAKED_MACHINES_MAX
            assert parse_tag(f"t{BAKES_MAX}") not in {
                each.tag for each in await service.snapshots.list(CALLER)
            }
        finally:
            for each in bakes:
                each.cancel()
            await asyncio.wait(bakes)
        assert service.snapshots.bakes.used == 0
    assert fake_host.left_over() == []


async def test_a_tenant_that_bakes_all_it_can_leaves_machines_to_others(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service, asyncio.timeout(60):
        begun = asyncio.Semaphore(0)

        async def bake(caller: Caller, tag: str, recipe: RecipeSource) -> None:
            request = SnapshotRequest(parse_tag(tag), recipe)
            async with aclosing(service.snapshots.bake(caller, request)) as steps:
                async for step in steps:
                    if isinstance(step, Progress) and step.stage == "boot":
                        begun.release()

        never = fake_host.recipe(knobs="boot=never", name="never")
        good = fake_host.recipe()
        red, blue = tenant("red"), tenant("blue")
        bakes = [asyncio.ensure_future(bake(red, f"t{n}", never)) for n in range(BAKES_MAX // 2)]
        try:
            for _ in bakes:  # it boots, or says that it waits
                await begun.acquire()
            with pytest.raises(CapacityError, match="tenant red has 16, its share of the 32"):
                await bake(red, "one-more", never)
            await bake(blue, "blue", good)

            assert len(list(fake_host.settings.bakes_dir.iterdir())) == BAKED_MACHINES_MAX // 2
        finally:
            for each in bakes:
                each.cancel()
            await asyncio.wait(bakes)
    assert fake_host.left_over() == []
