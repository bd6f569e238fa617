"""The tables of the database, and how each version is made of the last."""

from __future__ import annotations

_SANDBOXES = """
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    tag TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at TEXT NOT NULL,
    hostname TEXT NOT NULL,
    pid INTEGER,
    address TEXT,
    memory_limit_mib INTEGER,
    disk_limit_mib INTEGER,
    spawn TEXT,
    exit_reason TEXT,
    network_index INTEGER
) STRICT, WITHOUT ROWID;
"""

_LINEAGE = """
ALTER TABLE sandboxes ADD COLUMN ancestors TEXT;
ALTER TABLE sandboxes ADD COLUMN branched_at TEXT;
ALTER TABLE sandboxes ADD COLUMN expires_at TEXT;
ALTER TABLE sandboxes ADD COLUMN cpu_limit REAL;
ALTER TABLE sandboxes ADD COLUMN pids_limit INTEGER;
ALTER TABLE sandboxes ADD COLUMN place TEXT;
ALTER TABLE sandboxes ADD COLUMN tap_index INTEGER;
ALTER TABLE sandboxes ADD COLUMN renaming INTEGER NOT NULL DEFAULT 0;
"""

_OWNERS = """
ALTER TABLE sandboxes RENAME COLUMN place TO lease;
ALTER TABLE sandboxes ADD COLUMN tenant TEXT NOT NULL DEFAULT 'default';
ALTER TABLE sandboxes ADD COLUMN principal TEXT NOT NULL DEFAULT 'forkd';
ALTER TABLE sandboxes ADD COLUMN attempts INTEGER NOT NULL DEFAULT 1;
CREATE TABLE snapshot_owners (
    tag TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    principal TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE host (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
"""

_RIGHTS = """
ALTER TABLE snapshot_owners ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
CREATE TABLE tokens (
    name TEXT PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at TEXT NOT NULL,
    expires_at TEXT
) STRICT, WITHOUT ROWID;
CREATE TABLE tenants (
    name TEXT PRIMARY KEY,
    quotas TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    tenant TEXT NOT NULL,
    principal TEXT NOT NULL,
    request_id TEXT,
    detail TEXT NOT NULL
) STRICT;
"""

_EGRESS = """
ALTER TABLE sandboxes ADD COLUMN network TEXT;
ALTER TABLE sandboxes ADD COLUMN egress_held INTEGER NOT NULL DEFAULT 0;
"""

_IPV6 = """
ALTER TABLE sandboxes ADD COLUMN address_v6 TEXT;
"""

_BANDWIDTH = """
ALTER TABLE sandboxes ADD COLUMN bandwidth_limit_mbit INTEGER;
"""

_SECRETS = """
ALTER TABLE sandboxes ADD COLUMN secrets TEXT;
CREATE TABLE secrets (
    tenant TEXT NOT NULL,
    name TEXT NOT NULL,
    hosts TEXT NOT NULL,
    header TEXT NOT NULL,
    env TEXT,
    sealed BLOB NOT NULL,
    created_at TEXT NOT NULL,
    PRIMARY KEY (tenant, name)
) STRICT, WITHOUT ROWID;
"""

_CPU_WEIGHT = """
ALTER TABLE sandboxes ADD COLUMN cpu_weight INTEGER;
"""

_IO = """
ALTER TABLE sandboxes ADD COLUMN io_limit_mib_s INTEGER;
ALTER TABLE sandboxes ADD COLUMN io_limit_ops INTEGER;
"""

_EVENTS_OF_TENANTS = """
CREATE INDEX events_of_tenants ON events (tenant, id);
"""

_NAMES = """
ALTER TABLE sandboxes ADD COLUMN name TEXT;
ALTER TABLE sandboxes ADD COLUMN labels TEXT;
ALTER TABLE sandboxes ADD COLUMN env TEXT;
"""

_ANSWERS = """
CREATE TABLE answers (
    seq INTEGER PRIMARY KEY,
    id BLOB NOT NULL UNIQUE,
    tenant TEXT NOT NULL,
    at REAL NOT NULL,
    digest BLOB NOT NULL,
    sealed BLOB NOT NULL
) STRICT;
"""

_IDLE = """
ALTER TABLE sandboxes ADD COLUMN idle_ttl_s REAL;
"""

_TENANT_HISTORIES = """
ALTER TABLE events ADD COLUMN tenant_id INTEGER NOT NULL DEFAULT 0;
UPDATE events SET tenant_id = id;
CREATE TABLE tenant_histories (
    tenant TEXT PRIMARY KEY,
    last INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO host (name, value) SELECT 'events_shared', CAST(max(
    coalesce((SELECT CAST(value AS INTEGER) FROM host WHERE name = 'events_reserved'), 0),
    coalesce((SELECT max(id) FROM events), 0)
) AS TEXT);
INSERT INTO host (name, value) SELECT 'events_begin', value FROM host WHERE name = 'events_shared';
"""

MIGRATIONS = (
    _SANDBOXES,
    _LINEAGE,
    _OWNERS,
    _RIGHTS,
    _EGRESS,
    _IPV6,
    _BANDWIDTH,
    _SECRETS,
    _CPU_WEIGHT,
    _IO,
    _EVENTS_OF_TENANTS,
    _NAMES,
    _ANSWERS,
    _IDLE,
    _TENANT_HISTORIES,
)
"""What makes version n + 1 of version n."""

SCHEMA_VERSION = len(MIGRATIONS)
