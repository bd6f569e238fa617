"""Every kind of event is noted by what makes it happen, and no restart hides one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest

from forkd.errors import ForkdError
from forkd.model.caller import DEFAULT_TENANT, Caller, Scope
from forkd.model.event import EventKind
from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.tenant import parse_tenant
from tests.support.callers import CALLER
from tests.support.events import next_of
from tests.support.service_host import TAG, FakeHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from forkd.model.ids import SandboxId
    from forkd.service.host import Host

DEADLINE_S = 30.0
OPTIONS = ForkOptions()
ALL_OR_NOTHING = ForkOptions(all_or_nothing=True)
OTHER = parse_tag("other")


async def one(host: Host) -> SandboxId:
    (made,) = (await host.sandboxes.fork(CALLER, TAG, 1, OPTIONS)).sandboxes
    return made.id


async def ready(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    return await one(host), {"tag": TAG}


async def failed(fake: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    await fake.bake(host, fake.recipe(name="flaky", knobs="fork=fail:1"), "flaky")
    result = await host.sandboxes.fork(CALLER, parse_tag("flaky"), 1, OPTIONS)
    failure = result.failures[0]
    return failure.id, {"stage": failure.stage, "error": failure.message, "tag": "flaky"}


async def branched(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    source = await one(host)
    await host.branches.branch(CALLER, source, 2, BranchOptions())
    return source, {"siblings": 2, "pause_ms": 0.5}


async def reset(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    sandbox = await one(host)
    took_ms = await host.sandboxes.reset(CALLER, sandbox, deadline_s=DEADLINE_S)
    return sandbox, {"took_ms": took_ms}


async def paused(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    sandbox = await one(host)
    await host.sandboxes.pause(CALLER, sandbox)
    return sandbox, {}


async def resumed(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    sandbox = await one(host)
    await host.sandboxes.pause(CALLER, sandbox)
    await host.sandboxes.resume(CALLER, sandbox)
    return sandbox, {}


async def promoted(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    parent = await one(host)
    result = await host.branches.branch(CALLER, parent, 1, BranchOptions())
    child = result.fork.sandboxes[0].id
    await host.promotions.promote(CALLER, child)
    return parent, {"was": child, "ended": 1}


async def exited(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    made = await host.sandboxes.get(CALLER, await one(host))
    assert made.pid is not None
    os.kill(made.pid, signal.SIGKILL)
    return made.id, {}


async def deleted(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    sandbox = await one(host)
    await host.sandboxes.delete(CALLER, sandbox)
    return sandbox, {}


async def snapshot_made(_: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    source = await one(host)
    await host.branches.snapshot(CALLER, source, OTHER, wait=True)
    return OTHER, {}


async def snapshot_failed(fake: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    with pytest.raises(ForkdError):
        await fake.bake(host, fake.recipe(name="bad", knobs="save=fail"), OTHER)
    return OTHER, {}


async def snapshot_deleted(fake: FakeHost, host: Host) -> tuple[str, dict[str, object]]:
    await fake.bake(host, fake.recipe(), OTHER)
    await host.snapshots.delete(CALLER, OTHER)
    return OTHER, {}


CAUSES: dict[EventKind, Callable[[FakeHost, Host], Awaitable[tuple[str, dict[str, object]]]]] = {
    EventKind.SANDBOX_READY: ready,
    EventKind.SANDBOX_FAILED: failed,
    EventKind.SANDBOX_BRANCHED: branched,
    EventKind.SANDBOX_RESET: reset,
    EventKind.SANDBOX_PAUSED: paused,
    EventKind.SANDBOX_RESUMED: resumed,
    EventKind.SANDBOX_PROMOTED: promoted,
    EventKind.SANDBOX_EXITED: exited,
    EventKind.SANDBOX_DELETED: deleted,
    EventKind.SNAPSHOT_WRITING: snapshot_made,
    EventKind.SNAPSHOT_READY: snapshot_made,
    EventKind.SNAPSHOT_FAILED: snapshot_failed,
    EventKind.SNAPSHOT_DELETED: snapshot_deleted,
}
"""What makes each kind of event happen; returns its subject, and what else it must have."""


@pytest.mark.parametrize("kind", [kind for kind in EventKind if kind is not EventKind.GAP])
async def test_what_happens_is_an_event_of_its_kind(fake_host: FakeHost, kind: EventKind) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        begun = (await next_of(host, EventKind.SNAPSHOT_READY)).id
        try:
            subject, detail = await CAUSES[kind](fake_host, host)
            event = await next_of(host, kind, begun)
        finally:
            await end_all(host)

    assert event.subject == subject
    assert event.owner.tenant == DEFAULT_TENANT
    assert detail.items() <= dict(event.detail).items()
    json.dumps(dict(event.detail))


async def test_a_fork_of_all_or_nothing_tells_which_failed(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe(knobs="fork=fail:2"))
        with pytest.raises(ForkdError, match="1 of 2"):
            await host.sandboxes.fork(CALLER, TAG, 2, ALL_OR_NOTHING)
        event = await next_of(host, EventKind.SANDBOX_FAILED)

        assert event.detail["stage"] == "agent"
        told = await kinds(host, EventKind.SANDBOX_FAILED)
        assert told == ["snapshot.writing", "snapshot.ready", "sandbox.failed"]


async def test_what_ended_while_no_daemon_ran_is_told_by_the_next(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await host.sandboxes.get(CALLER, await one(host))
        last = (await next_of(host, EventKind.SANDBOX_READY)).id
    assert made.pid is not None
    os.kill(made.pid, signal.SIGKILL)
    async with fake_host.service() as host:
        event = await next_of(host, EventKind.SANDBOX_EXITED, last)
        assert (event.id, event.subject) == (last + 1, made.id)
        await end_all(host)


async def test_a_daemon_that_was_away_and_came_back_leaves_no_gap(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        sandbox = await one(host)
    async with fake_host.service() as host:
        await host.sandboxes.delete(CALLER, sandbox)

        assert await kinds(host, EventKind.SANDBOX_DELETED) == [
            "snapshot.writing",
            "snapshot.ready",
            "sandbox.ready",
            "sandbox.deleted",
        ]


async def test_a_tenant_hears_only_of_its_own(fake_host: FakeHost) -> None:
    others = Caller("o", parse_tenant("others"), frozenset({Scope.READ, Scope.RUN}), "r")
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        await host.snapshots.share(CALLER, TAG, shared=True)
        await one(host)
        (theirs,) = (await host.sandboxes.fork(others, TAG, 1, OPTIONS)).sandboxes
        async with contextlib.aclosing(host.journal.follow(others, 0)) as batches:
            batch = await anext(batches)
        assert [(each.kind, each.subject) for each in batch.events] == [
            (EventKind.SANDBOX_READY, theirs.id)
        ]
        await end_all(host)


async def kinds(host: Host, until: EventKind) -> list[str]:
    """Return the kinds of all events up to the first of one."""
    found: list[str] = []
    async with (
        asyncio.timeout(DEADLINE_S),
        contextlib.aclosing(host.journal.follow(CALLER, 0)) as batches,
    ):
        while until not in found:
            found += [each.kind for each in (await anext(batches)).events]
    return found


async def end_all(host: Host) -> None:
    for each in await host.sandboxes.list(CALLER):
        await host.sandboxes.delete(CALLER, each.id)
