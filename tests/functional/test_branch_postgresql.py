"""A database server under load is branched: no sibling loses, repeats or tears a transaction."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.model.ids import parse_tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import POSTGRESQL, REAL, TAG, baked_host, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

OPTIONS = BranchOptions()

CLIENTS = 4

OF_EACH_CLIENT = 20

TRANSACTIONS = CLIENTS * OF_EACH_CLIENT
"""How many one run of pgbench makes."""

RATE_PER_S = 20
"""No faster on any host, so that a branch finds it at work."""

SCRIPT = r"""
\set done :done + 1
\if :done = :last
SELECT wait_for_end();
\endif
\set aid random(1, 100000)
\set tid random(1, 10)
\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = 1;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
    VALUES (:tid, 1, :aid, :delta, CURRENT_TIMESTAMP);
END;
"""
"""What each client does: pgbench's own transaction, the last one only when the run may end.  So no
host is so slow that a run is over before somebody has looked at what became of it."""

PREPARE = f"""
cd /root && cat >script.sql <<'END'
{SCRIPT}
END
pgbench -i -q && pgbench -n -t 1 && psql -v ON_ERROR_STOP=1 <<'END'
CREATE EXTENSION amcheck;
CREATE TABLE run AS SELECT false AS may_end;
CREATE FUNCTION wait_for_end() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    WHILE NOT (SELECT may_end FROM run) LOOP PERFORM pg_sleep(0.05); END LOOP;
END $$;
CHECKPOINT;
END
"""  # noqa: S608 - all of it is ours

LOAD = f"""
cd /root && rm -f load.status && psql -c 'UPDATE run SET may_end = false'
setsid -f flock load.lock sh -c \
    'pgbench -n -c {CLIENTS} -j 2 -t {OF_EACH_CLIENT} -R {RATE_PER_S} \
        -D done=0 -D last={OF_EACH_CLIENT} -f script.sql >load.log 2>&1; echo $? >load.status'
"""  # noqa: S608 - all of it is ours
"""A run that nobody waits for; whoever gets its lock knows that it is over."""

LET_IT_END = "psql -c 'UPDATE run SET may_end = true'"

OUTCOME = "cd /root && flock load.lock cat load.log load.status"

LOOK = """
[int(each) for each in sql('''
    SELECT (SELECT count(*) FROM pgbench_history), (SELECT sum(delta) FROM pgbench_history),
        (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches),
        (SELECT sum(tbalance) FROM pgbench_tellers)
''')[0]]
"""
"""Each transaction adds a row, and one amount to four tables; a statement sees one instant."""

DROP_CACHES = "echo 3 >/proc/sys/vm/drop_caches"
"""What a guest has only in memory by chance is then read from its disk."""

RECOVER = "pg_ctlcluster 15 main start -- -t 300"
"""Start a server, and give it time: it redoes all that there was since the last checkpoint."""

AMCHECK = "pg_amcheck --heapallindexed --parent-check --rootdescend"

DEADLINE_S = 300.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host with the recipe baked."""
    async with baked_host(bakes, POSTGRESQL) as baked:
        yield baked


@pytest_asyncio.fixture(loop_scope="module")
async def source(host: RealHost) -> AsyncIterator[Sandbox]:
    """A sandbox with pgbench's tables, and a first transaction in its history."""
    (sandbox,) = (await host.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
    await shell(host, sandbox.id, PREPARE)
    yield sandbox
    await host.clear()


async def begin_load(host: RealHost, sandbox: SandboxId) -> int:
    """Start a run of pgbench and see it work; return how many transactions there were before."""
    before = await transactions(host, sandbox)
    await shell(host, sandbox, LOAD)
    async with asyncio.timeout(DEADLINE_S):
        while await transactions(host, sandbox) < before + CLIENTS:
            pass
    return before


async def transactions(host: RealHost, sandbox: SandboxId) -> int:
    """Return how many were committed, all of which must be there in full."""
    count, *sums = await value(host, sandbox, LOOK)
    assert len(set(sums)) == 1, sums
    assert isinstance(count, int)
    return count


async def check_load_goes_on(host: RealHost, sandbox: SandboxId, before: int) -> None:
    """The load is at work, and ends as if nothing had happened."""
    assert before < await transactions(host, sandbox) < before + TRANSACTIONS
    await shell(host, sandbox, DROP_CACHES)
    await check_load_ends(host, sandbox, before)


async def check_load_ends(host: RealHost, sandbox: SandboxId, before: int) -> None:
    """Every client has seen every transaction of its own succeed, and the server has each once."""
    await shell(host, sandbox, LET_IT_END)
    outcome = await shell(host, sandbox, OUTCOME)
    assert f"actually processed: {TRANSACTIONS}/{TRANSACTIONS}\n" in outcome, outcome
    assert "number of failed transactions: 0 " in outcome, outcome
    assert outcome.endswith("\n0\n"), outcome
    assert await transactions(host, sandbox) == before + TRANSACTIONS


async def check_sound(host: RealHost, sandbox: SandboxId) -> None:
    """Every table and index is whole, and the server goes on writing."""
    assert await shell(host, sandbox, AMCHECK) == ""
    before = await transactions(host, sandbox)
    await shell(host, sandbox, "pgbench -n -c 2 -t 5")
    assert await transactions(host, sandbox) == before + 10


@pytest.mark.soak(only=True)  # programs that go on: test_branch_programs.py; below as said there
async def test_each_sibling_of_a_server_under_load_has_every_transaction_once_and_takes_more(
    host: RealHost, source: Sandbox, soak: Soak
) -> None:
    for _ in range(soak.count(1, 10)):
        before = await begin_load(host, source.id)

        branched = await host.service.branches.branch(CALLER, source.id, 1, OPTIONS)

        assert branched.fork.failures == ()
        (sibling,) = branched.fork.sandboxes
        await check_load_goes_on(host, sibling.id, before)
        await check_load_ends(host, source.id, before)
        await check_sound(host, sibling.id)
        draw = "sql('SELECT gen_random_uuid()::text, random()')"
        assert await value(host, sibling.id, draw) != await value(host, source.id, draw)
        await host.service.sandboxes.delete(CALLER, sibling.id)
    await check_sound(host, source.id)


@pytest.mark.soak(only=True)  # that a durable snapshot is of one instant: test_branch_soundness.py
async def test_a_durable_snapshot_of_a_server_under_load_goes_on_and_recovers_from_a_crash(
    host: RealHost, source: Sandbox
) -> None:
    for number in range(3):
        tag = parse_tag(f"under-load-{number}")
        before = await begin_load(host, source.id)

        await host.service.branches.branch(CALLER, source.id, 0, OPTIONS, tag=tag)

        (crashed,) = (await host.service.sandboxes.fork(CALLER, tag, 1, ForkOptions())).sandboxes
        await shell(host, crashed.id, "pg_ctlcluster 15 main stop -m immediate")
        await shell(host, crashed.id, f"{DROP_CACHES} && {RECOVER}")
        assert before < await transactions(host, crashed.id) < before + TRANSACTIONS
        await check_sound(host, crashed.id)
        await host.service.sandboxes.delete(CALLER, crashed.id)

        (restored,) = (await host.service.sandboxes.fork(CALLER, tag, 1, ForkOptions())).sandboxes
        await check_load_goes_on(host, restored.id, before)
        await check_sound(host, restored.id)
        await host.service.sandboxes.delete(CALLER, restored.id)
        await check_load_ends(host, source.id, before)
