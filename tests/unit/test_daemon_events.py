"""Events over HTTP: resumed by id, kept alive, limited, and cut off when nobody reads them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest

from forkd.daemon.app import create_app
from forkd.daemon.clients import UNIX, ClientLimits
from forkd.daemon.server import listening
from forkd.daemon.settings import Settings
from forkd.model.caller import DEFAULT_OWNER
from forkd.model.event import EventKind
from forkd.sdk import AsyncClient
from forkd.service import journal as journals
from forkd.service.journal import Journal
from forkd.service.records import Records
from forkd.store.database import Database
from forkd.telemetry.telemetry import Telemetry
from tests.support.no_records import no_tokens
from tests.support.raw_http import DEADLINE_S, RawClient
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.service.api import Host

GET = "GET /v2/events{query} HTTP/1.1\nHost: localhost\n{more}\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gather nothing: tests wait for events, not for time."""
    monkeypatch.setattr(journals, "TELL_EVERY_S", 0.0)


@dataclass
class Daemon:
    """A daemon that has a history and nothing else."""

    url: str
    journal: Journal

    def note(self, *subjects: str, kind: EventKind = EventKind.SANDBOX_READY) -> None:
        for each in subjects:
            self.journal.note(kind, each, DEFAULT_OWNER, tag="python")

    async def ask(self, query: str = "", **headers: str) -> httpx.Response:
        transport = httpx.AsyncHTTPTransport(uds=self.url.removeprefix("unix://"))
        async with httpx.AsyncClient(transport=transport, base_url="http://forkd") as http:
            return await http.get(f"/v2/events{query}", headers=headers)


@contextlib.asynccontextmanager
async def served(folder: Path, **limits: Any) -> AsyncIterator[Daemon]:  # noqa: ANN401 - of `ClientLimits`
    """Serve a history that goes on where the last one in this folder ended."""
    database = Database(folder / "forkd.db")
    journal = Journal(Telemetry(), Records(database))
    await journal.begin()
    app = create_app(cast("Host", SimpleNamespace(journal=journal)))
    settings = Settings(socket=folder / "forkd.sock")
    few: ClientLimits = replace(UNIX, **limits)
    tasks = [asyncio.ensure_future(each) for each in (journal.write(), journal.tell())]
    try:
        async with listening(app, settings, no_tokens(), unix=few) as (url,):
            yield Daemon(url, journal)
            journal.end_followers()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        await journal.close()
        database.close()


def events(text: str) -> list[dict[str, Any]]:
    """Return what events in a stream say, which is the same three times."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in lines:
            data = json.loads(lines["data"])
            assert (str(data["id"]), data["event"]) == (lines["id"], lines["event"])
            found.append(data)
    return found


async def test_an_event_is_sent_as_its_data_with_its_id_and_name(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon:
        daemon.note("a")
        daemon.note("s", kind=EventKind.SNAPSHOT_READY)
        answer = await daemon.ask("?after=0&follow=false")

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    first, second = events(answer.text)
    assert first.pop("at_unix") > 1_700_000_000
    assert first == {
        "id": 1,
        "event": "sandbox.ready",
        "subject": "a",
        "tenant": "default",
        "principal": "forkd",
        "request_id": None,
        "detail": {"tag": "python"},
    }
    assert (second["id"], second["event"], second["subject"]) == (2, "snapshot.ready", "s")


async def test_a_header_says_where_a_client_goes_on_whatever_its_query_says(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as daemon:
        daemon.note("a", "b", "c")
        answer = await daemon.ask("?after=0&follow=false", **{"Last-Event-ID": "2"})

    assert [each["subject"] for each in events(answer.text)] == ["c"]


async def test_who_names_no_id_is_told_where_the_history_is(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon:
        daemon.note("a", "b")
        answer = await daemon.ask("?follow=false")

    assert answer.text == ": nothing more so far\nid: 2\n\n"


@pytest.mark.parametrize("bad", ["x", "-1", "1.5", "", "9" * 19, "9" * 5_000])
async def test_an_id_that_is_none_is_one_clear_error(tmp_path: Path, bad: str) -> None:
    async with served(tmp_path) as daemon:
        asked = await daemon.ask(f"?after={bad}&follow=false")
        resumed = await daemon.ask("?follow=false", **{"Last-Event-ID": bad})

    assert (asked.status_code, asked.json()["code"], asked.json()["field"]) == (
        400,
        "invalid_request",
        "after",
    )
    said = resumed.json()
    assert (resumed.status_code, said["code"]) == (400, "invalid_request")
    assert said["field"] == "Last-Event-ID"


@pytest.mark.parametrize("ahead", ["7", str((1 << 63) - 1)])
async def test_an_id_from_another_history_is_a_gap(tmp_path: Path, ahead: str) -> None:
    async with served(tmp_path) as daemon:
        daemon.note("a")
        answer = await daemon.ask(f"?after={ahead}&follow=false")

    (gap,) = events(answer.text)
    assert (gap["event"], gap["id"], gap["subject"], gap["tenant"]) == ("gap", 1, None, None)


async def test_an_event_is_sent_while_the_client_waits(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon, RawClient(daemon.url) as client:
        client.say(GET.format(query="", more=""))
        async with asyncio.timeout(DEADLINE_S):
            assert b"id: 0\n\n" in await client.reader.readuntil(b"\n\n")
            daemon.note("a")
            assert b"sandbox.ready" in await client.reader.readuntil(b"\n\n")


async def test_a_client_that_hears_of_nothing_is_sent_a_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "IDLE_S", 0.01)
    async with served(tmp_path) as daemon, RawClient(daemon.url) as client:
        client.say(GET.format(query="", more=""))
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(3):
                assert b": nothing more" in await client.reader.readuntil(b"\n\n")


async def test_a_client_that_goes_is_followed_by_nobody(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon:
        async with RawClient(daemon.url) as client:
            client.say(GET.format(query="", more=""))
            await until(lambda: daemon.journal.followers == 1)
        await until(lambda: daemon.journal.followers == 0)


async def test_a_client_that_does_not_read_is_cut_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, read_timeout_s=0.1) as daemon, RawClient(daemon.url) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # asyncio's has it
        client.say(GET.format(query="", more=""))
        await until(lambda: daemon.journal.followers == 1)
        for _ in range(100):
            daemon.note("x" * 100_000)

        await until(lambda: daemon.journal.followers == 0)

    assert "client cut off that does not read" in caplog.messages


async def test_streams_are_limited_by_themselves_and_leave_requests_alone(tmp_path: Path) -> None:
    async with (
        served(tmp_path, events_max=2, requests_max=1) as daemon,
        RawClient(daemon.url) as one,
        RawClient(daemon.url) as other,
    ):
        for client in (one, other):
            client.say(GET.format(query="", more=""))
        await until(lambda: daemon.journal.followers == 2)

        refused = await daemon.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "streams of events" in refused.json()["error"]
        async with RawClient(daemon.url) as client:
            client.say("GET /version HTTP/1.1\nHost: localhost\n\n")
            assert (await client.answer()).status == 200


async def test_five_hundred_streams_are_open_at_once_and_all_are_told(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RawClient(daemon.url)) for _ in range(500)]
        for client in clients:
            client.say(GET.format(query="", more=""))
        await until(lambda: daemon.journal.followers == 500)
        daemon.note("a")

        async with asyncio.timeout(DEADLINE_S):
            for client in clients:
                await client.reader.readuntil(b"data: ")


async def test_streams_end_at_once_when_the_daemon_does(tmp_path: Path) -> None:
    async with served(tmp_path) as daemon:
        waiting = asyncio.ensure_future(daemon.ask())
        await until(lambda: daemon.journal.followers == 1)
        daemon.journal.end_followers()

        assert (await asyncio.wait_for(waiting, DEADLINE_S)).status_code == 200
        assert (await daemon.ask()).status_code == 503


async def test_a_subscriber_that_was_away_resumes_without_a_gap(tmp_path: Path) -> None:
    """Its daemon is started again meanwhile, and things happen before it is back."""
    subjects: list[str | None] = []
    async with AsyncClient(f"unix://{tmp_path}/forkd.sock") as client:
        async with served(tmp_path) as daemon:
            stream = client.events(after=0)
            daemon.note("a", "b")
            subjects += [(await anext(stream)).subject, (await anext(stream)).subject]
        after = asyncio.ensure_future(anext(stream))
        async with served(tmp_path) as daemon:
            daemon.note("c")
            event = await asyncio.wait_for(after, DEADLINE_S)
            subjects.append(event.subject)
            await stream.aclose()  # type: ignore[attr-defined]  # a generator has it

    assert (subjects, event.id) == (["a", "b", "c"], 3)


async def test_a_subscriber_that_was_away_too_long_is_told_of_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forkd.store import history  # noqa: PLC0415 - for this test alone

    monkeypatch.setattr(history, "EVENTS_KEPT_MAX", 2)
    monkeypatch.setattr(history, "COUNTED_EVERY", 1)
    async with served(tmp_path) as daemon:
        daemon.note(*"abcde")
    async with served(tmp_path) as daemon, AsyncClient(daemon.url) as client:
        found = [each async for each in client.events(after=1, follow=False)]

    assert [each.subject for each in found] == [None, "d", "e"]
    assert (found[0].event, found[0].id, found[0].detail) == ("gap", 3, {"after": 1})
