"""Names, labels, environments and lives of sandboxes of the real service, over the fake VMM."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, NotFound
from forkd.model.exec import ExecRequest, Stdout
from forkd.model.ids import parse_sandbox_name, parse_tag
from forkd.model.sandbox import (
    BranchOptions,
    DefaultTtl,
    ForkOptions,
    SandboxChange,
    SandboxState,
)
from tests.support.callers import CALLER, tenant
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

BAD = parse_tag("bad")
WEB = parse_sandbox_name("web")
OPTIONS = ForkOptions(name=WEB, labels={"team": "a"}, env={"A": "1", "B": "2"})


async def fork(host: Host, options: ForkOptions = OPTIONS) -> Sandbox:
    return (await host.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes[0]


async def env_of(host: Host, sandbox: SandboxId, own: dict[str, str]) -> set[str]:
    said = b""
    async with await host.guests.exec(CALLER, sandbox, ExecRequest(("env",), own)) as session:
        async for event in session:
            said += event.data if isinstance(event, Stdout) else b""
    return set(said.decode().split())


async def test_what_a_sandbox_was_given_outlives_the_daemon(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host, replace(OPTIONS, ttl_s=DefaultTtl.DEFAULT))
        lives = timedelta(seconds=fake_host.settings.sandbox_ttl_s)
        assert made.expires_at == made.created_at + lives

    async with fake_host.service() as host:
        assert await host.sandboxes.get(CALLER, made.id) == made
        assert await host.sandboxes.named(CALLER, WEB) == made.id
        assert await env_of(host, made.id, {"B": "3"}) == {"A=1", "B=3"}
        with pytest.raises(Conflict):
            await fork(host)
        renamed = SandboxChange(name=None, labels={}, ttl_s=None)
        changed = await host.sandboxes.change(CALLER, made.id, renamed)

    async with fake_host.service() as host:
        assert await host.sandboxes.get(CALLER, made.id) == changed
        again = await fork(host)
        for each in (made, again):
            await host.sandboxes.delete(CALLER, each.id)


async def test_siblings_inherit_labels_and_environment_and_the_winner_takes_the_name(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        source = await fork(host)
        result = await host.branches.branch(CALLER, source.id, 2, BranchOptions())
        other = await host.branches.branch(CALLER, source.id, 1, BranchOptions(labels={"b": ""}))

        assert [each.labels for each in result.fork.sandboxes] == [{"team": "a"}] * 2
        assert [each.labels for each in other.fork.sandboxes] == [{"b": ""}]
        winner, _ = result.fork.sandboxes
        assert await env_of(host, winner.id, {}) == {"A=1", "B=2"}
        called = SandboxChange(name=parse_sandbox_name("winner"))
        await host.sandboxes.change(CALLER, winner.id, called)
        promoted = (await host.promotions.promote(CALLER, winner.id)).sandbox

        assert (promoted.id, promoted.name) == (source.id, "web")
        assert await host.sandboxes.named(CALLER, WEB) == source.id
        with pytest.raises(NotFound):
            await host.sandboxes.named(CALLER, parse_sandbox_name("winner"))
        await host.sandboxes.delete(CALLER, source.id)

    async with fake_host.service() as host:
        with pytest.raises(NotFound):
            await host.sandboxes.named(CALLER, WEB)
        assert await host.sandboxes.list(CALLER) == ()


async def test_a_name_is_free_again_when_its_sandbox_has_ended_or_was_never_ready(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        await fake_host.bake(host, fake_host.recipe(knobs="fork=fail:1"), BAD)
        first = await fork(host, replace(OPTIONS, ttl_s=0.1))
        await until(lambda: _state(host, first) is SandboxState.EXITED)
        assert await host.sandboxes.named(CALLER, WEB) == first.id

        failed = await host.sandboxes.fork(CALLER, BAD, 1, OPTIONS)
        assert failed.sandboxes == ()
        second = await fork(host)
        assert await host.sandboxes.named(CALLER, WEB) == second.id
        with pytest.raises(Conflict):
            await host.sandboxes.change(CALLER, first.id, SandboxChange(labels={}))
        for each in (first, second):
            await host.sandboxes.delete(CALLER, each.id)


async def test_tenants_have_names_of_their_own(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        await host.snapshots.share(CALLER, TAG, shared=True)
        mine = await fork(host)
        theirs = (await host.sandboxes.fork(tenant("other"), TAG, 1, OPTIONS)).sandboxes[0]

        assert await host.sandboxes.named(CALLER, WEB) == mine.id
        assert await host.sandboxes.named(tenant("other"), WEB) == theirs.id
        with pytest.raises(NotFound):
            await host.sandboxes.named(tenant("third"), WEB)
        for each in (mine, theirs):
            await host.sandboxes.delete(CALLER, each.id)


def _state(host: Host, sandbox: Sandbox) -> SandboxState:
    owner = host.sandboxes.roster.find(sandbox.id)
    assert owner is not None
    return owner.sandbox.state
