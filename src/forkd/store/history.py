"""Events in the database.  Every function blocks and raises `StoreError`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from forkd.errors import StoreError
from forkd.limits import EVENTS_KEPT_MAX, EVENTS_KEPT_S
from forkd.model.caller import Owner, Tenant
from forkd.model.event import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.store.database import Connection, Database, Row

_RESERVED = "events_reserved"
_PRUNED = "events_pruned"


@dataclass(frozen=True, slots=True)
class Extent:
    """Which ids of events were given out.

    Attributes:
        last: Of the last event that is there, or was; 0 before the first.
        reserved: Up to which they may have been given out; more than `last` after a crash.
        pruned: Up to which they are there no more.
    """

    last: int
    reserved: int
    pruned: int


def extent(database: Database) -> Extent:
    """Return which ids were given out."""
    with database.transaction() as connection:
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        pruned = _number(connection, _PRUNED)
        return Extent(max(last, pruned), _number(connection, _RESERVED), pruned)


def reserve(database: Database, up_to: int) -> None:
    """Note that ids up to this one may be given out."""
    with database.transaction() as connection:
        _put_number(connection, _RESERVED, up_to)


def put(database: Database, events: Sequence[Event]) -> int:
    """Write events down, whose ids grow, and prune what is too old or too much.

    Returns:
        Up to which id events are there no more.
    """
    with database.transaction() as connection:
        connection.executemany(
            "INSERT INTO events (id, at, kind, subject, tenant, principal, request_id, detail) "
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
        return _prune(connection, events[-1].id)


def after(database: Database, seen: int, count_max: int) -> tuple[Event, ...]:
    """Return the first events with greater ids than `seen`."""
    with database.transaction() as connection:
        rows = connection.execute(
            "SELECT * FROM events WHERE id > ? ORDER BY id LIMIT ?", (seen, count_max)
        ).fetchall()
    try:
        return tuple(map(_event, rows))
    except ValueError as error:
        raise StoreError(f"an event in the database is damaged: {error}") from error


def _prune(connection: Connection, last: int) -> int:
    oldest = (datetime.now(UTC) - timedelta(seconds=EVENTS_KEPT_S)).isoformat()
    (aged,) = connection.execute(
        "SELECT coalesce(max(id), 0) FROM "
        "(SELECT id, at FROM events ORDER BY id LIMIT 1000) WHERE at < ?",
        (oldest,),
    ).fetchone()
    pruned = max(int(aged), last - EVENTS_KEPT_MAX, _number(connection, _PRUNED))
    connection.execute("DELETE FROM events WHERE id <= ?", (pruned,))
    _put_number(connection, _PRUNED, pruned)
    return pruned


def _number(connection: Connection, name: str) -> int:
    row = connection.execute("SELECT value FROM host WHERE name = ?", (name,)).fetchone()
    return 0 if row is None else int(row[0])


def _put_number(connection: Connection, name: str, number: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO host (name, value) VALUES (?, ?)", (name, str(number))
    )


def _event(row: Row) -> Event:
    return Event(
        id=row["id"],
        at=datetime.fromisoformat(row["at"]),
        kind=EventKind(row["kind"]),
        subject=row["subject"],
        owner=Owner(Tenant(row["tenant"]), row["principal"]),
        request_id=row["request_id"],
        detail=json.loads(row["detail"]),
    )
