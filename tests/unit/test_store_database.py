"""Sandboxes are remembered exactly, and damage is one clear error."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, StoreError
from forkd.model.caller import Owner, Scope, Tenant
from forkd.model.ids import new_sandbox_id
from forkd.model.network import HOST
from forkd.model.sandbox import SandboxState
from forkd.model.secret import Secret, parse_hosts
from forkd.model.tenant import Quotas
from forkd.model.token import Token
from forkd.store import rights, secrets
from forkd.store.database import RESERVED_BYTES, Database, SandboxRow
from forkd.store.schema import MIGRATIONS, SCHEMA_VERSION
from tests.support.sandboxes import MADE_AT, a_full_sandbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL = 2
"""What SQLite says of `PRAGMA synchronous = FULL`."""


def row(second: int = 0) -> SandboxRow:
    made = a_full_sandbox(MADE_AT + timedelta(seconds=second))
    sandbox = replace(made, owner=Owner(Tenant("acme"), "ci"))
    return SandboxRow(
        sandbox, network_index=3, lease=new_sandbox_id(), tap_index=4, renaming=second == 1
    )


def test_rows_come_back_as_written_oldest_first_also_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    rows = [row(second=2), row(second=1)]
    with closing(Database(path)) as database:
        database.put(rows)

    with closing(Database(path)) as database:
        assert database.rows() == (rows[1], rows[0])


def test_a_link_from_before_there_were_policies_may_reach_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    with closing(Database(path)) as database:
        old = row()
        database.put([old])
        with database.transaction() as connection:
            connection.execute("UPDATE sandboxes SET network = NULL")

        (found,) = database.rows()

    assert found.sandbox.network == HOST


def test_a_row_is_replaced_by_its_id_and_removed_by_it(tmp_path: Path) -> None:
    first, other = row(), row(second=1)
    with closing(Database(tmp_path / "forkd.db")) as database:
        database.put([first, other])
        changed = replace(
            first, sandbox=replace(first.sandbox, state=SandboxState.EXITED, spawn=None)
        )
        database.put([changed])
        database.remove([other.sandbox.id, new_sandbox_id()])

        assert database.rows() == (changed,)


def test_rows_are_written_all_or_none(tmp_path: Path) -> None:
    good = row()
    bad = replace(good, network_index="x" * 3)  # type: ignore[arg-type]  # STRICT tables refuse it
    with closing(Database(tmp_path / "forkd.db")) as database:
        with pytest.raises(StoreError):
            database.put([good, bad])

        assert database.rows() == ()


def test_a_full_disk_is_one_clear_error_after_which_the_database_works_again(
    tmp_path: Path,
) -> None:
    first = row()
    with closing(Database(tmp_path / "forkd.db")) as database:
        database.put([first])
        connection = database._connection  # noqa: SLF001 - this stands for a full disk
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(CapacityError, match="no room for the database"):
            database.put([row() for _ in range(200)])

        assert database.rows() == (first,)
        database.remove([first.sandbox.id])
        assert database.rows() == ()


def test_the_log_has_its_room_from_the_start(tmp_path: Path) -> None:
    first = row()
    with closing(Database(tmp_path / "forkd.db")) as database:
        assert (tmp_path / "forkd.db-wal").stat().st_blocks * 512 >= RESERVED_BYTES
        database.put([first])
        assert database.rows() == (first,)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    path.write_bytes(b"not a database" * 1_000)

    with pytest.raises(StoreError, match="does not work"):
        Database(path)


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")

    with pytest.raises(StoreError, match=f"forkd.db has version {SCHEMA_VERSION + 1}"):
        Database(path)


def test_a_database_of_the_first_version_is_read_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    old = new_sandbox_id()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{MIGRATIONS[0]} PRAGMA user_version = 1;")
        connection.execute(
            "INSERT INTO sandboxes VALUES (?, 'python', 'running', '2026-01-02T00:00:00+00:00', "
            "'name', 7, NULL, NULL, NULL, NULL, NULL, 3)",
            [old],
        )
        connection.commit()

    with closing(Database(path)) as database:
        (found,) = database.rows()
        assert (found.sandbox.id, found.lease, found.tap_index) == (old, old, 3)
        assert (found.sandbox.ancestors, found.sandbox.root, found.renaming) == ((), old, False)
        assert (found.sandbox.name, found.sandbox.labels, found.sandbox.env) == (None, {}, {})
        database.put([found])
        assert database.rows() == (found,)


def test_a_database_from_before_there_were_secrets_is_read_and_written_on(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("".join(MIGRATIONS[:5]) + " PRAGMA user_version = 5;")
        connection.execute(
            "INSERT INTO sandboxes (id, tag, state, created_at, hostname, network) VALUES "
            "(?, 'python', 'running', '2026-01-02T00:00:00+00:00', 'name', '[\"internet\"]')",
            [new_sandbox_id()],
        )
        connection.commit()

    with closing(Database(path)) as database:
        (found,) = database.rows()
        assert (found.sandbox.secrets, found.sandbox.use) == ((), None)
        assert secrets.secrets(database) == ()
        changed = replace(found, sandbox=replace(found.sandbox, secrets=("a", "b")))
        database.put([changed])
        assert database.rows() == (changed,)


def test_a_secret_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = Secret(
        "token",
        Tenant("ours"),
        parse_hosts(["api.example.com", "*.example.com:8443"]),
        "X-Api-Key",
        "KEY",
        datetime(2026, 1, 2, tzinfo=UTC),
    )
    with closing(Database(tmp_path / "forkd.db")) as database:
        secrets.put_secret(database, made, b"\x00sealed\xff")
        secrets.put_secret(database, replace(made, tenant=Tenant("theirs")), b"other")
        assert dict(secrets.secrets(database))[made] == b"\x00sealed\xff"
        secrets.put_secret(database, replace(made, env=None), b"again")
        secrets.remove_secret(database, Tenant("theirs"), "token")
        assert secrets.secrets(database) == ((replace(made, env=None), b"again"),)
        with database.transaction() as connection:
            connection.execute("UPDATE secrets SET hosts = '[\"no name\"]'")
        with pytest.raises(StoreError, match="damaged"):
            secrets.secrets(database)


def test_what_says_who_may_do_what_is_on_the_disk_when_it_is_said(tmp_path: Path) -> None:
    """SQLite writes its log to the disk at the end of a transaction only as it was last told."""
    owner, told = Owner(Tenant("acme"), "ci"), list[str]()
    token = Token("ci", owner.tenant, frozenset({Scope.RUN}), datetime(2026, 1, 2, tzinfo=UTC))
    secret = Secret(
        "s", owner.tenant, parse_hosts(["example.com"]), "X-Key", None, token.created_at
    )
    sandbox = row()
    steps: list[tuple[str, Callable[[Database], object]]] = [
        ("FULL", lambda it: it.put_snapshot_owner(sandbox.sandbox.tag, owner)),
        ("FULL", lambda it: it.remove_snapshot_owners([sandbox.sandbox.tag])),
        ("FULL", lambda it: rights.put_token(it, token, "digest")),
        ("FULL", lambda it: rights.remove_token(it, "ci")),
        ("FULL", lambda it: rights.put_quotas(it, owner.tenant, Quotas(sandboxes=1))),
        ("FULL", lambda it: rights.remove_quotas(it, owner.tenant)),
        ("FULL", lambda it: secrets.put_secret(it, secret, b"sealed")),
        ("FULL", lambda it: secrets.remove_secret(it, owner.tenant, "s")),
        ("NORMAL", lambda it: it.put([sandbox])),
        ("NORMAL", lambda it: it.remove([sandbox.sandbox.id])),
    ]
    with closing(Database(tmp_path / "forkd.db")) as database:
        with database.transaction(durable=False) as connection:
            connection.set_trace_callback(told.append)

        for _, step in steps:
            step(database)

    assert _modes_of_commits(told) == [mode for mode, _ in steps]


def test_a_failed_transaction_leaves_the_next_one_durable(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "forkd.db")) as database:
        with pytest.raises(StoreError):
            database.put([replace(row(), network_index="x" * 3)])  # type: ignore[arg-type]  # refused
        with database.transaction() as connection:
            assert connection.execute("PRAGMA synchronous").fetchone()[0] == FULL


def _modes_of_commits(told: list[str]) -> list[str]:
    """Return with which `PRAGMA synchronous` each transaction ended."""
    mode, modes = "", []
    for statement in told:
        if statement.startswith("PRAGMA synchronous"):
            mode = statement.rpartition(" ")[2]
        elif statement == "COMMIT":
            modes.append(mode)
    return modes[1:]  # without the one in which it was begun to be told


def test_a_damaged_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "forkd.db"
    with closing(Database(path)) as database:
        database.put([row()])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE sandboxes SET state = 'asleep'")
        connection.commit()

    with closing(Database(path)) as database, pytest.raises(StoreError, match="damaged"):
        database.rows()
