"""Chains are removed, tidied and compacted without harm, and damage in one is named."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest

from forkd.errors import (
    CapacityError,
    ChainError,
    Conflict,
    EngineError,
    InvalidRequest,
    StoreError,
)
from forkd.model.caller import Caller, Tenant
from forkd.model.ids import parse_tag
from forkd.model.snapshot import Removed, SnapshotStatus
from forkd.service.zygotes import Zygote
from forkd.store.pending import PendingStore
from tests.support.callers import CALLER
from tests.support.chains import (
    ONE,
    A,
    B,
    C,
    add_link,
    chain,
    forked,
    let_go,
    read,
    value,
)
from tests.support.service_host import TAG, UNTIL_DEADLINE_S, FakeHost
from tests.support.stored import write_stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.model.ids import Tag
    from forkd.service.host import Host


async def test_a_parent_is_not_removed_and_the_refusal_names_who_stands_on_it(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)

        with pytest.raises(Conflict, match="a is the parent of b"):
            await service.snapshots.delete(CALLER, A)
        with pytest.raises(InvalidRequest, match="exclude each other"):
            await service.snapshots.delete(CALLER, A, cascade=True, force=True)

        assert len(await service.snapshots.list(CALLER)) == 4


async def test_a_cascade_removes_all_or_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        async with forked(service, B) as sandbox:
            with pytest.raises(Conflict, match=f"b is in use by {sandbox.id}"):
                await service.snapshots.delete(CALLER, A, cascade=True)
            assert len(await service.snapshots.list(CALLER)) == 4

        await service.snapshots.delete(CALLER, A, cascade=True)

        assert [each.tag for each in await service.snapshots.list(CALLER)] == [TAG]
        assert fake_host.left_over() == []
        async with forked(service):
            pass


async def test_force_removes_a_link_from_under_others_unless_one_is_in_use(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        async with forked(service, C) as sandbox:
            with pytest.raises(Conflict, match=f"c is in use by {sandbox.id}"):
                await service.snapshots.delete(CALLER, A, force=True)
            assert len(await service.snapshots.list(CALLER)) == 4

        await service.snapshots.delete(CALLER, A, force=True)

        for tag in (B, C):
            with pytest.raises(StoreError, match="depends on a, which is missing"):
                await service.sandboxes.fork(CALLER, tag, 1, ONE)

    async with fake_host.service() as service:
        found = {each.tag: each for each in await service.snapshots.list(CALLER)}
        assert found[B].error == "b depends on a, which is missing"
        assert found[C].error == "c depends on b, which cannot be used: " + str(found[B].error)


async def test_tidying_removes_what_nobody_can_use_and_nothing_else(fake_host: FakeHost) -> None:
    state = fake_host.settings.state_dir
    async with fake_host.service() as service:
        await chain(fake_host, service)
        await fake_host.bake(service, fake_host.recipe(name="other"), tag="other")
        await service.snapshots.delete(CALLER, A, force=True)
        (state / "staging" / "left").mkdir()
        (state / "snapshots" / ".hidden").mkdir()
        (state / "images" / "unused").mkdir()
        boots = fake_host.settings.cache_dir / "initramfs"
        current = set(boots.iterdir())
        assert current
        for name in ("earlier", "just-used"):
            (boots / f"{name}.cpio").write_bytes(b"another agent")
        for path in (*current, boots / "earlier.cpio"):
            os.utime(path, (1, 1))
        expected = {
            ("initramfs", "earlier.cpio"),
            ("snapshot", "b"),
            ("snapshot", "c"),
            ("staging", "left"),
            ("folder", ".hidden"),
            ("image", "unused"),
        }

        planned = await service.snapshots.tidy(CALLER, dry_run=True)
        assert {(each.kind, each.name) for each in planned} == expected
        assert len(await service.snapshots.list(CALLER)) == 4

        removed = await service.snapshots.tidy(CALLER)
        assert {(each.kind, each.name) for each in removed} == expected
        assert [each.tag for each in await service.snapshots.list(CALLER)] == ["other", TAG]
        assert fake_host.left_over() == []
        assert set(boots.iterdir()) == {*current, boots / "just-used.cpio"}
        assert await service.snapshots.tidy(CALLER) == ()
        async with forked(service):
            pass


async def test_tidying_forgets_failures_and_leaves_what_is_damaged(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=full"))
        async with forked(service) as source:
            await service.branches.snapshot(CALLER, source.id, A, wait=False)
            with pytest.raises(StoreError):
                await service.sandboxes.fork(CALLER, A, 1, ONE)
    (fake_host.settings.state_dir / "snapshots" / TAG / "state").unlink()

    async with fake_host.service() as service:
        assert await service.snapshots.tidy(CALLER) == (Removed("failed", "a", 0),)
        assert [each.tag for each in await service.snapshots.list(CALLER)] == [TAG]


# Compacting


async def test_a_compacted_snapshot_needs_no_other_and_what_stands_on_it_is_as_before(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)

        made = await service.chains.compact(CALLER, B)
        assert (made.depth, made.parent, made.shared_fraction) == (0, None, 0.0)
        await service.snapshots.delete(CALLER, A)

        async with forked(service, C) as sandbox:
            assert await value(service, sandbox.id, "(answer, a, b, c)") == [42, 1, 1, 1]
            assert [await read(service, sandbox.id, f"/{tag}") for tag in (A, B, C)] == [A, B, C]
            await value(service, sandbox.id, "globals().update(d=1)")
            await service.branches.snapshot(CALLER, sandbox.id, A, wait=True)

    async with fake_host.service() as service:
        depths = {each.tag: each.depth for each in await service.snapshots.list(CALLER)}
        assert depths == {TAG: 0, B: 0, C: 1, A: 2}
        async with forked(service, A) as sandbox:
            assert await value(service, sandbox.id, "(a, b, c, d)") == [1, 1, 1, 1]


async def test_compacting_to_another_tag_leaves_the_chain_as_it_is(fake_host: FakeHost) -> None:
    flat = parse_tag("flat")
    async with fake_host.service() as service:
        await chain(fake_host, service)
        async with forked(service, C):
            made = await service.chains.compact(CALLER, C, flat)
            assert (made.tag, made.depth, made.parent) == (flat, 0, None)
            assert (await service.snapshots.get(CALLER, C)).depth == 3
        async with forked(service, flat) as sandbox:
            assert await value(service, sandbox.id, "(a, b, c)") == [1, 1, 1]

        with pytest.raises(Conflict, match="flat exists"):
            await service.chains.compact(CALLER, C, flat)
        await service.snapshots.delete(CALLER, A, cascade=True)
        async with forked(service, flat) as sandbox:
            assert await read(service, sandbox.id, "/c") == C


async def test_compacting_a_base_changes_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        before = await fake_host.bake(service, fake_host.recipe())
        assert await service.chains.compact(CALLER, TAG) == before


async def test_a_chain_in_use_is_not_compacted_in_its_place(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        async with forked(service, C) as sandbox:
            with pytest.raises(Conflict, match=f"{sandbox.id}; compact it to another tag"):
                await service.chains.compact(CALLER, B)
        assert (await service.snapshots.get(CALLER, B)).depth == 2


async def test_a_snapshot_that_is_being_compacted_is_neither_forked_nor_removed(
    fake_host: FakeHost,
) -> None:
    go = fake_host.settings.state_dir / "go"
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=wait"))
        let_go(fake_host)
        await add_link(service, A)
        await add_link(service, B, A)
        go.unlink()

        compacting = asyncio.ensure_future(service.chains.compact(CALLER, A))
        await asyncio.sleep(0)
        for tag in (A, B):
            with pytest.raises(Conflict, match=f"{tag} is being compacted"):
                await service.sandboxes.fork(CALLER, tag, 1, ONE)
        with pytest.raises(Conflict, match="a is the parent of b"):
            await service.snapshots.delete(CALLER, A)
        with pytest.raises(Conflict, match="b is being compacted"):
            await service.snapshots.delete(CALLER, A, cascade=True)
        with pytest.raises(Conflict, match="a is being compacted"):
            await service.chains.compact(CALLER, A)
        let_go(fake_host)

        assert (await compacting).depth == 0
        async with forked(service, B) as sandbox:
            assert await value(service, sandbox.id, "(a, b)") == [1, 1]


async def test_compacting_on_a_full_disk_changes_nothing(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=wait"))
        let_go(fake_host)
        await add_link(service, A)
    state = fake_host.settings.state_dir / "snapshots" / A / "state"
    full = [*json.loads(state.read_bytes()[64:]), "link=full"]
    rewrite(state, full)

    async with fake_host.service() as service:
        with pytest.raises(CapacityError, match="no room for snapshot a"):
            await service.chains.compact(CALLER, A)
        with pytest.raises(CapacityError, match="no room for snapshot b"):
            await service.chains.compact(CALLER, A, B)

        assert [each.tag for each in await service.snapshots.list(CALLER)] == [A, TAG]
        async with forked(service, A) as sandbox:
            assert await value(service, sandbox.id, "a") == 1
        assert fake_host.left_over() == []


def rewrite(path: Path, value: object) -> None:
    """Change a stored file, and the manifest with it."""
    written = write_stored(path, path.name, json.dumps(value).encode())
    manifest = path.parent / "manifest.json"
    members = json.loads(manifest.read_text())
    members["files"] = [written if f["name"] == path.name else f for f in members["files"]]
    manifest.write_text(json.dumps(members))


# Damage


@pytest.mark.parametrize("file", ["state", "memory", "disk.layer"])
async def test_a_flipped_bit_in_a_link_is_found_and_the_link_named_before_anything_runs(
    fake_host: FakeHost, file: str
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
    path = fake_host.settings.state_dir / "snapshots" / B / file
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)

    async with fake_host.service() as service:
        with pytest.raises(ChainError, match=f"snapshot b does not load: {file}") as caught:
            await service.sandboxes.fork(CALLER, C, 1, ONE)
        assert caught.value.context["link"] == B
        assert await service.sandboxes.list(CALLER) == ()
        async with forked(service, A):
            pass


async def test_a_swapped_link_is_found_at_the_start_and_named(fake_host: FakeHost) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
    snapshots = fake_host.settings.state_dir / "snapshots"
    manifest = json.loads((snapshots / B / "manifest.json").read_text())
    shutil.rmtree(snapshots / B)
    shutil.copytree(snapshots / C, snapshots / B)
    taken = json.loads((snapshots / C / "manifest.json").read_text())
    swapped = {**manifest, "files": taken["files"]}
    (snapshots / B / "manifest.json").write_text(json.dumps(swapped))

    async with fake_host.service() as service:
        found = {each.tag: each.status for each in await service.snapshots.list(CALLER)}
        assert found == {
            TAG: SnapshotStatus.READY,
            A: SnapshotStatus.READY,
            B: SnapshotStatus.READY,
            C: SnapshotStatus.FAILED,
        }
        with pytest.raises(StoreError, match="c depends on b, which is not the snapshot"):
            await service.sandboxes.fork(CALLER, C, 1, ONE)


async def test_a_link_that_goes_missing_while_the_daemon_runs_is_named(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
    async with fake_host.service() as service:
        shutil.rmtree(fake_host.settings.state_dir / "snapshots" / A)

        with pytest.raises(ChainError, match="c depends on a, which is missing") as caught:
            await service.sandboxes.fork(CALLER, C, 1, ONE)

        assert caught.value.context["link"] == A
        assert fake_host.vmm_processes() == []


# While something else goes on


def held(
    call: Callable[..., object],
) -> tuple[Callable[..., object], threading.Event, threading.Event]:
    """Return a call that is made in a thread and waits; when it has begun, and what lets it go."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(*args: object) -> object:
        begun.set()
        assert go_on.wait(UNTIL_DEADLINE_S)
        return call(*args)

    return wait, begun, go_on


async def fail_to_write(service: Host, *tags: Tag) -> None:
    """Have records of these snapshots, which could not be written."""
    async with forked(service) as source:
        for tag in tags:
            await service.branches.snapshot(CALLER, source.id, tag, wait=False)
            with pytest.raises(StoreError):
                await service.sandboxes.fork(CALLER, tag, 1, ONE)


async def test_tidying_leaves_a_snapshot_that_was_made_while_it_removed_another(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe(knobs="link=full"))
        await fail_to_write(service, A, B)
        remove, begun, go_on = held(PendingStore.remove)
        with monkeypatch.context() as patched:
            patched.setattr(PendingStore, "remove", remove)
            tidying = asyncio.ensure_future(service.snapshots.tidy(CALLER))
            await asyncio.to_thread(begun.wait, UNTIL_DEADLINE_S)
            with pytest.raises(Conflict, match="a is being removed"):
                await fake_host.bake(service, fake_host.recipe(name="other"), tag=A)
            await fake_host.bake(service, fake_host.recipe(name="other"), tag=B)
            go_on.set()

            assert await tidying == (Removed("failed", "a", 0),)

        assert (await service.snapshots.get(CALLER, B)).status is SnapshotStatus.READY
        async with forked(service, B):
            pass


async def test_a_snapshot_under_the_tag_of_one_that_was_removed_keeps_its_owner(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing one ends its zygote at last, which takes a while."""
    acme = Caller("acme", Tenant("acme"), CALLER.scopes, "test")
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        async with forked(service):
            pass
        ending, go_on = asyncio.Event(), asyncio.Event()
        end = Zygote.end

        async def end_slowly(zygote: Zygote) -> None:
            ending.set()
            await go_on.wait()
            await end(zygote)

        monkeypatch.setattr(Zygote, "end", end_slowly)
        deleting = asyncio.ensure_future(service.snapshots.delete(CALLER, TAG))
        await ending.wait()
        with pytest.raises(Conflict, match="python is being removed"):
            await fake_host.bake(service, fake_host.recipe(), caller=acme)
        go_on.set()
        await deleting
        await fake_host.bake(service, fake_host.recipe(), caller=acme)

    async with fake_host.service() as service:
        assert (await service.snapshots.get(acme, TAG)).owner == acme.owner


async def test_compaction_is_seen_though_a_zygote_does_not_end(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_host.service() as service:
        await chain(fake_host, service)
        with monkeypatch.context() as patched:
            end = Zygote.end

            async def survive(zygote: Zygote) -> None:
                await end(zygote)  # or it would be left over
                raise EngineError("it survives SIGKILL")

            patched.setattr(Zygote, "end", survive)
            made = await service.chains.compact(CALLER, B)

        assert (made.depth, made.parent) == (0, None)
        await service.snapshots.delete(CALLER, A)
        async with forked(service, C) as sandbox:
            assert await value(service, sandbox.id, "(a, b, c)") == [1, 1, 1]
