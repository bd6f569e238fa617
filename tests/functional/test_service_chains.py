"""Durable snapshots of running sandboxes, and the chains that they make."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd import limits
from forkd.errors import (
    BuildError,
    CapacityError,
    Conflict,
    EngineError,
    ForkdError,
    InvalidRequest,
    NotFound,
    StoreError,
)
from forkd.limits import CHAIN_DEPTH_MAX
from forkd.model.ids import SandboxId, Tag
from forkd.model.progress import Progress
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotStatus
from forkd.service.snapshots import catalog, stored
from tests.support.callers import CALLER
from tests.support.chains import (
    NOW,
    ONE,
    A,
    B,
    C,
    add_link,
    chain,
    forked,
    freed,
    let_go,
    read,
    value,
    write,
)
from tests.support.service_host import TAG, FakeHost, until

if TYPE_CHECKING:
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host


async def test_a_snapshot_of_a_sandbox_has_what_it_had_and_the_sandbox_goes_on(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        async with forked(service) as source:
            await value(service, source.id, "globals().update(thought='first')")
            await write(service, source.id, "/notes", "first")

            made = await service.branches.snapshot(CALLER, source.id, A, wait=True)
            await value(service, source.id, "globals().update(thought='second')")

            assert (made.status, made.parent, made.depth) == (SnapshotStatus.READY, TAG, 1)
            assert (made.source, made.pause_ms) == (source.id, 0.5)
            async with forked(service, A) as sibling:
                assert await value(service, sibling.id, "thought") == "first"
                assert await read(service, sibling.id, "/notes") == "first"
            assert await value(service, source.id, "thought") == "second"
        zygotes = len(list(fake_host.settings.zygotes_dir.iterdir()))
        assert (zygotes, fake_host.left_over()) == (2, [])


async def test_a_link_holds_only_what_its_parent_lacks(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        made = await add_link(service, A)

        def names(snapshot: Snapshot, file: str) -> set[str]:
            return set(json.loads((snapshot.directory / file).read_bytes()[64:]))

        assert names(made, "memory") == {"a", "identity"}
        assert names(made, "disk.layer") == {"/a"}
        base = await service.snapshots.get(CALLER, TAG)
        assert made.chain_bytes == base.stored_bytes + made.stored_bytes
        assert made.shared_fraction == pytest.approx(base.stored_bytes / made.chain_bytes)
        assert (base.depth, base.shared_fraction) == (0, 0.0)


async def test_a_chain_is_there_after_a_restart_with_all_that_its_links_added(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        before = await service.snapshots.list(CALLER)

    async with fake_host.service() as service:
        assert await service.snapshots.list(CALLER) == before
        assert [each.depth for each in before] == [1, 2, 3, 0]
        async with forked(service, C) as sandbox:
            assert await value(service, sandbox.id, "(answer, a, b, c)") == [42, 1, 1, 1]
            assert [await read(service, sandbox.id, f"/{tag}") for tag in (A, B, C)] == [A, B, C]


async def test_the_zygotes_of_a_chain_are_derived_and_stay_while_one_of_them_is_used(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
    settings = replace(fake_host.settings, zygote_idle_s=0.05)

    async with FakeHost(fake_host.folder, settings).service() as service:
        (sandbox,) = (await service.sandboxes.fork(CALLER, C, 1, ONE)).sandboxes
        # The head is idle first, and lets go of its parent, which is idle next.
        await until(lambda: list(settings.zygotes_dir.iterdir()) == [])
        assert fake_host.vmm_processes() == [sandbox.pid]
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_a_zygote_that_dies_in_the_middle_of_a_chain_is_derived_again(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        async with forked(service, C):
            pass
        for pid in fake_host.vmm_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A process has no command line before its sockets are closed, so we wait for the service.
        zygotes = fake_host.settings.zygotes_dir
        await until(lambda: list(zygotes.iterdir()) == [])

        async with forked(service, C) as sandbox:
            assert await value(service, sandbox.id, "(a, b, c)") == [1, 1, 1]


# Writing


async def writing(fake_host: FakeHost, service: Host) -> Sandbox:
    """Bake a machine whose links are written once `let_go` says so, and begin to write one."""
    await fake_host.bake(service, fake_host.recipe(knobs="link=wait"))
    (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ONE)).sandboxes
    made = await service.branches.snapshot(CALLER, sandbox.id, A, wait=False)
    assert (made.status, made.parent, made.pause_ms) == (SnapshotStatus.WRITING, TAG, 0.5)
    return sandbox


async def test_a_fork_waits_for_a_snapshot_that_is_being_written_or_is_refused_as_asked(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        sandbox = await writing(fake_host, service)
        with pytest.raises(Conflict, match="a is still being written"):
            await service.sandboxes.fork(CALLER, A, 1, NOW)
        waiting = asyncio.ensure_future(service.sandboxes.fork(CALLER, A, 1, ONE))
        await asyncio.sleep(0)
        assert not waiting.done()

        let_go(fake_host)

        (sibling,) = (await waiting).sandboxes
        assert (await service.snapshots.get(CALLER, A)).status is SnapshotStatus.READY
        for each in (sandbox, sibling):
            await service.sandboxes.delete(CALLER, each.id)


async def test_a_fork_does_not_wait_for_ever(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "WRITING_WAIT_S", 0.05)
    async with fake_host.service() as service:
        sandbox = await writing(fake_host, service)

        with pytest.raises(Conflict, match="still being written"):
            await service.sandboxes.fork(CALLER, A, 1, ONE)

        let_go(fake_host)
        await service.sandboxes.delete(CALLER, sandbox.id)


async def test_a_source_may_end_while_it_is_being_written(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        sandbox = await writing(fake_host, service)
        await service.sandboxes.delete(CALLER, sandbox.id)
        let_go(fake_host)

        async with forked(service, A) as sibling:
            assert await value(service, sibling.id, "answer") == 42
        assert fake_host.left_over() == []


async def test_what_is_being_written_holds_its_tag_and_its_parent(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        sandbox = await writing(fake_host, service)
        with pytest.raises(Conflict, match="a is being written already"):
            await service.branches.snapshot(CALLER, sandbox.id, A, wait=True)
        await service.sandboxes.delete(CALLER, sandbox.id)

        with pytest.raises(Conflict, match="a is being written"):
            await service.snapshots.delete(CALLER, A)
        with pytest.raises(Conflict, match="python is the parent of a"):
            await service.snapshots.delete(CALLER, TAG)
        with pytest.raises(Conflict, match="a is being written"):
            await service.snapshots.delete(CALLER, TAG, cascade=True)
        with pytest.raises(Conflict, match="a is being written"):
            await service.snapshots.delete(CALLER, TAG, force=True)
        let_go(fake_host)
        await service.sandboxes.fork(CALLER, A, 1, ONE)
        for each in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, each.id)


async def test_two_snapshots_of_one_sandbox_at_once_are_both_whole(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        async with forked(service) as source:
            made = await asyncio.gather(
                service.branches.snapshot(CALLER, source.id, A, wait=True),
                service.branches.snapshot(CALLER, source.id, B, wait=True),
            )
        assert [each.status for each in made] == [SnapshotStatus.READY] * 2


async def test_a_full_disk_is_one_clear_error_and_leaves_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=full"))
        async with forked(service) as source:
            with pytest.raises(CapacityError, match="the disk has no room for snapshot a"):
                await service.branches.snapshot(CALLER, source.id, A, wait=True)

            with pytest.raises(NotFound):
                await service.snapshots.get(CALLER, A)
            assert await value(service, source.id, "answer") == 42
        assert fake_host.left_over() == []
        assert list((fake_host.settings.state_dir / "writing").iterdir()) == []


@pytest.mark.parametrize(
    ("knob", "words"), [("link=full", "no room"), ("link=die", "ended the connection")]
)
async def test_a_failure_that_nobody_waits_for_stays_to_be_seen(
    fake_host: FakeHost, knob: str, words: str
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs=knob))
        async with forked(service) as source:
            await service.branches.snapshot(CALLER, source.id, A, wait=False)
            with pytest.raises(StoreError, match=f"a cannot be used: .*{words}"):
                await service.sandboxes.fork(CALLER, A, 1, ONE)
            found = await service.snapshots.get(CALLER, A)
            assert (found.status, found.source) == (SnapshotStatus.FAILED, source.id)

    async with fake_host.service() as service:
        assert words in str((await service.snapshots.get(CALLER, A)).error)
        await service.snapshots.delete(CALLER, A)
        with pytest.raises(NotFound):
            await service.snapshots.get(CALLER, A)
    assert list((fake_host.settings.state_dir / "writing").iterdir()) == []


async def test_a_tag_whose_writing_failed_is_free(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=full"))
        async with forked(service) as source:
            await service.branches.snapshot(CALLER, source.id, A, wait=False)
            with pytest.raises(StoreError):
                await service.sandboxes.fork(CALLER, A, 1, ONE)
        await fake_host.bake(service, fake_host.recipe(name="other"), tag=A)

    async with fake_host.service() as service:
        assert (await service.snapshots.get(CALLER, A)).status is SnapshotStatus.READY


async def test_what_a_daemon_was_writing_when_it_stopped_has_failed(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await writing(fake_host, service)

    async with fake_host.service() as service:
        found = await service.snapshots.get(CALLER, A)
        assert (found.status, found.error) == (SnapshotStatus.FAILED, stored.KILLED)
        assert fake_host.left_over() != []  # the source lives on
        for each in await service.sandboxes.list(CALLER):
            assert await value(service, each.id, "answer") == 42
            await service.sandboxes.delete(CALLER, each.id)
        assert freed(fake_host)


async def test_a_writer_that_came_as_far_as_the_name_has_succeeded(fake_host: FakeHost) -> None:
    record = fake_host.settings.state_dir / "writing" / "a.json"
    async with fake_host.service() as service:
        sandbox = await writing(fake_host, service)
        kept = record.read_bytes()
        let_go(fake_host)
        await service.sandboxes.fork(CALLER, A, 1, ONE)
        assert not record.exists()
        await service.sandboxes.delete(CALLER, sandbox.id)
    record.write_bytes(kept)

    async with fake_host.service() as service:
        assert (await service.snapshots.get(CALLER, A)).status is SnapshotStatus.READY
        assert not record.exists()
        for each in await service.sandboxes.list(CALLER):
            await service.sandboxes.delete(CALLER, each.id)


@pytest.mark.parametrize(
    ("knob", "kind"), [("branch=fail", ForkdError), ("branch=die", EngineError)]
)
async def test_a_machine_that_cannot_be_branched_leaves_nothing(
    fake_host: FakeHost, knob: str, kind: type[ForkdError]
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs=knob))
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ONE)).sandboxes

        with pytest.raises(kind):
            await service.branches.snapshot(CALLER, source.id, A, wait=False)

        with pytest.raises(NotFound):
            await service.snapshots.get(CALLER, A)
        assert list((fake_host.settings.state_dir / "writing").iterdir()) == []
        await service.sandboxes.delete(CALLER, source.id)
        assert fake_host.left_over() == []


async def test_an_exited_sandbox_is_not_written_down(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (source,) = (await service.sandboxes.fork(CALLER, TAG, 1, ONE)).sandboxes
        with contextlib.suppress(EngineError):
            await service.guests.eval(CALLER, source.id, "die")
        async for _ in service.sandboxes.follow_console_log(CALLER, source.id):
            pass  # it ends with the sandbox

        with pytest.raises(Conflict, match="exited"):
            await service.branches.snapshot(CALLER, source.id, A, wait=True)

        with pytest.raises(NotFound):
            await service.snapshots.get(CALLER, A)
        await service.sandboxes.delete(CALLER, source.id)


async def test_a_chain_is_as_long_as_its_limit_and_no_longer(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CHAIN_DEPTH_MAX == 64
    monkeypatch.setattr(catalog, "CHAIN_DEPTH_MAX", 2)
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        await add_link(service, A)
        await add_link(service, B, A)
        (source,) = (await service.sandboxes.fork(CALLER, B, 1, ONE)).sandboxes
        processes = fake_host.vmm_processes()

        with pytest.raises(Conflict, match=r"b has 2 snapshots under it.*compact b first"):
            await service.branches.snapshot(CALLER, source.id, C, wait=True)

        assert fake_host.vmm_processes() == processes
        assert list((fake_host.settings.state_dir / "writing").iterdir()) == []
        with pytest.raises(Conflict, match="compact b first"):
            await collect(service, LinkRequest(C, B, "true"))
        assert len(await service.sandboxes.list(CALLER)) == 1
        await service.sandboxes.delete(CALLER, source.id)


# A link in one command


async def collect(service: Host, request: LinkRequest) -> list[Progress | Snapshot]:
    async with contextlib.aclosing(service.chains.extend(CALLER, request)) as events:
        return [event async for event in events]


async def test_a_link_is_a_fork_in_which_a_command_has_run(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())

        *steps, made = await collect(service, LinkRequest(A, TAG, "pip install pandas"))

        assert isinstance(made, Snapshot)
        assert (made.status, made.parent) == (SnapshotStatus.READY, TAG)
        stages = [step.stage for step in steps if isinstance(step, Progress)]
        assert list(dict.fromkeys(stages)) == ["fork", "exec", "save"]
        assert await service.sandboxes.list(CALLER) == ()


async def test_a_command_that_fails_leaves_its_last_words_and_nothing_else(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())

        with pytest.raises(BuildError, match=r"the command exited with 3: .*no such package"):
            await collect(service, LinkRequest(A, TAG, "fail 3 no such package"))

        with pytest.raises(NotFound):
            await service.snapshots.get(CALLER, A)
        assert await service.sandboxes.list(CALLER) == ()


async def test_leaving_a_link_before_its_end_leaves_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        events = service.chains.extend(CALLER, LinkRequest(A, TAG, "true"))
        async for event in events:
            if isinstance(event, Progress) and event.stage == "exec":
                break

        await events.aclose()

        assert await service.sandboxes.list(CALLER) == ()
        assert fake_host.left_over() == []
        assert [each.tag for each in await service.snapshots.list(CALLER)] == [TAG]


async def test_a_link_of_a_sandbox_is_its_snapshot(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        async with forked(service) as source:
            *_, made = await collect(service, LinkRequest(A, source.id))
            assert isinstance(made, Snapshot)
            assert made.source == source.id


@pytest.mark.parametrize(
    ("source", "command", "words"),
    [
        (TAG, None, "python is a snapshot: say with exec"),
        (TAG, "", "python is a snapshot: say with exec"),
        (SandboxId("sb-" + "a" * 26), "true", "exec is for a fork of a snapshot"),
        (TAG, "x" * (limits.EXEC_BYTES_MAX // 4 + 1), "exec, in bytes, must be"),
    ],
)
def test_a_link_without_a_difference_or_with_a_strange_one_is_refused(
    source: Tag, command: str | None, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        LinkRequest(A, source, command)
