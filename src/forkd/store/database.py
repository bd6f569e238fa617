"""Which sandboxes there are, whose snapshots are, and what this host was set up with, in SQLite.

A row is written before anything of its sandbox exists and removed after everything
of it is gone, so that a daemon that was killed at any point leaves nothing that its
successor does not know of.  Every method blocks and may run in any thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import threading
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING

from forkd.errors import CapacityError, ForkdError, InvalidRequest, StoreError
from forkd.host import files
from forkd.model.caller import Owner, Tenant
from forkd.model.ids import SandboxId, Tag
from forkd.model.network import HOST, NetworkPolicy
from forkd.model.sandbox import Sandbox, SandboxState, SpawnTimes
from forkd.store.schema import MIGRATIONS, SCHEMA_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

RESERVED_BYTES = 8 << 20
"""Room that the log has from the start, twice what it grows to before it is written back: on a
full disk sandboxes end, and with them what they hold, only if that can be written down."""

CACHE_KIB = 512
"""How much of the database SQLite keeps in memory; the events are read from their end."""

_BUSY_TIMEOUT_S = 10.0

_DURABLE, _NOT_DURABLE = "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL"
"""Whether the log is on the disk when a transaction ends, or only when it is written back."""

Connection = sqlite3.Connection
"""What a transaction gives; for annotations in this package."""

Row = sqlite3.Row
"""One row of an answer; likewise."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """A sandbox as it is remembered.

    Attributes:
        sandbox: What its owner last published.
        lease: Id of its lease, after which its folder and cgroup are named; differs from its own
            once it was promoted.
        network_index: Whose addresses in the network plan it has; None without a network.
        tap_index: Whose tap in the network plan it has; differs from `network_index` once it
            was promoted.
        renaming: It was promoted, and its guest may not have its new identity yet.
    """

    sandbox: Sandbox
    lease: SandboxId
    network_index: int | None = None
    tap_index: int | None = None
    renaming: bool = False


class Database:
    """The rows below one state folder; close it when done.

    Attributes:
        was_version: Version that the database had before it was opened; 0 for a new one.
    """

    def __init__(self, path: Path) -> None:
        """Open the database, or make it.

        Raises:
            StoreError: It is damaged, or of a later version.
        """
        self._path = path
        self._lock = threading.Lock()
        self._reading_lock = threading.Lock()
        self._durable = True  # as `_prepare` leaves it
        with _as_store_error():
            _check_version(path)
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        try:
            with _as_store_error():
                self._prepare()
                self._reserve(path)
                self._reader = _open_to_read(path)
        except (StoreError, CapacityError):
            self._connection.close()
            raise

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._reading_lock:
            self._reader.close()
        with self._lock:
            self._connection.close()

    def put(self, rows: Iterable[SandboxRow]) -> None:
        """Write rows, all or none; those of the same id are replaced.

        Raises:
            StoreError: They could not be written.
        """
        with self.transaction(durable=False) as connection:
            columns = [_to_columns(row) for row in rows]
            if columns:
                connection.executemany(_statement(tuple(columns[0])), columns)

    def remove(self, ids: Iterable[SandboxId]) -> None:
        """Remove rows, all or none; ids without a row are fine.

        Raises:
            StoreError: They could not be removed.
        """
        with self.transaction(durable=False) as connection:
            connection.executemany("DELETE FROM sandboxes WHERE id = ?", [(id_,) for id_ in ids])

    def rows(self) -> tuple[SandboxRow, ...]:
        """Return every row, oldest first.

        Raises:
            StoreError: The database is damaged.
        """
        with self.transaction() as connection:
            cursor = connection.execute("SELECT * FROM sandboxes ORDER BY created_at, id")
            return tuple(_from_columns(columns) for columns in cursor)

    def put_snapshot_owner(self, tag: Tag, owner: Owner, *, shared: bool = False) -> None:
        """Note whose a snapshot is, and whether every tenant may use it.

        Raises:
            StoreError: It could not be written.
        """
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO snapshot_owners (tag, tenant, principal, shared) "
                "VALUES (?, ?, ?, ?)",
                (tag, owner.tenant, owner.principal, int(shared)),
            )

    def remove_snapshot_owners(self, tags: Iterable[Tag]) -> None:
        """Forget whose snapshots were; tags without a row are fine.

        Raises:
            StoreError: They could not be removed.
        """
        with self.transaction() as connection:
            rows = [(tag,) for tag in tags]
            connection.executemany("DELETE FROM snapshot_owners WHERE tag = ?", rows)

    def snapshot_owners(self) -> dict[Tag, tuple[Owner, bool]]:
        """Return whose snapshots are, and whether every tenant may use them.

        One without a row is the default tenant's.

        Raises:
            StoreError: The database is damaged.
        """
        with self.transaction() as connection:
            rows = connection.execute("SELECT tag, tenant, principal, shared FROM snapshot_owners")
            return {
                Tag(tag): (Owner(Tenant(tenant), who), bool(shared))
                for tag, tenant, who, shared in rows
            }

    def host_setting(self, name: str, chosen: str) -> str:
        """Return what the host was set up with; `chosen` from now on, if nothing was.

        For names that what runs on the host bears, which another choice would not find.

        Raises:
            StoreError: It could not be read or written.
        """
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR IGNORE INTO host (name, value) VALUES (?, ?)", (name, chosen)
            )
            (value,) = connection.execute(
                "SELECT value FROM host WHERE name = ?", (name,)
            ).fetchone()
            return str(value)

    def replace_host_setting(self, name: str, value: str) -> None:
        """Note what the host is set up with from now on.

        Raises:
            StoreError: It could not be written.
        """
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO host (name, value) VALUES (?, ?)", (name, value)
            )

    def _prepare(self) -> None:
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(_DURABLE)
        self._connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        self.was_version = version
        if version < SCHEMA_VERSION:
            steps = "".join(MIGRATIONS[version:])
            self._connection.executescript(
                f"BEGIN; {steps} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )

    def _reserve(self, path: Path) -> None:
        """Give the log its room.  It is never made smaller, and its end need not be written."""
        self._connection.execute("BEGIN IMMEDIATE")  # makes the log
        self._connection.execute("COMMIT")
        try:
            files.reserve(path.with_name(f"{path.name}-wal"), RESERVED_BYTES)
        except ForkdError as error:
            log.warning("no room for the database's log", extra={"error": str(error)})

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """Give the connection for one transaction: all of the block's changes, or none.

        Args:
            durable: Whether the changes survive a power cut from the end of the block on.  Those
                that say who may do what must.  Others may be lost with the last seconds, with all
                that came after them, and cost no write to the disk: no machine survives a power
                cut, so what is remembered of sandboxes and events of that time is of little use.

        Raises:
            StoreError: The database does not work.
            CapacityError: The disk is full.
        """
        with self._lock, _as_store_error():
            # Before it begins: whatever fails after the commit would deny what was written.
            if durable is not self._durable:
                self._connection.execute(_DURABLE if durable else _NOT_DURABLE)
                self._durable = durable
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk may have ended it already
                    self._connection.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Give a connection that sees one state of the database for the block, and changes nothing.

        It is apart from that of transactions: neither waits for the other.

        Raises:
            StoreError: The database does not work.
        """
        with self._reading_lock, _as_store_error():
            self._reader.execute("BEGIN")
            try:
                yield self._reader
            finally:
                self._reader.execute("ROLLBACK")


def _check_version(path: Path) -> None:
    """Return if we can read the database, or there is none; a later one is left as it is.

    It is opened to read only: to open it to write would already change files of its writer.

    Raises:
        StoreError: It is of a later version.
    """
    try:
        connection = _open_to_read(path)
    except sqlite3.OperationalError:
        return  # there is no such file yet, or opening it to write says why not
    with contextlib.closing(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"the database {path} has version {version}, and this forkd reads up to "
            f"{SCHEMA_VERSION}: start the forkd that wrote it, or a later one",
            reason="too_new",
            version=version,
        )


def _open_to_read(path: Path) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode=ro"
    made = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    made.row_factory = sqlite3.Row
    try:
        made.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    except sqlite3.Error:
        made.close()
        raise
    return made


@contextlib.contextmanager
def _as_store_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise CapacityError("the disk has no room for the database") from error
        raise StoreError(f"the database does not work: {error}") from error


@cache
def _statement(names: tuple[str, ...]) -> str:
    """Return what writes a row of columns with these names."""
    values = ", ".join(f":{name}" for name in names)
    return f"INSERT OR REPLACE INTO sandboxes ({', '.join(names)}) VALUES ({values})"  # noqa: S608 - names of ours


def _to_columns(row: SandboxRow) -> dict[str, str | int | float | None]:
    sandbox = row.sandbox
    return {
        "id": sandbox.id,
        "tag": sandbox.tag,
        "state": sandbox.state.value,
        "created_at": sandbox.created_at.isoformat(),
        "hostname": sandbox.hostname,
        "pid": sandbox.pid,
        "address": sandbox.address,
        "address_v6": sandbox.address_v6,
        "memory_limit_mib": sandbox.memory_limit_mib,
        "disk_limit_mib": sandbox.disk_limit_mib,
        "spawn": _spawn_text(sandbox.spawn),
        "exit_reason": sandbox.exit_reason,
        "network_index": row.network_index,
        "ancestors": json.dumps(sandbox.ancestors),
        "branched_at": _text(sandbox.branched_at),
        "expires_at": _text(sandbox.expires_at),
        "idle_ttl_s": sandbox.idle_ttl_s,
        "cpu_limit": sandbox.cpu_limit,
        "cpu_weight": sandbox.cpu_weight,
        "pids_limit": sandbox.pids_limit,
        "io_limit_mib_s": sandbox.io_limit_mib_s,
        "io_limit_ops": sandbox.io_limit_ops,
        "bandwidth_limit_mbit": sandbox.bandwidth_limit_mbit,
        "tenant": sandbox.owner.tenant,
        "principal": sandbox.owner.principal,
        "attempts": sandbox.attempts,
        "network": None if sandbox.network is None else json.dumps(sandbox.network.rules()),
        "egress_held": int(sandbox.egress_held),
        "secrets": json.dumps(sandbox.secrets),
        "name": sandbox.name,
        "labels": json.dumps(dict(sandbox.labels)),
        "env": json.dumps(dict(sandbox.env)),
        "lease": row.lease,
        "tap_index": row.tap_index,
        "renaming": int(row.renaming),
    }


def _spawn_text(spawn: SpawnTimes | None) -> str | None:
    if spawn is None:
        return None
    # Not `dataclasses.asdict`: it copies deeply, and a fork writes one for each child.
    return json.dumps({name: getattr(spawn, name) for name in SpawnTimes.__slots__})


def _text(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat()


def _when(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _policy(text: str | None, network_index: int | None) -> NetworkPolicy | None:
    """Return what a sandbox may reach; one from before there were policies has the host's end."""
    if text is not None:
        return NetworkPolicy().with_rules(tuple(json.loads(text)))
    return None if network_index is None else HOST


def _from_columns(columns: sqlite3.Row) -> SandboxRow:
    try:
        spawn = columns["spawn"]
        sandbox = Sandbox(
            id=SandboxId(columns["id"]),
            tag=Tag(columns["tag"]),
            state=SandboxState(columns["state"]),
            created_at=datetime.fromisoformat(columns["created_at"]),
            hostname=columns["hostname"],
            pid=columns["pid"],
            address=columns["address"],
            address_v6=columns["address_v6"],
            memory_limit_mib=columns["memory_limit_mib"],
            disk_limit_mib=columns["disk_limit_mib"],
            spawn=None if spawn is None else SpawnTimes(**json.loads(spawn)),
            exit_reason=columns["exit_reason"],
            ancestors=tuple(json.loads(columns["ancestors"] or "[]")),
            branched_at=_when(columns["branched_at"]),
            expires_at=_when(columns["expires_at"]),
            idle_ttl_s=columns["idle_ttl_s"],
            cpu_limit=columns["cpu_limit"],
            cpu_weight=columns["cpu_weight"],
            pids_limit=columns["pids_limit"],
            io_limit_mib_s=columns["io_limit_mib_s"],
            io_limit_ops=columns["io_limit_ops"],
            bandwidth_limit_mbit=columns["bandwidth_limit_mbit"],
            owner=Owner(Tenant(columns["tenant"]), columns["principal"]),
            attempts=columns["attempts"],
            network=_policy(columns["network"], columns["network_index"]),
            egress_held=bool(columns["egress_held"]),
            secrets=tuple(json.loads(columns["secrets"] or "[]")),
            name=columns["name"],
            labels=json.loads(columns["labels"] or "{}"),
            env=json.loads(columns["env"] or "{}"),
        )
    except (ValueError, TypeError, InvalidRequest) as error:
        raise StoreError(f"a row of the database is damaged: {error}") from error
    network, tap = columns["network_index"], columns["tap_index"]
    return SandboxRow(
        sandbox,
        lease=columns["lease"] or sandbox.id,
        network_index=network,
        tap_index=network if tap is None else tap,
        renaming=bool(columns["renaming"]),
    )
