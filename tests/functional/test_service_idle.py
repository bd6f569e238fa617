"""Sandboxes that nobody uses are ended by the real service, over the fake VMM."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, InvalidRequest
from forkd.limits import TTL_S_MAX, TTL_S_MIN
from forkd.model.event import EventKind
from forkd.model.exec import ExecRequest
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxChange, SandboxState
from forkd.service.sandboxes.owner import REASON_IDLE
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from forkd.service.sandboxes.owner import SandboxOwner
    from tests.support.service_host import FakeHost

LONG_S = 3_600.0


@pytest.fixture
async def host(fake_host: FakeHost) -> AsyncGenerator[Host, None]:
    """A host with a snapshot."""
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        yield host
        for each in await host.sandboxes.list(CALLER):
            await host.sandboxes.delete(CALLER, each.id)


async def fork(host: Host, idle_ttl_s: float | None) -> Sandbox:
    options = ForkOptions(idle_ttl_s=idle_ttl_s)
    return (await host.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes[0]


def owner_of(host: Host, sandbox: Sandbox) -> SandboxOwner:
    owner = host.sandboxes.roster.find(sandbox.id)
    assert owner is not None
    return owner


def has_ended(host: Host, sandbox: Sandbox) -> bool:
    return owner_of(host, sandbox).sandbox.state is SandboxState.EXITED


async def look(host: Host, sandbox: Sandbox, idle_s: float) -> bool:
    """Have a sandbox looked at, as when its timer fires, `idle_s` after its last use.

    Return whether it was ended.
    """
    owner = owner_of(host, sandbox)
    owner.guest.used_at = asyncio.get_running_loop().time() - idle_s
    await owner.end_if_idle()
    return owner.sandbox.state is SandboxState.EXITED


async def test_a_sandbox_that_nobody_uses_is_ended_and_says_why(host: Host) -> None:
    made = await fork(host, TTL_S_MIN)
    assert made.idle_ttl_s == TTL_S_MIN

    await until(lambda: has_ended(host, made))

    with pytest.raises(Conflict, match=f"has exited: {REASON_IDLE}"):
        await host.guests.ping(CALLER, made.id)
    events = []
    async with contextlib.aclosing(host.journal.follow(CALLER, 0, follow=False)) as batches:
        async for batch in batches:
            events += [each for each in batch.events if each.kind is EventKind.SANDBOX_EXITED]
    assert [each.detail for each in events] == [{"reason": REASON_IDLE}]


async def test_one_without_a_limit_is_not_ended(host: Host) -> None:
    made = await fork(host, None)
    assert not await look(host, made, TTL_S_MAX)


async def test_what_is_used_now_or_was_a_moment_ago_is_not_ended(host: Host) -> None:
    made = await fork(host, LONG_S)
    assert not await look(host, made, LONG_S - 1)
    session = await host.guests.exec(CALLER, made.id, ExecRequest(("cat",), stdin=True))
    assert not await look(host, made, 2 * LONG_S)
    await session.aclose()
    # Use counts to its end.
    assert not has_ended(host, made)
    assert owner_of(host, made).guest.idle_since is not None
    owner = owner_of(host, made)
    await owner.end_if_idle()
    assert not has_ended(host, made)
    assert await look(host, made, LONG_S + 1)


async def test_evaluations_files_and_changes_are_use_and_a_ping_is_not(host: Host) -> None:
    made = await fork(host, LONG_S)
    guest = owner_of(host, made).guest

    def was_used() -> bool:
        return guest.idle_since is None or guest.idle_since > 0

    for use in (
        lambda: host.guests.eval(CALLER, made.id, "1"),
        lambda: host.guests.list_dir(CALLER, made.id, "/"),
        lambda: host.sandboxes.pause(CALLER, made.id),
        lambda: host.sandboxes.resume(CALLER, made.id),
        lambda: host.sandboxes.change(CALLER, made.id, SandboxChange(labels={"a": "b"})),
    ):
        guest.used_at = 0.0
        await use()
        assert was_used()
    guest.used_at = 0.0
    await host.guests.ping(CALLER, made.id)
    assert not was_used()


async def test_a_console_that_is_followed_is_use(host: Host) -> None:
    made = await fork(host, LONG_S)
    log = host.sandboxes.follow_console_log(CALLER, made.id)
    async with contextlib.aclosing(log):
        following = asyncio.ensure_future(anext(log))
        await until(lambda: owner_of(host, made).guest.idle_since is None)
        assert not await look(host, made, 2 * LONG_S)
        following.cancel()
        await asyncio.wait([following])
    assert await look(host, made, 2 * LONG_S)


async def test_the_limit_outlives_the_daemon_and_its_time_begins_anew(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host, LONG_S)

    async with fake_host.service() as host:
        found = await host.sandboxes.get(CALLER, made.id)
        assert (found.idle_ttl_s, found.state) == (LONG_S, SandboxState.RUNNING)
        owner = owner_of(host, made)
        await owner.end_if_idle()
        assert not has_ended(host, made)
        assert await look(host, made, LONG_S + 1)
        await host.sandboxes.delete(CALLER, made.id)


async def test_siblings_have_the_limit_of_their_source(host: Host) -> None:
    made = await fork(host, LONG_S)
    branched = await host.branches.branch(CALLER, made.id, 1, BranchOptions())
    assert branched.fork.sandboxes[0].idle_ttl_s == LONG_S


async def test_the_limit_can_be_changed(host: Host) -> None:
    made = await fork(host, None)
    changed = await host.sandboxes.change(CALLER, made.id, SandboxChange(idle_ttl_s=LONG_S))
    assert (changed.idle_ttl_s, changed.expires_at) == (LONG_S, made.expires_at)
    ended = await host.sandboxes.change(CALLER, made.id, SandboxChange(idle_ttl_s=None))
    assert ended.idle_ttl_s is None
    assert not await look(host, made, TTL_S_MAX)
    await host.sandboxes.change(CALLER, made.id, SandboxChange(idle_ttl_s=TTL_S_MIN))
    await until(lambda: has_ended(host, made))


@pytest.mark.parametrize("idle_ttl_s", [TTL_S_MIN / 2, TTL_S_MAX + 1, float("nan")])
def test_a_time_one_past_its_range_is_refused(idle_ttl_s: float) -> None:
    for make in (ForkOptions, SandboxChange):
        with pytest.raises(InvalidRequest) as refused:
            make(idle_ttl_s=idle_ttl_s)
        assert refused.value.context["field"] == "idle_ttl_s"
    assert replace(ForkOptions(), idle_ttl_s=TTL_S_MAX).idle_ttl_s == TTL_S_MAX
