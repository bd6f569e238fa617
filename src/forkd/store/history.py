"""Events in the database.  Every function blocks and raises `StoreError`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
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

_SHARED = "events_shared"
"""Up to which id tenants were told the host's ids: by a forkd without histories of their own."""

_BEGIN = "events_begin"
"""After which id the history of a tenant begins that has none yet."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Which ids of events were given out.

    Attributes:
        last: The greatest of an event that is there; 0 without one.
        reserved: Up to which they may have been given out, whatever is there.
        shared: Up to which tenants were told the host's ids.
        begin: After which id the history of a tenant begins that is not in `tenants`.
        tenants: The last id of the history of each tenant.
    """

    last: int
    reserved: int
    shared: int
    begin: int
    tenants: dict[Tenant, int]


def extent(database: Database) -> Extent:
    """Return which ids were given out."""
    with database.transaction() as connection:
        (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM events").fetchone()
        named = dict(
            connection.execute(
                "SELECT name, CAST(value AS INTEGER) FROM host WHERE name IN (?, ?, ?)",
                (_RESERVED, _SHARED, _BEGIN),
            ).fetchall()
        )
        tenants = connection.execute("SELECT tenant, last FROM tenant_histories").fetchall()
    reserved, shared, begin = (named.get(name, 0) for name in (_RESERVED, _SHARED, _BEGIN))
    return Extent(last, reserved, shared, begin, {Tenant(name): id_ for name, id_ in tenants})


def skip(database: Database, count: int) -> None:
    """Leave out so many ids in the history of every tenant, of future ones as well."""
    with database.transaction() as connection:
        connection.execute("UPDATE tenant_histories SET last = last + ?", (count,))
        connection.execute(
            "UPDATE host SET value = CAST(CAST(value AS INTEGER) + ? AS TEXT) WHERE name = ?",
            (count, _BEGIN),
        )


def reached(database: Database, tenant: Tenant, tenant_id: int) -> int:
    """Return the id of a tenant's last event up to one of its own ids; 0 without one."""
    with database.reading() as connection:
        row = connection.execute(
            "SELECT id FROM events WHERE tenant = ? AND tenant_id <= ? ORDER BY id DESC LIMIT 1",
            (tenant, tenant_id),
        ).fetchone()
    return 0 if row is None else int(row[0])


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
            "(id, at, kind, subject, tenant, principal, request_id, detail, tenant_id) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                    event.tenant_id,
                )
                for event in events
            ],
        )
        connection.executemany(
            "INSERT INTO tenant_histories VALUES (?, ?) "
            "ON CONFLICT (tenant) DO UPDATE SET last = max(last, excluded.last)",
            {event.owner.tenant: event.tenant_id for event in events}.items(),
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
            tenant_id=row["tenant_id"],
        )
    except ValueError:
        missing = gap(row["id"] - 1, row["id"], datetime.now(UTC))
        return replace(missing, tenant_id=row["tenant_id"])
