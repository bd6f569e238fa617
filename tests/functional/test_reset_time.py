"""Time in a machine that is reset goes back to its fork, however soon after the last reset."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import REAL, TAG, real_host, value

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [
    REAL,
    pytest.mark.needs("invariant-tsc"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

RESETS = 30

PART_MAX = 0.25
"""Part of the host's time by which the guest's may have grown.

Where time does not go back it grows with the host's; where it does, by what the last reset took
longer than the first.
"""


async def test_time_in_a_guest_that_is_reset_again_and_again_does_not_grow(
    real_host: RealHost,
) -> None:
    (made,) = (await real_host.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
    seen_s = []
    began_s = time.monotonic()
    for _ in range(RESETS):
        await real_host.service.sandboxes.reset(CALLER, made.id, deadline_s=120.0)
        seen_s.append(await value(real_host, made.id, "__import__('time').monotonic()"))
    took_s = time.monotonic() - began_s
    await real_host.service.sandboxes.delete(CALLER, made.id)

    assert seen_s[-1] - seen_s[0] < took_s * PART_MAX, (took_s, seen_s)
