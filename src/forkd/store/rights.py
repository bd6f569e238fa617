"""Tokens and tenants in the database.  Every function blocks and raises `StoreError`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, StoreError
from forkd.model.caller import Scope, Tenant
from forkd.model.tenant import Quotas
from forkd.model.token import Token

if TYPE_CHECKING:
    from forkd.model.tenant import QuotasChange
    from forkd.store.database import Database


def put_token(database: Database, token: Token, digest: str) -> None:
    """Write down a token, of whose secret only a digest is known."""
    expires_at = None if token.expires_at is None else token.expires_at.isoformat()
    with database.transaction() as connection:
        connection.execute(
            "INSERT INTO tokens (name, digest, tenant, scopes, created_at, expires_at) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                token.name,
                digest,
                token.tenant,
                " ".join(sorted(token.scopes)),
                token.created_at.isoformat(),
                expires_at,
            ),
        )


def remove_token(database: Database, name: str) -> None:
    """Forget a token; one that is not there is fine."""
    with database.transaction() as connection:
        connection.execute("DELETE FROM tokens WHERE name = ?", (name,))


def tokens(database: Database) -> dict[str, Token]:
    """Return every token, by the digest of its secret."""
    with database.transaction() as connection:
        rows = connection.execute("SELECT * FROM tokens").fetchall()
    try:
        return {
            row["digest"]: Token(
                row["name"],
                Tenant(row["tenant"]),
                frozenset(map(Scope, row["scopes"].split())),
                datetime.fromisoformat(row["created_at"]),
                None if row["expires_at"] is None else datetime.fromisoformat(row["expires_at"]),
            )
            for row in rows
        }
    except ValueError as error:
        raise StoreError(f"a token in the database is damaged: {error}") from error


def put_quotas(database: Database, tenant: Tenant, quotas: Quotas) -> None:
    """Write down what a tenant may have."""
    with database.transaction() as connection:
        connection.execute(
            "INSERT OR REPLACE INTO tenants (name, quotas) VALUES (?, ?)",
            (tenant, json.dumps(asdict(quotas))),
        )


def change_quotas(database: Database, tenant: Tenant, change: QuotasChange) -> Quotas:
    """Change some of what a tenant may have; return all of it."""
    with database.transaction() as connection:
        row = connection.execute("SELECT quotas FROM tenants WHERE name = ?", (tenant,)).fetchone()
        quotas = change.of(Quotas() if row is None else _quotas(row["quotas"]))
        connection.execute(
            "INSERT OR REPLACE INTO tenants (name, quotas) VALUES (?, ?)",
            (tenant, json.dumps(asdict(quotas))),
        )
    return quotas


def remove_quotas(database: Database, tenant: Tenant) -> None:
    """Forget what a tenant may have; one without quotas is fine."""
    with database.transaction() as connection:
        connection.execute("DELETE FROM tenants WHERE name = ?", (tenant,))


def quotas(database: Database) -> dict[Tenant, Quotas]:
    """Return the tenants that have quotas."""
    with database.transaction() as connection:
        rows = connection.execute("SELECT name, quotas FROM tenants").fetchall()
    return {Tenant(name): _quotas(text) for name, text in rows}


def _quotas(text: str) -> Quotas:
    try:
        return Quotas(**json.loads(text))
    except (ValueError, TypeError, InvalidRequest) as error:
        raise StoreError(f"a tenant in the database is damaged: {error}") from error
