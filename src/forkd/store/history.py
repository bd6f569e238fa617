"""Events in the database.  Every function blocks and raises `StoreError`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from forkd.limits import EVENTS_KEPT_MAX, EVENTS_KEPT_S
from forkd.model.caller import Owner, Tenant
from forkd.model.event import Event, EventKind, gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.store.database import Connection, Database, Row

COUNTED_EVERY = 1_000
"""Every how many events those that are kept are counted, which reads all of them."""

AGED_AT_ONCE = 1_000
"""Most events that are removed for their age with one that is written."""

_RESERVED = "events_reserved"


@dataclass(frozen=True, slots=True)
class Extent:
    """Which ids of events were given out.

    Attributes:
        last: The greatest of an event that is there; 0 without one.
        reserved: Up to which they may have been given out, whatever is there.
    """

    last: int
    reserved: int


def extent(database: Database) -> Extent:
    """Return which ids were given out."""
    with database.transaction() as connection:
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        row = connection.execute("SELECT value FROM host WHERE name = ?", (_RESERVED,)).fetchone()
        return Extent(last, 0 if row is None else int(row[0]))


def reserve(database: Database, up_to: int) -> None:
    """Note that ids up to this one may be given out."""
    with database.transaction() as connection:
        connection.execute(
            "INSERT OR REPLACE INTO host (name, value) VALUES (?, ?)", (_RESERVED, str(up_to))
        )


def put(database: Database, events: Sequence[Event]) -> None:
    """Write events down, whose ids grow, and remove what is too old or too much; idempotent."""
    with database.transaction(durable=False) as connection:
        connection.executemany(
            "INSERT OR REPLACE INTO events "
            "(id, at, kind, subject, tenant, principal, request_id, detail) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    event.id,
                    event.at.isoformat(),
                    event.kind,
                    event.subject,
                    event.owner.tenant,
                    event.owner.principal,
                    event.request_id,
                    json.dumps(dict(event.detail)),
                )
                for event in events
            ],
        )
        _remove_aged(connection)
        if events[0].id // COUNTED_EVERY != (events[-1].id + 1) // COUNTED_EVERY:
            _remove_surplus(connection)


@dataclass(frozen=True, slots=True)
class Found:
    """What the database has of a part of the history.

    Attributes:
        events: Those that were asked for.
        oldest: The least id of any event that is there; None without one.
    """

    events: tuple[Event, ...]
    oldest: int | None


def between(
    database: Database, seen: int, before: int, count_max: int, tenant: Tenant | None = None
) -> Found:
    """Return the first events after one id and before another, of one tenant or of all.

    Of an event that cannot be read, say of a later forkd, there is a gap.
    """
    whose, names = ("", ()) if tenant is None else ("tenant = ? AND ", (tenant,))
    with database.reading() as connection:
        rows = connection.execute(
            f"SELECT * FROM events WHERE {whose}id > ? AND id < ? ORDER BY id LIMIT ?",  # noqa: S608 - words of ours
            (*names, seen, before, count_max),
        ).fetchall()
        (oldest,) = connection.execute("SELECT min(id) FROM events").fetchone()
    return Found(tuple(map(_event, rows)), oldest)


def missing(database: Database) -> list[tuple[int, int]]:
    """Return which ids have no event between two that have one: the first and last of each run."""
    with database.reading() as connection:
        rows = connection.execute(
            "SELECT before + 1, id - 1 FROM "
            "(SELECT id, lag(id) OVER (ORDER BY id) AS before FROM events) WHERE id > before + 1"
        )
        return [(first, last) for first, last in rows]


def _remove_aged(connection: Connection) -> None:
    oldest = (datetime.now(UTC) - timedelta(seconds=EVENTS_KEPT_S)).isoformat()
    connection.execute(
        "DELETE FROM events WHERE id <= (SELECT max(id) FROM "
        "(SELECT id, at FROM events ORDER BY id LIMIT ?) WHERE at < ?)",
        (AGED_AT_ONCE, oldest),
    )


def _remove_surplus(connection: Connection) -> None:
    """Keep so many events; ids have gaps, so that they say nothing of how many there are."""
    connection.execute(
        "DELETE FROM events WHERE id <= (SELECT id FROM events ORDER BY id DESC LIMIT 1 OFFSET ?)",
        (EVENTS_KEPT_MAX,),
    )


def _event(row: Row) -> Event:
    try:
        return Event(
            id=row["id"],
            at=datetime.fromisoformat(row["at"]),
            kind=EventKind(row["kind"]),
            subject=row["subject"],
            owner=Owner(Tenant(row["tenant"]), row["principal"]),
            request_id=row["request_id"],
            detail=json.loads(row["detail"]),
        )
    except ValueError:
        return gap(row["id"] - 1, row["id"], datetime.now(UTC))
