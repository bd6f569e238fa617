"""Answers that are kept by an Idempotency-Key, in the database.

Every function blocks and raises `StoreError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.model.caller import Tenant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.store.database import Database


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What is known of an answer without reading it.

    Attributes:
        id: Of its tenant and key.
        tenant: Whose it is.
        at_s: When it was kept, in seconds since 1970.
        digest: Of the request.
        size: What it takes, in bytes.
    """

    id: bytes
    tenant: Tenant
    at_s: float
    digest: bytes
    size: int


def kept(database: Database) -> tuple[KeptAnswer, ...]:
    """Return every answer that is kept, the oldest first."""
    with database.transaction() as connection:
        rows = connection.execute(
            "SELECT id, tenant, at, digest, length(sealed) AS size FROM answers ORDER BY seq"
        )
        return tuple(
            KeptAnswer(row["id"], Tenant(row["tenant"]), row["at"], row["digest"], row["size"])
            for row in rows
        )


def read(database: Database, id_: bytes) -> bytes | None:
    """Return an answer as it is kept; None if it is not."""
    with database.transaction(durable=False) as connection:
        row = connection.execute("SELECT sealed FROM answers WHERE id = ?", (id_,)).fetchone()
        return None if row is None else bytes(row["sealed"])


def put(database: Database, answer: KeptAnswer, sealed: bytes, forgotten: Iterable[bytes]) -> None:
    """Keep an answer, and forget others for it; as durable as what is written of sandboxes."""
    with database.transaction(durable=False) as connection:
        connection.executemany("DELETE FROM answers WHERE id = ?", [(each,) for each in forgotten])
        connection.execute(
            "INSERT OR REPLACE INTO answers (id, tenant, at, digest, sealed) "
            "VALUES (?, ?, ?, ?, ?)",
            (answer.id, answer.tenant, answer.at_s, answer.digest, sealed),
        )
