"""Pausing and resuming sandboxes of the real service, over the fake VMM."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest

from forkd.engine.control import Control
from forkd.errors import Conflict, EngineError
from forkd.model.event import EventKind
from forkd.model.sandbox import ForkOptions, SandboxState
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost


async def fork(host: Host, ttl_s: float | None = None) -> Sandbox:
    return (await host.sandboxes.fork(CALLER, TAG, 1, ForkOptions(ttl_s=ttl_s))).sandboxes[0]


async def machine_is(host: Host, sandbox: SandboxId) -> str:
    owner = host.sandboxes.roster.find(sandbox)
    assert owner is not None
    async with await Control.connect(owner.control) as control:
        return (await control.status()).state


def state_of(host: Host, sandbox: SandboxId) -> SandboxState:
    owner = host.sandboxes.roster.find(sandbox)
    assert owner is not None
    return owner.sandbox.state


async def test_a_paused_sandbox_stays_so_while_daemons_come_and_go(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host)
        await host.sandboxes.pause(CALLER, made.id)
        assert await machine_is(host, made.id) == "paused"
        assert (await host.usage.get(CALLER, made.id)).sandbox.id == made.id
        assert (await host.trees.draw(CALLER, made.id))[0].private_bytes is not None

    async with fake_host.service() as host:
        assert (await host.sandboxes.get(CALLER, made.id)).state is SandboxState.PAUSED
        assert await machine_is(host, made.id) == "paused"
        resumed = await host.sandboxes.resume(CALLER, made.id)
        assert (resumed.state, resumed.pid) == (SandboxState.RUNNING, made.pid)
        assert await machine_is(host, made.id) == "running"
        await host.guests.ping(CALLER, made.id)
        kinds = []
        async with contextlib.aclosing(host.journal.follow(CALLER, 0, follow=False)) as batches:
            async for batch in batches:
                kinds += [each.kind for each in batch.events if each.subject == made.id]
        assert kinds == [
            EventKind.SANDBOX_READY,
            EventKind.SANDBOX_PAUSED,
            EventKind.SANDBOX_RESUMED,
        ]
        await host.sandboxes.delete(CALLER, made.id)


async def test_the_time_of_a_paused_sandbox_goes_on(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host, ttl_s=0.5)
        await host.sandboxes.pause(CALLER, made.id)
        await until(lambda: state_of(host, made.id) is SandboxState.EXITED)
        assert (await host.sandboxes.get(CALLER, made.id)).exit_reason == "ttl"
        with pytest.raises(Conflict):
            await host.sandboxes.resume(CALLER, made.id)
        await host.sandboxes.delete(CALLER, made.id)
        assert fake_host.left_over() == []


async def test_the_end_of_a_paused_machine_is_noticed(fake_host: FakeHost) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host)
        await host.sandboxes.pause(CALLER, made.id)
        assert made.pid is not None
        os.kill(made.pid, signal.SIGKILL)
        await until(lambda: state_of(host, made.id) is SandboxState.EXITED)
        await host.sandboxes.delete(CALLER, made.id)


async def test_a_resumed_guest_has_the_hosts_time(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host)
        owner = host.sandboxes.roster.find(made.id)
        assert owner is not None
        asked = []

        async def follow_clock() -> float:
            asked.append(owner.sandbox.state)
            return 0.0

        monkeypatch.setattr(owner.guest, "follow_clock", follow_clock)
        await host.sandboxes.pause(CALLER, made.id)
        assert asked == []
        await host.sandboxes.resume(CALLER, made.id)
        assert asked == [SandboxState.RUNNING]
        await host.sandboxes.delete(CALLER, made.id)


async def test_a_machine_that_refuses_to_be_paused_runs_on(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Control) -> None:
        raise EngineError("a vCPU does not stop")

    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await fork(host)
        with monkeypatch.context() as broken:
            broken.setattr(Control, "pause", refuse)
            with pytest.raises(EngineError):
                await host.sandboxes.pause(CALLER, made.id)
        assert await host.sandboxes.get(CALLER, made.id) == made

    async with fake_host.service() as host:
        assert await host.sandboxes.get(CALLER, made.id) == made
        await host.sandboxes.delete(CALLER, made.id)
