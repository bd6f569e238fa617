"""A reset reads from the image what forks were learned to write and their source never did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.real_host import REAL_IN_SOAK
from tests.support.vmm_bench import bench_of

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(300)]

MIB = 1 << 20

HOOK = f"""
written = b"w" * {4 * MIB}
"""
"""Writes memory in each sibling before that is ready, and none in the source."""


async def test_siblings_go_back_whose_source_was_forked_before_anything_was_learned(
    real_host: RealHost,
) -> None:
    async with bench_of(real_host) as bench, bench.forked(bench.root) as (source,):
        with source.guest() as guest:
            await guest.ask("configure", {"post_fork": HOOK})
        async with (
            bench.branched(source) as (seed, _),
            bench.forked(seed),  # of this one the seed learns
            bench.forked(seed) as (sibling,),
        ):
            await sibling.value("written = b'x' * len(written); mark = 1")

            await sibling.reset()

            assert await sibling.value(
                "[len(written), list(set(written)), 'mark' in globals()]"
            ) == [
                4 * MIB,
                [ord("w")],
                False,
            ]
