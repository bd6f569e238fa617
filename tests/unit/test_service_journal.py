"""Whoever follows the history hears of every event that it may see, or that some are missing."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from forkd.errors import CapacityError, Forbidden, StoreError
from forkd.limits import EVENTS_KEPT_S
from forkd.model.caller import DEFAULT_OWNER, Caller, Owner, Scope, Tenant
from forkd.model.event import EventKind
from forkd.service import journal as journals
from forkd.service.journal import Journal
from forkd.service.records import Records
from forkd.store import history
from forkd.store.database import Database
from forkd.store.schema import MIGRATIONS
from forkd.telemetry.telemetry import Telemetry
from tests.support.callers import CALLER
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from forkd.model.event import Event

DEADLINE_S = 20.0
READY = EventKind.SANDBOX_READY
OTHERS = Owner(Tenant("others"), "somebody")
TENANT = Caller("a", Tenant("default"), frozenset({Scope.READ}), "r")


CRASHED = (
    (CALLER, lambda _: journals.IDS_RESERVED),
    (TENANT, lambda last: last + journals.IDS_SKIPPED),
)
"""Up to which id events are missing after a crash, for whom, given the last that is not."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather nothing: tests wait for events, not for time."""
    monkeypatch.setattr(journals, "TELL_EVERY_S", 0.0)
    monkeypatch.setattr(journals, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(journals, "WRITE_RETRY_S", 0.0)
    monkeypatch.setattr(journals, "IDLE_S", DEADLINE_S)


class Opened:
    """A journal over a database of its own process."""

    def __init__(self, folder: Path) -> None:
        self.tag = "python"
        self.database = Database(folder / "forkd.db")
        self.records = Records(self.database)
        self.journal = Journal(Telemetry(), self.records)

    def note(self, *subjects: str, owner: Owner = DEFAULT_OWNER) -> None:
        for each in subjects:
            self.journal.note(READY, each, owner, tag=self.tag)

    async def written(self) -> None:
        await until(lambda: not self.journal._unwritten)  # noqa: SLF001 - no other wants to know

    async def read(self, after: int | None, count: int, caller: Caller = CALLER) -> list[Event]:
        """Return the next events after an id."""
        found: list[Event] = []
        async with (
            asyncio.timeout(DEADLINE_S),
            contextlib.aclosing(self.journal.follow(caller, after)) as batches,
        ):
            while len(found) < count:
                found += (await anext(batches)).events
        return found


@contextlib.asynccontextmanager
async def opened(folder: Path, *, crash: bool = False) -> AsyncIterator[Opened]:
    """Run a journal for the block; at the end it is closed, or dies as a process would."""
    made = Opened(folder)
    await made.journal.begin()
    tasks = [asyncio.ensure_future(each) for each in (made.journal.write(), made.journal.tell())]
    try:
        yield made
    finally:
        if crash:

            async def nothing(_: object) -> None:
                """Write nothing any more."""

            made.records.ask = nothing  # type: ignore[method-assign,assignment]
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        if not crash:
            await made.journal.close()
        made.records.close()


def said(events: list[Event]) -> list[str]:
    """Return what events are about: a subject, or the ids that are missing."""
    return [
        f"gap {each.detail['after']}-{each.id}" if each.kind is EventKind.GAP else each.subject
        for each in events
    ]


async def test_a_follower_that_comes_back_hears_what_it_missed_and_then_what_comes(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as host:
        host.note("a", "b")
        first, _ = await host.read(0, 2)
        host.note("c")
        async with contextlib.aclosing(host.journal.follow(CALLER, first.id)) as batches:
            assert said(list((await anext(batches)).events)) == ["b", "c"]
            host.note("d")
            assert said(list((await anext(batches)).events)) == ["d"]


async def test_who_names_no_id_hears_what_comes_from_now_on_and_where_that_is(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as host:
        host.note("a", "b")
        async with contextlib.aclosing(host.journal.follow(CALLER)) as batches:
            batch = await anext(batches)
            assert (batch.events, batch.up_to) == ((), 2)
            host.note("c")
            assert said(list((await anext(batches)).events)) == ["c"]


async def test_ids_and_history_go_on_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        host.note("a", "b")
    async with opened(tmp_path) as host:
        host.note("c")
        events = await host.read(0, 3)

    assert said(events) == ["a", "b", "c"]
    assert [each.id for each in events] == [1, 2, 3]
    assert (events[0].owner, events[0].detail) == (DEFAULT_OWNER, {"tag": "python"})


async def test_a_restart_without_any_event_is_no_gap(tmp_path: Path) -> None:
    for _ in range(2):
        async with opened(tmp_path):
            pass
    async with opened(tmp_path) as host:
        host.note("a")
        assert said(await host.read(0, 1)) == ["a"]


async def test_what_was_told_but_not_written_when_the_daemon_was_killed_is_a_gap(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, crash=True) as host:
        host.note("a")
        await host.written()
        host.journal._records = cast("Records", NoRoom())  # noqa: SLF001 - nothing reaches the disk from here on
        host.note("lost")
        last = (await host.read(0, 2))[-1]
    async with opened(tmp_path) as host:
        reserved = journals.IDS_RESERVED
        host.note("b")

        everything = await host.read(0, 3)
        assert said(everything) == ["a", f"gap 1-{reserved}", "b"]
        assert everything[-1].id > last.id
        assert said(await host.read(last.id, 2)) == [f"gap {last.id}-{reserved}", "b"]


async def test_a_gap_is_told_at_once_although_nothing_has_come_after_it(tmp_path: Path) -> None:
    async with opened(tmp_path, crash=True) as host:
        host.note("a")
        await host.written()
    async with opened(tmp_path) as host:
        assert said(await host.read(1, 1)) == [f"gap 1-{journals.IDS_RESERVED}"]


async def test_a_crash_does_not_age_what_was_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVENTS_KEPT_MAX", 10)
    monkeypatch.setattr(history, "COUNTED_EVERY", 1)
    async with opened(tmp_path, crash=True) as host:
        host.note("a", "b")
        await host.written()
    async with opened(tmp_path) as host:
        host.note("c")
        await host.written()

        for caller, skipped in CRASHED:
            events = await host.read(0, 4, caller)
            assert said(events) == ["a", "b", f"gap 2-{skipped(2)}", "c"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_was_too_much_is_a_gap_before_all_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restarted: bool
) -> None:
    monkeypatch.setattr(history, "EVENTS_KEPT_MAX", 3)
    monkeypatch.setattr(history, "COUNTED_EVERY", 1)
    monkeypatch.setattr(journals, "RECENT_MAX", 2)
    async with contextlib.AsyncExitStack() as stack:
        host = await stack.enter_async_context(opened(tmp_path))
        host.note(*"abcde")
        await host.written()
        if restarted:
            await stack.aclose()
            host = await stack.enter_async_context(opened(tmp_path))

        for caller in (CALLER, TENANT):
            assert said(await host.read(0, 4, caller)) == ["gap 0-2", "c", "d", "e"]
            assert said(await host.read(1, 4, caller)) == ["gap 1-2", "c", "d", "e"]
            assert said(await host.read(2, 3, caller)) == ["c", "d", "e"]


async def test_events_are_counted_often_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "EVENTS_KEPT_MAX", 50)
    monkeypatch.setattr(history, "COUNTED_EVERY", 20)
    async with opened(tmp_path) as host:
        for each in range(300):
            host.note(str(each))
            await host.written()
        kept = await host.records.read(lambda db: history.between(db, 0, 1_000, 1_000))

    assert 50 <= len(kept.events) < 50 + 20


async def test_what_was_too_old_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", 1)
    async with opened(tmp_path) as host:
        host.note("a", "b")
        await host.written()
        aged = await host.records.read(lambda db: history.between(db, 0, 2, 1))
        old = replace(aged.events[0], at=aged.events[0].at - timedelta(seconds=EVENTS_KEPT_S + 1))
        await host.records.ask(lambda db: history.put(db, [old]))
        host.note("c")
        await host.written()

        for caller in (CALLER, TENANT):
            assert said(await host.read(0, 3, caller)) == ["gap 0-1", "b", "c"]


async def test_a_follower_that_is_far_behind_reads_everything_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", 7)
    monkeypatch.setattr(journals, "BATCH_MAX", 5)
    names = [str(number) for number in range(40)]
    async with opened(tmp_path) as host:
        host.note(*names[:20])
        await host.written()
        host.note(*names[20:])  # in memory, on the disk, and 13 between the two

        for caller in (CALLER, TENANT):
            assert said(await host.read(0, 40, caller)) == names
            assert said(await host.read(17, 23, caller)) == names[17:]


async def test_what_happens_while_a_follower_is_busy_is_not_missed(tmp_path: Path) -> None:
    async with (
        opened(tmp_path) as host,
        contextlib.aclosing(host.journal.follow(CALLER, 0)) as batches,
    ):
        assert (await anext(batches)).events == ()
        host.note("a")
        await until(lambda: not host.journal._news.is_set())  # noqa: SLF001 - who waited was told

        async with asyncio.timeout(DEADLINE_S / 2):
            assert said(list((await anext(batches)).events)) == ["a"]


@pytest.mark.parametrize("ahead", [1, 1 << 70])
async def test_an_id_from_the_future_is_a_gap(tmp_path: Path, ahead: int) -> None:
    async with opened(tmp_path) as host:
        host.note("a")
        async with contextlib.aclosing(host.journal.follow(CALLER, 1 + ahead)) as batches:
            batch = await anext(batches)
            assert [each.kind for each in batch.events] == [EventKind.GAP]
            assert batch.events[0].id == batch.up_to == 1
            host.note("b")
            assert said(list((await anext(batches)).events)) == ["b"]


async def test_a_tenant_hears_of_its_own_and_of_gaps(tmp_path: Path) -> None:
    async with opened(tmp_path, crash=True) as host:
        host.note("theirs", owner=OTHERS)
        host.note("mine")
        await host.written()
    async with opened(tmp_path) as host:
        host.note("theirs too", owner=OTHERS)
        host.note("mine too")

        gap = f"gap 1-{1 + journals.IDS_SKIPPED}"
        assert said(await host.read(0, 3, TENANT)) == ["mine", gap, "mine too"]
        assert len(await host.read(0, 5)) == 5  # an admin hears of all


async def test_a_tenant_reads_its_own_events_and_none_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", 1)
    read: list[history.Found] = []
    between = history.between

    def noted(*args: Any) -> history.Found:  # noqa: ANN401 - those of `between`
        read.append(between(*args))
        return read[-1]

    monkeypatch.setattr(history, "between", noted)
    async with opened(tmp_path) as host:
        host.note("mine", "mine too")
        host.note(*(f"theirs {number}" for number in range(1_000)), owner=OTHERS)
        host.note("mine at last")
        await host.written()

        assert said(await host.read(0, 3, TENANT)) == ["mine", "mine too", "mine at last"]
    assert [len(found.events) for found in read] == [2]


async def test_a_follower_sleeps_on_while_others_events_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    after = Journal._after  # noqa: SLF001 - no other wants to know

    async def look(self: Journal, caller: Caller, place: journals._Place) -> object:
        looked.append(caller.tenant)
        return await after(self, caller, place)

    monkeypatch.setattr(Journal, "_after", look)
    others = replace(TENANT, tenant=OTHERS.tenant)
    async with opened(tmp_path) as host, contextlib.AsyncExitStack() as stack:
        follow = host.journal.follow
        followers = [
            await stack.enter_async_context(contextlib.aclosing(follow(each)))
            for each in (TENANT, others)
        ]
        for each in followers:
            await anext(each)  # where the history is
        mine, theirs = (asyncio.ensure_future(anext(each)) for each in followers)
        await until(lambda: len(host.journal._waiting) == 2)  # noqa: SLF001 - no other wants to know
        looked.clear()

        host.note("theirs", owner=OTHERS)
        assert said(list((await theirs).events)) == ["theirs"]
        assert looked == [OTHERS.tenant]
        host.note("mine")
        assert said(list((await mine).events)) == ["mine"]


async def test_who_reads_the_history_holds_up_nobody_who_writes(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        host.note("a")
        await host.written()
        with host.database.reading() as reading:
            reading.execute("SELECT * FROM events").fetchone()
            async with asyncio.timeout(DEADLINE_S):
                await host.records.ask(lambda db: db.host_setting("name", "chosen"))
        with host.database.transaction():
            async with asyncio.timeout(DEADLINE_S):
                found = await host.records.read(lambda db: history.between(db, 0, 9, 9))
        with pytest.raises(StoreError, match="readonly"), host.database.reading() as reading:
            reading.execute("DELETE FROM events")

    assert said(list(found.events)) == ["a"]


async def test_who_hears_of_nothing_is_told_how_far_its_history_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "IDLE_S", 0.01)
    async with (
        opened(tmp_path) as host,
        asyncio.timeout(DEADLINE_S),
        contextlib.aclosing(host.journal.follow(CALLER)) as everything,
        contextlib.aclosing(host.journal.follow(TENANT)) as batches,
    ):
        host.note("mine")
        for number in range(3):
            host.note("theirs", owner=OTHERS)
            batch = await anext(batches)
            assert (batch.events, batch.up_to) == ((), 1), number
        batch = await anext(everything)
        assert (batch.events, batch.up_to) == ((), 4)


async def test_ids_tell_a_tenant_nothing_of_others(tmp_path: Path) -> None:
    for crash in (True, False):  # on two hosts alike, of which one is busy
        for folder, theirs in ((tmp_path / "idle", 0), (tmp_path / "busy", 30)):
            folder.mkdir(exist_ok=True)
            async with opened(folder, crash=crash) as host:
                for each in "abc":
                    host.note(*(f"theirs {number}" for number in range(theirs)), owner=OTHERS)
                    host.note(each)
                await host.written()
    told = []
    for name in ("idle", "busy"):
        async with opened(tmp_path / name) as host:
            events = await host.read(0, 7, TENANT)
            told.append([(each.id, each.kind, each.subject, each.detail) for each in events])

    assert told[0] == told[1]
    skipped = journals.IDS_SKIPPED
    ids = [1, 2, 3, skipped + 3, skipped + 4, skipped + 5, skipped + 6]
    assert [id_ for id_, *_ in told[0]] == ids


@pytest.mark.parametrize("recent", [1, 2_000])
async def test_a_tenant_goes_on_from_any_of_its_own_ids_and_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recent: int
) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", recent)
    async with opened(tmp_path) as host:
        for number in range(6):
            host.note("theirs", owner=OTHERS)
            host.note(str(number))
        await host.written()
        everybodys = await host.read(0, 12)
        for after in range(6):
            mine = await host.read(after, 6 - after, TENANT)
            assert said(mine) == [str(number) for number in range(after, 6)]
            assert [each.id for each in mine] == list(range(after + 1, 7))
    async with opened(tmp_path) as host:
        for after in range(6):
            mine = await host.read(after, 6 - after, TENANT)
            assert said(mine) == [str(number) for number in range(after, 6)]
        assert [each.id for each in await host.read(0, 12)] == [each.id for each in everybodys]
        host.note("at last")
        last = (await host.read(6, 1, TENANT))[0]
        assert (last.subject, last.id) == ("at last", 7)


@pytest.mark.parametrize("killed", [False, True])
async def test_an_id_of_a_forkd_before_tenants_had_histories_is_still_a_place(
    tmp_path: Path, *, killed: bool
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "forkd.db")) as older, older:
        before = next(n for n, step in enumerate(MIGRATIONS) if "tenant_histories" in step)
        older.executescript("".join(MIGRATIONS[:before]))
        older.execute(f"PRAGMA user_version = {before}")
        row = "INSERT INTO events VALUES (?, ?, 'sandbox.ready', ?, ?, 'p', NULL, '{}')"
        at = datetime.now(UTC).isoformat()
        for id_, tenant in ((5, "default"), (6, "others"), (7, "default"), (8, "others")):
            older.execute(row, (id_, at, f"old {id_}", tenant))
        reserved = 1_000_008 if killed else 8
        older.execute("INSERT INTO host VALUES ('events_reserved', ?)", (str(reserved),))
    gap = f"gap {{}}-{reserved + journals.IDS_SKIPPED}"
    async with opened(tmp_path) as host:
        host.note("theirs", owner=OTHERS)
        host.note("new")

        for after, old in ((4, ["old 5", "old 7"]), (5, ["old 7"]), (6, ["old 7"])):
            wanted = [*old, *([gap.format(7)] if killed else []), "new"]
            assert said(await host.read(after, len(wanted), TENANT)) == wanted
        for after in (7, 8):  # 8 was told as the place up to which there was nothing for it
            wanted = [*([gap.format(after)] if killed else []), "new"]
            found = await host.read(after, len(wanted), TENANT)
            assert said(found) == wanted
            assert found[-1].id == reserved + 1 + (journals.IDS_SKIPPED if killed else 0)
        assert said(await host.read(2, 3, TENANT))[:3] == ["gap 2-4", "old 5", "old 7"]
        assert (await host.read(8, 1))[0].id == (reserved if killed else 9)


async def test_a_caller_without_the_scope_follows_nothing(tmp_path: Path) -> None:
    nobody = replace(TENANT, scopes=frozenset({Scope.RUN}))
    async with opened(tmp_path) as host:
        with pytest.raises(Forbidden):
            await host.read(0, 1, nobody)
        assert host.journal.followers == 0


async def test_one_follower_too_many_is_refused_and_may_come_when_another_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "FOLLOWERS_MAX", 1)
    async with opened(tmp_path) as host:
        host.note("a")
        async with contextlib.aclosing(host.journal.follow(CALLER)) as first:
            await anext(first)
            with pytest.raises(CapacityError, match="1 clients"):
                await host.read(0, 1)
        assert said(await host.read(0, 1)) == ["a"]


async def test_a_follower_that_goes_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        waiting = asyncio.ensure_future(host.read(0, 1))
        await until(lambda: bool(host.journal._waiting))  # noqa: SLF001 - there is no event for it
        waiting.cancel()
        await asyncio.wait([waiting])

        assert (host.journal._waiting, host.journal.followers) == ({}, 0)  # noqa: SLF001


async def test_followers_end_when_they_are_told_to(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        followers = [host.journal.follow(CALLER) for _ in range(3)]
        for each in followers:
            await anext(each)
        ending = [asyncio.ensure_future(anext(each, None)) for each in followers]
        await until(lambda: len(host.journal._waiting) == 3)  # noqa: SLF001 - as above
        host.journal.end_followers()

        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.gather(*ending) == [None] * 3
            assert await anext(host.journal.follow(CALLER), None) is None


async def test_a_writer_that_is_cancelled_loses_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        for number in range(20):
            host.note(str(number))
            writing = asyncio.ensure_future(host.journal._write())  # noqa: SLF001 - to cancel it
            for _ in range(number % 5):
                await asyncio.sleep(0)
            writing.cancel()
            await asyncio.wait([writing])
    async with opened(tmp_path) as host:
        assert said(await host.read(0, 20)) == [str(number) for number in range(20)]


async def test_a_full_disk_is_survived_and_what_it_cost_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", 4)
    monkeypatch.setattr(journals, "UNWRITTEN_MAX", 4)
    async with opened(tmp_path) as host:
        host.note("before")
        await host.written()
        fill(host)
        host.note(*"abcdef")
        await until(lambda: "events not written" in caplog.messages)

        assert said(await host.read(0, 6)) == ["before", "gap 1-3", "c", "d", "e", "f"]

        make_room(host.database)
        await host.written()
        host.note("after")
        await host.written()
        assert said(await host.read(0, 7)) == ["before", "gap 1-3", *"cdef", "after"]
    async with opened(tmp_path) as host:
        assert said(await host.read(0, 7)) == ["before", "gap 1-3", *"cdef", "after"]


async def test_a_host_that_stops_on_a_full_disk_tells_of_a_gap_later(tmp_path: Path) -> None:
    async with opened(tmp_path) as host:
        host.note("before")
        await host.written()
        fill(host)
        host.note("lost")
    async with opened(tmp_path) as host:
        host.note("after")
        events = await host.read(0, 3)

    assert [each.kind is EventKind.GAP for each in events] == [False, True, False]


def fill(host: Opened) -> None:
    """Let the database grow no more; events are longer than what is left of its pages."""
    host.tag = "x" * 5_000
    with host.database.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")


def make_room(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("PRAGMA max_page_count = 1000000")


class NoRoom:
    """Records that refuse everything."""

    async def ask(self, _: Callable[[Database], object]) -> object:
        raise StoreError("nothing reaches the disk")


async def test_an_event_that_cannot_be_read_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "RECENT_MAX", 1)
    async with opened(tmp_path) as host:
        host.note(*"abcd")
        await host.written()
        with host.database.transaction() as connection:
            connection.execute("UPDATE events SET kind = 'of a later forkd' WHERE id = 2")

        assert said(await host.read(0, 4)) == ["a", "gap 1-2", "c", "d"]
