"""Fills the disk under PostgreSQL, and says whether it has all that it acknowledged.

Runs in a sandbox of the recipe `postgresql`, with `full_disk.py` beside it.
"""

from __future__ import annotations

import random
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg2  # type: ignore[import-untyped]  # in the guest alone

from tests.guest.full_disk import FOLDER, check_kernel_log, fill, forget, remove_ballast, run

CLUSTER = Path("/var/lib/postgresql/15/main")
ROOM_OF_SERVER_MAX = 24 << 20
"""Most that is left free: a segment of the write-ahead log, and some data."""

ROWS_OF_ROUND_MAX = 2000
ROW_MAX = 1 << 16


def sql(statement: str) -> list[tuple[Any, ...]]:
    """Run one statement; return its rows."""
    with closing(psycopg2.connect()) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def prepare_server() -> None:
    """Make a table in which a row says itself whether it is whole."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    sql("CREATE EXTENSION amcheck")
    sql("CREATE TABLE kept (number bigserial PRIMARY KEY, data bytea, sum text)")
    sql("ALTER TABLE kept ALTER data SET STORAGE EXTERNAL")


def insert_rows(dice: random.Random) -> dict[int, str]:
    """Insert rows until there is no space; return those that were acknowledged."""
    acknowledged: dict[int, str] = {}
    try:
        connection = psycopg2.connect()
        connection.autocommit = True
        with connection.cursor() as cursor:
            for _ in range(ROWS_OF_ROUND_MAX):
                data = dice.randbytes(dice.randrange(ROW_MAX))
                total = sha256(data).hexdigest()
                cursor.execute(
                    "INSERT INTO kept (data, sum) VALUES (%s, %s) RETURNING number", (data, total)
                )
                acknowledged[cursor.fetchone()[0]] = total
    except psycopg2.errors.DiskFull:  # of the data
        return acknowledged
    except psycopg2.OperationalError:  # of the log: the server has ended
        return acknowledged
    raise AssertionError("the disk is never full")


def check_rows(acknowledged: dict[int, str]) -> None:
    """Check what was acknowledged, each page, and each index."""
    rows = sql("SELECT number, sum, encode(sha256(data), 'hex') FROM kept")
    assert all(wanted == found for _, wanted, found in rows)
    assert {number: wanted for number, wanted, _ in rows}.items() >= acknowledged.items()
    run("pg_amcheck", "--heapallindexed", "--parent-check", "--rootdescend")


def round_of_server(seed: int) -> int:
    """Fill the disk under the server; return how many rows it acknowledged before."""
    dice = random.Random(seed)  # noqa: S311 - a test's
    ballast = fill(dice.randrange(ROOM_OF_SERVER_MAX))
    acknowledged = insert_rows(dice)
    # As a crash would end it; it may have ended itself.
    run("pg_ctlcluster", "15", "main", "stop", "-m", "immediate", check=False)
    forget((FOLDER, "*"), (CLUSTER, "**/*"))
    remove_ballast(ballast)
    run("pg_ctlcluster", "15", "main", "start", "--", "-t", "300")
    check_rows(acknowledged)
    sql("TRUNCATE kept")
    sql("CHECKPOINT")
    check_kernel_log()
    return len(acknowledged)
