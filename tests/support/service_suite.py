"""What `forkd.service.api` promises, as tests that every host passes: the real one, and the fakes.

A class of tests inherits from `ServiceSuite` and has a fixture `subject`.  What is asked for here
exists in every guest: the programs `cat`, `echo`, `sh -c "exit N"` and `sleep`, and Python.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import Conflict, Forbidden, ForkdError, InvalidRequest, NotFound
from forkd.model.caller import Scope
from forkd.model.diff import Change, FileChange
from forkd.model.exec import ExecRequest, Exited, Started, Stdout, TtySize
from forkd.model.files import EntryKind
from forkd.model.filters import SandboxFilter
from forkd.model.guest import RuntimeStatus
from forkd.model.ids import new_sandbox_id, parse_tag
from forkd.model.recipe import NamedRecipe, UploadedRecipe
from forkd.model.sandbox import (
    BranchOptions,
    ForkOptions,
    NewLimits,
    Sandbox,
    SandboxState,
)
from forkd.model.snapshot import LinkRequest, SnapshotRequest, SnapshotStatus
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator

    from forkd.model.ids import SandboxId, Tag
    from forkd.service.api import Host

MISSING = parse_tag("missing")
LINK = parse_tag("link")
OPTIONS = ForkOptions()
BRANCH = BranchOptions()

READER = replace(CALLER, scopes=frozenset({Scope.READ}))
"""May look and change nothing."""

NOBODY = replace(CALLER, scopes=frozenset())


@dataclass(frozen=True, slots=True)
class Subject:
    """A host that is tested, with a snapshot of it.

    Attributes:
        host: The host; it has no sandboxes.
        tag: A snapshot that is ready, with Python.
    """

    host: Host
    tag: Tag

    async def fork(self, count: int = 1, options: ForkOptions = OPTIONS) -> tuple[Sandbox, ...]:
        result = await self.host.sandboxes.fork(CALLER, self.tag, count, options)
        assert result.failures == ()
        return result.sandboxes

    async def one(self) -> SandboxId:
        (made,) = await self.fork()
        return made.id

    async def value(self, sandbox: SandboxId, code: str) -> Any:  # noqa: ANN401 - JSON
        result = await self.host.guests.eval(CALLER, sandbox, code)
        assert result.error is None, result.error.traceback
        return result.value

    async def write(
        self, sandbox: SandboxId, path: str, data: bytes, *, parents: bool = False
    ) -> int:
        written = self.host.guests.write_file(
            CALLER, sandbox, path, pieces(data), make_parents=parents
        )
        return await written

    async def read(
        self, sandbox: SandboxId, path: str, offset: int = 0, length: int | None = None
    ) -> tuple[int, bytes]:
        """Return how long a file is, and what was read of it."""
        opened = self.host.guests.read_file(CALLER, sandbox, path, offset=offset, length=length)
        async with await opened as reader:
            return reader.size_bytes, b"".join([piece async for piece in reader])

    async def branch(
        self, sandbox: SandboxId, count: int, tag: Tag | None = None
    ) -> tuple[Sandbox, ...]:
        result = await self.host.branches.branch(CALLER, sandbox, count, BRANCH, tag=tag)
        return result.fork.sandboxes

    async def clear(self) -> None:
        """Delete what a test has made."""
        for sandbox in await self.host.sandboxes.list(CALLER):
            await self.host.sandboxes.delete(CALLER, sandbox.id)
        for snapshot in reversed(await self.host.snapshots.list(CALLER)):
            if snapshot.tag != self.tag:
                await self.host.snapshots.delete(CALLER, snapshot.tag, cascade=True)


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


async def joined(stream: AsyncIterable[bytes]) -> bytes:
    return b"".join([each async for each in stream])


async def last(events: AsyncIterable[object]) -> object:
    *_, event = [each async for each in events]
    return event


class SandboxSuite:
    """Sandboxes, their trees and their snapshots."""

    async def test_what_was_forked_is_listed_oldest_first(self, subject: Subject) -> None:
        first = await subject.fork(2)
        second = await subject.fork(1)

        listed = await subject.host.sandboxes.list(CALLER)
        assert {each.id for each in listed} == {each.id for each in (*first, *second)}
        assert listed[-1].id == second[0].id
        assert await subject.host.sandboxes.list(CALLER, SandboxFilter(tag=subject.tag)) == listed
        assert await subject.host.sandboxes.list(CALLER, SandboxFilter(tag=MISSING)) == ()
        assert {each.state for each in listed} == {SandboxState.RUNNING}
        assert {each.tag for each in listed} == {subject.tag}

    async def test_a_sandbox_is_found_by_the_beginning_of_its_id(self, subject: Subject) -> None:
        (made,) = await subject.fork()

        for start in (made.id, made.id[:-1], made.id.removeprefix("sb-")[:8]):
            assert (await subject.host.sandboxes.find(CALLER, start)).id == made.id
        with pytest.raises(NotFound):
            await subject.host.sandboxes.find(CALLER, new_sandbox_id())
        with pytest.raises(InvalidRequest):
            await subject.host.sandboxes.find(CALLER, "!")

    async def test_what_was_deleted_does_not_exist(self, subject: Subject) -> None:
        sandbox = await subject.one()
        await subject.host.sandboxes.delete(CALLER, sandbox)

        host = subject.host
        for ask in (
            host.sandboxes.get(CALLER, sandbox),
            host.sandboxes.delete(CALLER, sandbox),
            host.sandboxes.reset(CALLER, sandbox, deadline_s=5.0),
            host.sandboxes.set_limits(CALLER, sandbox, NewLimits(cpu_limit=1.0)),
            host.sandboxes.console_log(CALLER, sandbox),
            host.guests.ping(CALLER, sandbox),
            host.guests.eval(CALLER, sandbox, "1"),
            host.guests.exec(CALLER, sandbox, ExecRequest(("true",))),
            host.guests.connect(CALLER, sandbox, 80),
            host.guests.stat(CALLER, sandbox, "/"),
            host.branches.branch(CALLER, sandbox, 1, BRANCH),
            host.promotions.promote(CALLER, sandbox),
            host.comparisons.compare(CALLER, sandbox, subject.tag),
            host.trees.draw(CALLER, sandbox),
        ):
            with pytest.raises(NotFound):
                await ask

    async def test_a_snapshot_that_does_not_exist_is_not_found(self, subject: Subject) -> None:
        host = subject.host
        for ask in (
            host.snapshots.get(CALLER, MISSING),
            host.snapshots.delete(CALLER, MISSING),
            host.sandboxes.fork(CALLER, MISSING, 1, OPTIONS),
            host.chains.compact(CALLER, MISSING),
            last(host.packs.pack(CALLER, MISSING)),
            last(host.chains.extend(CALLER, LinkRequest(LINK, MISSING, "true"))),
            last(host.snapshots.bake(CALLER, SnapshotRequest(LINK, NamedRecipe("missing")))),
            last(host.images.build(CALLER, NamedRecipe("missing"))),
            host.recipes.get(CALLER, UploadedRecipe("0" * 64)),
        ):
            with pytest.raises(NotFound):
                await ask

    async def test_the_console_is_followed_to_the_end(self, subject: Subject) -> None:
        sandbox = await subject.one()
        console = await subject.host.sandboxes.console_log(CALLER, sandbox)
        followed = subject.host.sandboxes.follow_console_log(CALLER, sandbox)
        everything = asyncio.ensure_future(joined(followed))

        await subject.host.sandboxes.delete(CALLER, sandbox)
        assert (await everything).startswith(console)

    async def test_a_reset_takes_a_sandbox_back_to_its_fork_point(self, subject: Subject) -> None:
        sandbox = await subject.one()
        await subject.value(sandbox, "globals().update(later=1)")
        await subject.write(sandbox, "/tmp/later", b"later")

        assert await subject.host.sandboxes.reset(CALLER, sandbox, deadline_s=30.0) > 0.0

        assert await subject.value(sandbox, "'later' in globals()") is False
        with pytest.raises(NotFound):
            await subject.read(sandbox, "/tmp/later")
        assert (await subject.host.sandboxes.get(CALLER, sandbox)).id == sandbox

    async def test_siblings_have_what_their_source_had_and_go_their_own_ways(
        self, subject: Subject
    ) -> None:
        source = await subject.one()
        await subject.value(source, "globals().update(seen=1)")
        one, other = await subject.branch(source, 2)

        await subject.value(one.id, "globals().update(seen=2)")

        values = [await subject.value(each, "seen") for each in (source, one.id, other.id)]
        assert values == [1, 2, 1]
        assert {one.parent, other.parent} == {source}
        assert one.branched_at is not None
        assert one.branched_at == other.branched_at

    async def test_a_tree_is_drawn(self, subject: Subject) -> None:
        source = await subject.one()
        alone = await subject.one()
        (child,) = await subject.branch(source, 1)
        (grandchild,) = await subject.branch(child.id, 1)

        (tree,) = await subject.host.trees.draw(CALLER, grandchild.id)
        assert (tree.id, [each.id for each in tree.children]) == (source, [child.id])
        assert [each.id for each in tree.children[0].children] == [grandchild.id]
        assert {each.id for each in await subject.host.trees.draw(CALLER)} == {source, alone}

    async def test_a_child_takes_its_parents_place(self, subject: Subject) -> None:
        source = await subject.one()
        await subject.value(source, "globals().update(seen=1)")
        child, other = await subject.branch(source, 2)
        await subject.value(child.id, "globals().update(seen=2)")

        promotion = await subject.host.promotions.promote(CALLER, child.id)

        assert promotion.sandbox.id == source
        assert set(promotion.ended) == {child.id, other.id}
        assert [each.id for each in await subject.host.sandboxes.list(CALLER)] == [source]
        assert await subject.value(source, "seen") == 2

    async def test_who_has_no_parent_takes_no_place(self, subject: Subject) -> None:
        sandbox = await subject.one()

        with pytest.raises(Conflict):
            await subject.host.promotions.promote(CALLER, sandbox)

    async def test_a_comparison_names_what_differs(self, subject: Subject) -> None:
        sandbox = await subject.one()
        await subject.write(sandbox, "/root/written", b"x" * 10)

        difference = await subject.host.comparisons.compare(CALLER, subject.tag, sandbox)

        assert FileChange("/root/written", Change.ADDED, "f", 10) in difference.changes


class SnapshotSuite:
    """Snapshots, and those that depend on others."""

    async def test_a_branch_is_written_down(self, subject: Subject) -> None:
        source = await subject.one()
        await subject.value(source, "globals().update(seen=1)")
        assert await subject.branch(source, 0, LINK) == ()

        snapshot = await subject.host.snapshots.get(CALLER, LINK)
        assert (snapshot.status, snapshot.parent) == (SnapshotStatus.READY, subject.tag)
        assert snapshot.depth == 1
        assert snapshot in await subject.host.snapshots.list(CALLER)
        forked = await subject.host.sandboxes.fork(CALLER, LINK, 1, OPTIONS)
        assert await subject.value(forked.sandboxes[0].id, "seen") == 1

    async def test_a_tag_that_is_taken_is_a_conflict(self, subject: Subject) -> None:
        source, host, tag = await subject.one(), subject.host, subject.tag
        recipe = (await host.snapshots.get(CALLER, tag)).recipe

        for ask in (
            last(host.snapshots.bake(CALLER, SnapshotRequest(tag, NamedRecipe(recipe)))),
            host.branches.branch(CALLER, source, 0, BRANCH, tag=tag),
            last(host.chains.extend(CALLER, LinkRequest(tag, source, None))),
            host.chains.compact(CALLER, tag, tag),
        ):
            with pytest.raises(Conflict):
                await ask

    async def test_what_is_in_use_is_not_deleted(self, subject: Subject) -> None:
        source = await subject.one()
        await subject.branch(source, 0, LINK)
        forked = await subject.host.sandboxes.fork(CALLER, LINK, 1, OPTIONS)
        snapshots = subject.host.snapshots

        for each in (LINK, subject.tag):
            with pytest.raises(Conflict):
                await snapshots.delete(CALLER, each)
            with pytest.raises(Conflict):
                await snapshots.delete(CALLER, each, force=True)
        with pytest.raises(InvalidRequest):
            await snapshots.delete(CALLER, LINK, cascade=True, force=True)

        await subject.host.sandboxes.delete(CALLER, forked.sandboxes[0].id)
        await snapshots.delete(CALLER, LINK)
        assert [each.tag for each in await snapshots.list(CALLER)] == [subject.tag]

    async def test_what_others_depend_on_is_deleted_with_them(self, subject: Subject) -> None:
        source = await subject.one()
        await subject.branch(source, 0, LINK)
        forked = await subject.host.sandboxes.fork(CALLER, LINK, 1, OPTIONS)
        third = parse_tag("third")
        await subject.branch(forked.sandboxes[0].id, 0, third)
        await subject.host.sandboxes.delete(CALLER, forked.sandboxes[0].id)

        with pytest.raises(Conflict):
            await subject.host.snapshots.delete(CALLER, LINK)
        await subject.host.snapshots.delete(CALLER, LINK, cascade=True)
        assert [each.tag for each in await subject.host.snapshots.list(CALLER)] == [subject.tag]

    async def test_a_compacted_link_needs_no_other(self, subject: Subject) -> None:
        source = await subject.one()
        await subject.value(source, "globals().update(seen=1)")
        await subject.branch(source, 0, LINK)

        made = await subject.host.chains.compact(CALLER, LINK)

        assert (made.tag, made.parent, made.depth) == (LINK, None, 0)
        assert made == await subject.host.snapshots.get(CALLER, LINK)
        forked = await subject.host.sandboxes.fork(CALLER, LINK, 1, OPTIONS)
        assert await subject.value(forked.sandboxes[0].id, "seen") == 1


class GuestSuite:
    """What happens inside a sandbox."""

    async def test_an_agent_answers(self, subject: Subject) -> None:
        sandbox = await subject.one()

        status = await subject.host.guests.ping(CALLER, sandbox)
        assert status.runtime is RuntimeStatus.READY
        assert await subject.host.guests.echo(CALLER, sandbox, "héllo") == "héllo"

    async def test_code_leaves_names_and_output_behind_and_its_exception_is_data(
        self, subject: Subject
    ) -> None:
        sandbox, guests = await subject.one(), subject.host.guests

        await subject.value(sandbox, "kept = 6")
        result = await guests.eval(CALLER, sandbox, "print('out')\nkept * 7")
        assert (result.value, result.repr, result.has_value) == (42, "42", True)
        assert (result.stdout, result.timed_out, result.error) == ("out\n", False, None)
        result = await guests.eval(CALLER, sandbox, "1 / 0")
        assert result.error is not None
        assert (result.error.type, result.has_value) == ("ZeroDivisionError", False)
        for code in ("none = 1", "None"):
            result = await guests.eval(CALLER, sandbox, code)
            assert (result.has_value, result.value, result.repr) == (False, None, None)
        assert await subject.value(sandbox, "1, {'two': None}") == [1, {"two": None}]
        result = await guests.eval(CALLER, sandbox, "{1, 2}.__class__")
        assert (result.value_is_json, result.repr) == (False, "<class 'set'>")

    async def test_code_for_another_runtime_does_not_run(self, subject: Subject) -> None:
        sandbox, guests = await subject.one(), subject.host.guests
        await subject.value(sandbox, "ran = 0")

        with pytest.raises(Conflict, match=r"no runtime 'node' in this sandbox.* is python"):
            await guests.eval(CALLER, sandbox, "ran = 1", runtime="node")

        result = await guests.eval(CALLER, sandbox, "ran", runtime="python")
        assert result.value == 0

    async def test_a_commands_events_come_in_order(self, subject: Subject) -> None:
        sandbox = await subject.one()

        for args, output, code in (
            (("echo", "one", "two"), b"one two\n", 0),
            (("sh", "-c", "exit 3"), b"", 3),
        ):
            running = subject.host.guests.exec(CALLER, sandbox, ExecRequest(args))
            async with await running as session:
                events = [event async for event in session]
            begun, *said, ended = events
            assert isinstance(begun, Started)
            assert b"".join(each.data for each in said if isinstance(each, Stdout)) == output
            assert isinstance(ended, Exited)
            assert (ended.exit_code, ended.signal, ended.timed_out) == (code, None, False)

    async def test_a_command_reads_what_is_written_to_it(self, subject: Subject) -> None:
        sandbox = await subject.one()

        request = ExecRequest(("cat",), stdin=True)
        async with await subject.host.guests.exec(CALLER, sandbox, request) as session:
            await session.write_stdin(b"written")
            await session.close_stdin()
            await session.close_stdin()
            events = [event async for event in session]
            with pytest.raises(Conflict):
                await session.write_stdin(b"late")
        assert [each for each in events if isinstance(each, Stdout)] == [Stdout(b"written")]
        await session.aclose()

    async def test_a_signal_ends_a_command(self, subject: Subject) -> None:
        sandbox = await subject.one()

        request = ExecRequest(("sleep", "60"))
        async with await subject.host.guests.exec(CALLER, sandbox, request) as session:
            await session.send_signal(signal.SIGTERM)
            ended = await last(session)
        assert isinstance(ended, Exited)
        assert (ended.exit_code, ended.signal, ended.timed_out) == (None, signal.SIGTERM, False)

    async def test_a_command_without_input_and_terminal_has_neither(self, subject: Subject) -> None:
        sandbox = await subject.one()

        request = ExecRequest(("sleep", "60"))
        async with await subject.host.guests.exec(CALLER, sandbox, request) as session:
            with pytest.raises(Conflict):
                await session.write_stdin(b"x")
            with pytest.raises(Conflict):
                await session.resize(TtySize(24, 80))

    async def test_a_program_that_is_missing_is_named(self, subject: Subject) -> None:
        sandbox = await subject.one()

        with pytest.raises(NotFound) as refusal:
            await subject.host.guests.exec(CALLER, sandbox, ExecRequest(("missing",)))
        assert refusal.value.context == {"guest_code": "not_found", "program": "missing"}

    async def test_a_file_is_written_whole_and_read_in_part(self, subject: Subject) -> None:
        sandbox, data = await subject.one(), bytes(range(256)) * 1_000

        assert await subject.write(sandbox, "/tmp/file", data) == len(data)
        assert await subject.read(sandbox, "/tmp/file") == (len(data), data)
        assert await subject.read(sandbox, "/tmp/file", 1_000, 10) == (len(data), data[1_000:1_010])
        assert await subject.read(sandbox, "/tmp/file", len(data)) == (len(data), b"")
        assert await subject.write(sandbox, "/tmp/file", b"") == 0
        assert await subject.read(sandbox, "/tmp/file") == (0, b"")

    async def test_folders_are_made_listed_and_removed(self, subject: Subject) -> None:
        sandbox, guests = await subject.one(), subject.host.guests

        await guests.make_dir(CALLER, sandbox, "/tmp/a/b", parents=True)
        await guests.make_dir(CALLER, sandbox, "/tmp/a/b", parents=True)
        await subject.write(sandbox, "/tmp/a/file", b"12345")
        await subject.write(sandbox, "/tmp/a/c/d", b"", parents=True)

        entries = await guests.list_dir(CALLER, sandbox, "/tmp/a")
        assert [(each.name, each.kind) for each in entries] == [
            ("b", EntryKind.DIRECTORY),
            ("c", EntryKind.DIRECTORY),
            ("file", EntryKind.FILE),
        ]
        assert await guests.stat(CALLER, sandbox, "/tmp/a/file") == entries[2]
        assert entries[2].size_bytes == 5

        await guests.move(CALLER, sandbox, "/tmp/a/file", "/tmp/a/b/moved")
        assert await subject.read(sandbox, "/tmp/a/b/moved") == (5, b"12345")
        await guests.remove(CALLER, sandbox, "/tmp/a/b/moved")
        await guests.remove(CALLER, sandbox, "/tmp/a/b")
        with pytest.raises(Conflict):
            await guests.remove(CALLER, sandbox, "/tmp/a")
        await guests.remove(CALLER, sandbox, "/tmp/a", recursive=True)
        with pytest.raises(NotFound):
            await guests.stat(CALLER, sandbox, "/tmp/a")

    async def test_what_is_missing_or_in_the_way_is_said_to_be(self, subject: Subject) -> None:
        sandbox, guests = await subject.one(), subject.host.guests
        await guests.make_dir(CALLER, sandbox, "/tmp/folder")
        await subject.write(sandbox, "/tmp/file", b"")
        wrong: dict[str, type[ForkdError]] = {"not_found": NotFound}

        for ask, code in (
            (guests.read_file(CALLER, sandbox, "/tmp/none"), "not_found"),
            (subject.write(sandbox, "/tmp/none/file", b""), "not_found"),
            (guests.stat(CALLER, sandbox, "/tmp/none"), "not_found"),
            (guests.list_dir(CALLER, sandbox, "/tmp/none"), "not_found"),
            (guests.make_dir(CALLER, sandbox, "/tmp/none/folder"), "not_found"),
            (guests.move(CALLER, sandbox, "/tmp/none", "/tmp/other"), "not_found"),
            (guests.move(CALLER, sandbox, "/tmp/file", "/tmp/none/file"), "not_found"),
            (guests.remove(CALLER, sandbox, "/tmp/none"), "not_found"),
            (guests.read_file(CALLER, sandbox, "/tmp/folder"), "is_a_directory"),
            (guests.list_dir(CALLER, sandbox, "/tmp/file"), "not_a_directory"),
            (guests.make_dir(CALLER, sandbox, "/tmp/folder"), "exists"),
            (guests.make_dir(CALLER, sandbox, "/tmp/file"), "exists"),
        ):
            with pytest.raises(wrong.get(code, Conflict)) as refusal:
                await ask
            assert refusal.value.context["guest_code"] == code


class ScopeSuite:
    """Who may do what."""

    async def test_who_may_only_look_changes_nothing(self, subject: Subject) -> None:
        sandbox, host, tag = await subject.one(), subject.host, subject.tag
        recipe = NamedRecipe("missing")

        for ask in (
            host.sandboxes.fork(READER, tag, 1, OPTIONS),
            host.sandboxes.delete(READER, sandbox),
            host.sandboxes.reset(READER, sandbox, deadline_s=5.0),
            host.sandboxes.set_limits(READER, sandbox, NewLimits(cpu_limit=1.0)),
            host.branches.branch(READER, sandbox, 1, BRANCH),
            host.promotions.promote(READER, sandbox),
            host.comparisons.compare(READER, tag, sandbox),
            host.guests.eval(READER, sandbox, "1"),
            host.guests.exec(READER, sandbox, ExecRequest(("true",))),
            host.guests.connect(READER, sandbox, 80),
            host.guests.echo(READER, sandbox, "x"),
            host.guests.read_file(READER, sandbox, "/tmp/file"),
            host.guests.write_file(READER, sandbox, "/tmp/file", pieces(b"")),
            host.guests.read_archive(READER, sandbox, "/tmp"),
            host.guests.write_archive(READER, sandbox, "/tmp", pieces(b"")),
            host.guests.stat(READER, sandbox, "/tmp"),
            host.guests.list_dir(READER, sandbox, "/tmp"),
            host.guests.make_dir(READER, sandbox, "/tmp/folder"),
            host.guests.move(READER, sandbox, "/tmp", "/root"),
            host.guests.remove(READER, sandbox, "/tmp"),
            host.snapshots.delete(READER, tag),
            host.snapshots.tidy(READER),
            last(host.snapshots.bake(READER, SnapshotRequest(LINK, recipe))),
            last(host.images.build(READER, recipe)),
            last(host.chains.extend(READER, LinkRequest(LINK, sandbox, None))),
            host.chains.compact(READER, tag),
            last(host.packs.pack(READER, tag)),
            host.recipes.upload(READER, pieces(b"")),
            host.recipes.get(READER, UploadedRecipe("0" * 64)),
        ):
            with pytest.raises(Forbidden):
                await ask
        assert [each.id for each in await host.sandboxes.list(READER)] == [sandbox]

    async def test_who_may_look_sees_everything(self, subject: Subject) -> None:
        sandbox, host = await subject.one(), subject.host

        assert (await host.sandboxes.get(READER, sandbox)).id == sandbox
        assert (await host.sandboxes.find(READER, sandbox)).id == sandbox
        assert isinstance(await host.sandboxes.console_log(READER, sandbox), bytes)
        assert (await host.guests.ping(READER, sandbox)).runtime is RuntimeStatus.READY
        assert [each.tag for each in await host.snapshots.list(READER)] == [subject.tag]
        assert (await host.snapshots.get(READER, subject.tag)).tag == subject.tag
        assert [each.id for each in await host.trees.draw(READER)] == [sandbox]
        assert (await host.system.info(READER)).sandboxes == 1

    async def test_who_may_nothing_sees_nothing(self, subject: Subject) -> None:
        sandbox, host = await subject.one(), subject.host

        for ask in (
            host.sandboxes.list(NOBODY),
            host.sandboxes.get(NOBODY, sandbox),
            host.sandboxes.find(NOBODY, sandbox),
            host.sandboxes.console_log(NOBODY, sandbox),
            last(host.sandboxes.follow_console_log(NOBODY, sandbox)),
            host.guests.ping(NOBODY, sandbox),
            host.snapshots.list(NOBODY),
            host.snapshots.get(NOBODY, subject.tag),
            host.trees.draw(NOBODY),
            host.trees.budgets(NOBODY),
            host.system.info(NOBODY),
        ):
            with pytest.raises(Forbidden):
                await ask


class ServiceSuite(SandboxSuite, SnapshotSuite, GuestSuite, ScopeSuite):
    """All of it."""
