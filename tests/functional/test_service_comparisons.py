"""Two machines are compared by copies of them, which are gone afterwards."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, ForkdError, GuestError
from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions
from forkd.service.trees.branches import Branches
from tests.support.branches import branched, held
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.caller import Caller
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import BranchOptions, BranchResult
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost


async def write(service: Host, sandbox: SandboxId, path: str, data: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield data

    await service.guests.write_file(CALLER, sandbox, path, pieces())


async def test_a_difference_names_the_files_that_differ_and_leaves_no_copy(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await write(service, source.id, "/kept", b"k")
        await write(service, source.id, "/changed", b"one")
        (child,) = await branched(service, source.id)
        await write(service, child.id, "/changed", b"two")
        await write(service, child.id, "/added", b"a")

        found = await service.comparisons.compare(CALLER, source.id, child.id)
        assert [(each.path, each.change) for each in found.changes] == [
            ("/added", "added"),
            ("/changed", "changed"),
        ]
        of_snapshot = await service.comparisons.compare(CALLER, TAG, child.id)
        assert {each.path for each in of_snapshot.changes} == {"/added", "/changed", "/kept"}
        assert len(await service.sandboxes.list(CALLER)) == 2
        assert list((fake_host.settings.state_dir / "staging").iterdir()) == []


async def test_a_copy_is_gone_though_its_source_was_deleted_as_soon_as_it_was_made(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch = Branches.branch

    async def branch_and_delete(
        of: Branches, caller: Caller, name: SandboxId, count: int, options: BranchOptions
    ) -> BranchResult:
        made = await branch(of, caller, name, count, options)
        await of.sandboxes.delete(caller, name)
        return made

    async with held(fake_host) as (service, source):
        (other,) = await branched(service, source.id)
        monkeypatch.setattr(Branches, "branch", branch_and_delete)

        with contextlib.suppress(ForkdError):  # its memory cannot be read any more
            await service.comparisons.compare(CALLER, source.id, TAG)

        assert [each.id for each in await service.sandboxes.list(CALLER)] == [other.id]
        assert list((fake_host.settings.state_dir / "staging").iterdir()) == []


async def test_a_difference_counts_from_the_last_snapshot_that_both_go_back_to(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await write(service, source.id, "/early", b"e")
        await service.branches.snapshot(CALLER, source.id, parse_tag("link"), wait=True)
        (forked,) = (
            await service.sandboxes.fork(CALLER, parse_tag("link"), 1, ForkOptions())
        ).sandboxes
        await write(service, forked.id, "/late", b"l")

        found = await service.comparisons.compare(CALLER, parse_tag("link"), forked.id)
        assert [each.path for each in found.changes] == ["/late"]
        found = await service.comparisons.compare(CALLER, forked.id, TAG)
        assert [(each.path, each.change) for each in found.changes] == [
            ("/early", "removed"),
            ("/late", "removed"),
        ]
        await service.sandboxes.delete(CALLER, forked.id)
        await service.snapshots.delete(CALLER, parse_tag("link"))


async def test_what_has_no_common_ancestor_or_no_file_system_is_not_compared(
    fake_host: FakeHost,
) -> None:
    async with held(fake_host) as (service, source):
        await fake_host.bake(service, fake_host.recipe(name="another"), "another")
        with pytest.raises(Conflict, match="no common ancestor"):
            await service.comparisons.compare(CALLER, source.id, parse_tag("another"))

        await write(service, source.id, "/no ext4", b"")
        with pytest.raises(GuestError, match="it is not ext4"):
            await service.comparisons.compare(CALLER, TAG, source.id)
        assert len(await service.sandboxes.list(CALLER)) == 1
        assert list((fake_host.settings.state_dir / "staging").iterdir()) == []


async def test_a_guest_that_cannot_be_frozen_is_not_compared(fake_host: FakeHost) -> None:
    async with held(fake_host, "freeze=fail") as (service, source):
        with pytest.raises(GuestError, match="cannot be frozen"):
            await service.comparisons.compare(CALLER, TAG, source.id)
        assert len(await service.sandboxes.list(CALLER)) == 1
