"""Secrets in the database, their values sealed.  Every function blocks and raises `StoreError`."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, StoreError
from forkd.model.caller import Tenant
from forkd.model.secret import Secret, parse_hosts

if TYPE_CHECKING:
    from forkd.store.database import Database, Row


def put_secret(database: Database, secret: Secret, sealed: bytes) -> None:
    """Write down a secret, in the place of one of its tenant and name."""
    with database.transaction() as connection:
        connection.execute(
            "INSERT OR REPLACE INTO secrets "
            "(tenant, name, hosts, header, env, sealed, created_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                secret.tenant,
                secret.name,
                json.dumps([str(each) for each in secret.hosts]),
                secret.header,
                secret.env,
                sealed,
                secret.created_at.isoformat(),
            ),
        )


def remove_secret(database: Database, tenant: Tenant, name: str) -> None:
    """Forget a secret; one that is not there is fine."""
    with database.transaction() as connection:
        connection.execute("DELETE FROM secrets WHERE tenant = ? AND name = ?", (tenant, name))


def secrets(database: Database) -> tuple[tuple[Secret, bytes], ...]:
    """Return every secret, with its sealed value."""
    with database.transaction() as connection:
        rows = connection.execute("SELECT * FROM secrets").fetchall()
    try:
        return tuple((_secret(row), bytes(row["sealed"])) for row in rows)
    except (ValueError, TypeError, InvalidRequest) as error:
        raise StoreError(f"a secret in the database is damaged: {error}") from error


def _secret(row: Row) -> Secret:
    return Secret(
        row["name"],
        Tenant(row["tenant"]),
        parse_hosts(json.loads(row["hosts"])),
        row["header"],
        row["env"],
        datetime.fromisoformat(row["created_at"]),
    )
