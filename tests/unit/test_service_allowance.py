"""What a sandbox may take of the host, and what its guest may use of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import ForkOptions
from forkd.service.allowance import allow, guest_memory_bytes
from tests.support.fake_service import a_snapshot
from tests.support.sandboxes import a_sandbox

if TYPE_CHECKING:
    from forkd.model.sandbox import Sandbox

MIB = 1 << 20

SNAPSHOT = a_snapshot("python")


def sandbox(memory_limit_mib: int | None) -> Sandbox:
    return replace(a_sandbox(), memory_limit_mib=memory_limit_mib)


@pytest.mark.parametrize("guest_mib", [128, 512, 65_536, 1_000_000])
def test_a_guest_may_use_all_its_memory_if_no_limit_was_asked_for(guest_mib: int) -> None:
    snapshot = replace(SNAPSHOT, memory_bytes=guest_mib * MIB)
    allowed = allow(ForkOptions(), snapshot)

    assert guest_memory_bytes(sandbox(allowed.memory_limit_mib), snapshot) is None
    assert guest_memory_bytes(sandbox(None), snapshot) is None


def test_a_guest_may_use_what_its_limit_leaves_beside_its_vmm() -> None:
    assert guest_memory_bytes(sandbox(200), SNAPSHOT) == (200 - 24 - 3) * MIB
    assert guest_memory_bytes(sandbox(10_000), SNAPSHOT) is None
    assert guest_memory_bytes(sandbox(10_000), None) == (10_000 - 24 - 153) * MIB


def test_a_limit_that_a_vmm_needs_by_itself_leaves_its_guest_nothing_rather_than_less() -> None:
    assert guest_memory_bytes(sandbox(20), SNAPSHOT) == 0
