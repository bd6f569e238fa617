"""PostgreSQL recovers from a full disk, with every row that it acknowledged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import POSTGRESQL, REAL, ROOT, baked_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

LIMIT_MIB = 128
"""What the write-ahead log and the data of a round have room in."""

ROUNDS, SOAK_ROUNDS = 3, 500

SPENT_S_MAX = 3600.0
"""How long rounds go on, at most: an emulated machine makes one or two a minute."""

SCRIPTS = [ROOT / "tests/guest" / name for name in ("full_disk.py", "full_disk_postgresql.py")]

PREPARE = """
import sys
sys.path.insert(0, "/root")
from tests.guest.full_disk_postgresql import prepare_server, round_of_server
prepare_server()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(bakes: Bakes) -> AsyncIterator[RealHost]:
    async with baked_host(bakes, POSTGRESQL) as baked:
        yield baked


@pytest.mark.soak(only=True)  # SQLite, git and dpkg: tests/functional/test_disk_limits.py
async def test_a_server_recovers_from_a_full_disk_with_all_that_it_acknowledged(
    host: RealHost, soak: Soak, tell: Callable[[str], None]
) -> None:
    dice = soak.dice()
    async with host.forked(1, ForkOptions(disk_limit_mib=LIMIT_MIB)) as (sandbox,):
        for script in SCRIPTS:
            target = f"/root/{script.relative_to(ROOT)}"
            content = chunks(script.read_bytes())
            await host.service.guests.write_file(
                CALLER, sandbox.id, target, content, make_parents=True
            )
        await value(host, sandbox.id, PREPARE)

        kept: list[int] = []
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SPENT_S_MAX
        rounds = soak.count(ROUNDS, SOAK_ROUNDS)
        while len(kept) < rounds and loop.time() < end_s:
            code = f"round_of_server({dice.getrandbits(32)})"
            kept.append(await value(host, sandbox.id, code))

        tell(f"{len(kept)} rounds, {sum(kept)} rows kept")
        assert sum(kept) > len(kept), "the disk was full before there was anything to keep"


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    """Give all bytes at once."""
    yield data
