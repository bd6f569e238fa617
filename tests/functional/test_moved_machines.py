"""A snapshot of another processor runs here, or is refused with what this one lacks.

`python -m tests.intel.moves` bakes one on AMD's and one on Intel's, and takes each to the other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.errors import StoreError
from forkd.host import proc
from forkd.model.ids import parse_tag
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import ForkOptions
from tests.functional.test_packs_machines import a_file, elsewhere, pieces
from tests.support.callers import CALLER
from tests.support.real_host import REAL_IN_SOAK, TAG, RealHost, baked_host, value, variant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import BinaryIO

    from tests.support.bakes import Bakes

logger = logging.getLogger(__name__)

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(1200)]

FROM, TO = "FORKD_TEST_MOVED_FROM", "FORKD_TEST_MOVED_TO"
"""Variables: folders of the packs that came from elsewhere, and for the one that is made here."""

PACK = "portable.forkpack"

ARRIVED = parse_tag("arrived")

REQUEST = UnpackRequest(ARRIVED, allow_unsigned=True)

COUNT = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory, bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host with a snapshot whose guest sees what many processors have."""
    recipe = variant(tmp_path_factory.mktemp("recipes") / "portable", cpu="portable")
    async with baked_host(bakes, recipe) as baked:
        yield baked


async def test_a_portable_snapshot_is_unpacked_and_forked(host: RealHost) -> None:
    with a_file() as file:
        async with contextlib.aclosing(host.service.packs.pack(CALLER, TAG)) as packed:
            async for piece in packed:
                file.write(piece)
        keep(file)
        async with elsewhere() as there:
            unpacked = await there.service.packs.unpack(CALLER, REQUEST, pieces(file))
            assert unpacked.missing_features == ()
            await check_forks(there)


@pytest.mark.usefixtures("host")  # which has opened what a process opens once
@pytest.mark.skipif(FROM not in os.environ, reason="only `python -m tests.intel.moves` has packs")
async def test_a_snapshot_from_elsewhere_runs_or_what_is_missing_is_named() -> None:
    pack = Path(os.environ[FROM]) / PACK
    async with elsewhere() as there:
        with pack.open("rb") as file:
            missing = (
                await there.service.packs.unpack(CALLER, REQUEST, pieces(file))
            ).missing_features
        logger.info("on %s there is missing: %s", proc.cpu().model, ", ".join(missing) or "nothing")
        if not missing:
            await check_forks(there)
            return
        with pytest.raises(StoreError) as refused:
            await there.service.sandboxes.fork(CALLER, ARRIVED, COUNT, ForkOptions())
        logger.info("a fork is refused: %s", refused.value)
        assert any(name in str(refused.value) for name in missing)
        assert len(await there.service.sandboxes.list(CALLER)) == 0


def keep(file: BinaryIO) -> None:
    """Leave the pack for another machine, if one is to have it."""
    if TO in os.environ:
        Path(os.environ[TO]).mkdir(parents=True, exist_ok=True)
        file.seek(0)
        with (Path(os.environ[TO]) / PACK).open("wb") as target:
            shutil.copyfileobj(file, target)


async def check_forks(host: RealHost) -> None:
    """Check that forks compute, and that none sees what is not portable."""
    forked = await host.service.sandboxes.fork(CALLER, ARRIVED, COUNT, ForkOptions())
    try:
        assert forked.failures == ()
        for sandbox in forked.sandboxes:
            code = "int(numpy.arange(10).sum()), 'avx512f' in open('/proc/cpuinfo').read()"
            assert await value(host, sandbox.id, code) == [45, False]
    finally:
        for sandbox in forked.sandboxes:
            await host.service.sandboxes.delete(CALLER, sandbox.id)
