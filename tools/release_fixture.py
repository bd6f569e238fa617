"""Write what this version leaves on a host, so that later versions can be tested with it.

    python -m tools.release_fixture          into tests/upgrade/releases/<version>, before a release
    python -m tools.release_fixture --check  fail if that is missing, or has other formats

The folder then has `fixture.tar.gz`:

    state/                 a daemon's state folder: a database with rows in every table, a base and
                           a delta over it, their image, a record of a failure, the secrets' key
    snapshot.forkpack      a pack of the two snapshots, signed with a key of the tests
    config/forkd/          contexts of a client
    names.json             what later tests must know: ids, and a token's secret

Snapshots are of the tests' fake VMM.  The states of real machines are in `protocol/store/golden`.
Ids, times and nonces are others each time, so `--check` compares formats: `shape` says which.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import io
import json
import os
import signal
import sqlite3
import sys
import tarfile
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

from forkd.model.caller import Scope, Tenant
from forkd.model.ids import Tag
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.model.secret import SecretRequest, SecretValue, parse_hosts
from forkd.model.tenant import Quotas
from forkd.model.token import TokenRequest
from forkd.packs.container import read_head
from forkd.sdk import _contexts
from forkd.service.host import DATABASE_FILE
from forkd.store import answers
from forkd.store.answers import KeptAnswer
from forkd.store.database import Database, SandboxRow
from forkd.store.manifest import MANIFEST_FILE
from forkd.store.pending import PendingStore, Record
from tests.support.callers import CALLER
from tests.support.packs import signed
from tests.support.sandboxes import a_full_sandbox
from tests.support.service_host import FakeHost, make_host
from tools.release import ROOT, version

RELEASES = ROOT / "tests" / "upgrade" / "releases"
ARCHIVE = "fixture.tar.gz"
PACK = "snapshot.forkpack"
NAMES = "names.json"

BASE, DELTA, FAILED = Tag("python"), Tag("delta"), Tag("failed")
TENANT = Tenant("acme")
SECRET_VALUE = "a-secret-of-the-fixture"  # noqa: S105 - it guards nothing
ANSWER_ID = b"\x01" * 32

_LEFT_OUT = ("cache", "daemon.lock", "lock")
"""What of a state folder is made anew by any daemon."""


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.release_fixture", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare formats")
    asked = parser.parse_args()
    folder = RELEASES / version()
    if not asked.check:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ARCHIVE).write_bytes(made())
        sys.stdout.write(f"{folder / ARCHIVE}\n")
        return 0
    complaint = difference(folder)
    if complaint is not None:
        sys.stderr.write(f"release_fixture: {complaint}\n")
    return 0 if complaint is None else 1


def difference(folder: Path) -> str | None:
    """Say how a release's fixture differs from what would be written today; None if it does not."""
    path = folder / ARCHIVE
    if not path.is_file():
        return f"{path} is missing: run `python -m tools.release_fixture`, and commit it"
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as scratch:
        then, now = Path(scratch) / "then", Path(scratch) / "now"
        unpack(path.read_bytes(), then)
        unpack(made(), now)
        old, new = shape(then), shape(now)
    parts = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if not parts:
        return None
    return (
        f"{path} differs from what this version writes, in: {', '.join(parts)}; run "
        "`python -m tools.release_fixture`, and commit it"
    )


def made() -> bytes:
    """Return the archive of a fixture that was made just now."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as scratch:
        folder = Path(scratch) / "made"
        (run_dir := Path(scratch) / "run").mkdir()
        host = make_host(Path(scratch), run_dir)
        folder.mkdir()
        try:
            names = asyncio.run(_fill(host, folder))
        finally:
            _end(host)
        _add_to_database(host.settings.state_dir)
        with mock.patch.dict(os.environ, {"XDG_CONFIG_HOME": str(folder / "config")}):
            contexts = _contexts.Contexts()
            contexts.add("ci", _contexts.Context("https://ci.example.com:8889", "a-token"))
            contexts.use("ci")
            contexts.save()
        (folder / NAMES).write_text(json.dumps(names, indent=1) + "\n")
        host.settings.state_dir.rename(folder / "state")
        return packed(folder)


async def _fill(host: FakeHost, folder: Path) -> dict[str, str]:
    """Have a daemon write what a host has; return what later tests must know."""
    async with host.service() as service:
        await host.bake(service, host.recipe())
        hosts = parse_hosts(["api.example.com"])
        await service.secrets.put(CALLER, SecretRequest("token", SecretValue(SECRET_VALUE), hosts))
        await service.tenants.set_quotas(CALLER, TENANT, Quotas(sandboxes=7))
        token = await service.tokens.create(
            CALLER, TokenRequest("ci", TENANT, frozenset({Scope.RUN, Scope.READ}))
        )
        options = ForkOptions(all_or_nothing=True, labels={"team": "blue"}, env={"A": "b"})
        (source,) = (await service.sandboxes.fork(CALLER, BASE, 1, options)).sandboxes
        await service.branches.snapshot(CALLER, source.id, DELTA, wait=True)
        pack = b"".join([piece async for piece in service.packs.pack(CALLER, DELTA)])
        (folder / PACK).write_bytes(signed(pack))
    PendingStore(host.settings.state_dir).put(
        Record(tag=FAILED, created_at=datetime.now(UTC), error="the disk was full")
    )
    return {"token": token.secret, "source": source.id}


def _end(host: FakeHost) -> None:
    """End the machines, as a reboot of the host does."""
    for pid in host.vmm_processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _add_to_database(state_dir: Path) -> None:
    """Add what a daemon writes only for requests over HTTP, and a sandbox with every column."""
    now = datetime.now(UTC)
    made = replace(
        a_full_sandbox(now),
        state=SandboxState.EXITED,
        exit_reason="ended by the fixture",
        expires_at=None,  # or a daemon ends it
    )
    with contextlib.closing(Database(state_dir / DATABASE_FILE)) as database:
        database.put([SandboxRow(made, lease=made.id)])
        kept = KeptAnswer(ANSWER_ID, TENANT, now.timestamp(), b"\x02" * 32, 6)
        answers.put(database, kept, b"answer", ())


def packed(folder: Path) -> bytes:
    """Return a folder as an archive whose times and owners say nothing."""
    raw = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.is_file() and not _is_left_out(name):
                entry = tarfile.TarInfo(str(name))
                entry.size, entry.mode = path.stat().st_size, 0o600
                archive.addfile(entry, io.BytesIO(path.read_bytes()))
    return raw.getvalue()


def _is_left_out(name: Path) -> bool:
    return name.parts[0] == "state" and name.parts[1] in _LEFT_OUT


def unpack(archive: bytes, folder: Path) -> None:
    """Lay a fixture out in a folder that is not there yet."""
    folder.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as packed:
        packed.extractall(folder, filter="data")


def names_in(folder: Path) -> dict[str, str]:
    """Return what later tests must know of a fixture that is laid out."""
    said: dict[str, str] = json.loads((folder / NAMES).read_text())
    return said


def shape(folder: Path) -> dict[str, Any]:
    """Return the formats of a fixture that is laid out: versions, tables and names of members.

    What another fixture of the same forkd has, too: neither ids nor times nor counts.
    """
    state = folder / "state"
    with contextlib.closing(sqlite3.connect(state / DATABASE_FILE)) as database:
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        tables = dict(database.execute("SELECT name, sql FROM sqlite_master WHERE sql <> ''"))
        filled = [name for name in tables if _has_rows(database, name)]
        sealed = [row[0][0] for row in database.execute("SELECT sealed FROM secrets")]
    snapshots = {path.name: _snapshot(path) for path in sorted((state / "snapshots").iterdir())}
    with (folder / PACK).open("rb") as file:
        head = read_head(file)
    contexts = json.loads((folder / "config" / "forkd" / "contexts.json").read_text())
    records = [sorted(json.loads(path.read_text())) for path in (state / "writing").iterdir()]
    return {
        "database": {"version": schema, "tables": tables, "filled": sorted(filled)},
        "secrets": {"sealed": sealed},
        "snapshots": snapshots,
        "pack": {"members": _members(json.loads(head.raw)), "signed": head.key is not None},
        "contexts": _members(contexts),
        "records": records,
        "files": sorted({path.name for path in state.iterdir()}),
    }


def _has_rows(database: sqlite3.Connection, name: str) -> bool:
    tables = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    if database.execute(tables, (name,)).fetchone() is None:
        return False  # an index
    return database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone() is not None  # noqa: S608 - ours


def _snapshot(folder: Path) -> dict[str, Any]:
    said = json.loads((folder / MANIFEST_FILE).read_text())
    heads = {name: (folder / name).read_bytes()[:12] for name in ("state", "memory")}
    return {
        "version": said["version"],
        "members": _members(said),
        "files": {name: [head[:8].decode(), head[8]] for name, head in heads.items()},
    }


def _members(value: object) -> object:
    """Return the names of the members of JSON, with what is below them; of lists the first."""
    if isinstance(value, dict):
        return {name: _members(each) for name, each in sorted(value.items())}
    return [_members(value[0])] if isinstance(value, list) and value else type(value).__name__


if __name__ == "__main__":
    sys.exit(main())
