"""What zygotes hold of KVM, and what they have it do before a guest runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import ForkOptions
from tests.support.real_host import REAL

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


def machines_of_kvm(pid: int | None) -> int:
    """Return how many virtual machines a process holds."""
    opened = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return opened.count("anon_inode:kvm-vm")


async def test_a_zygote_keeps_one_machine_of_kvm_and_no_child_has_that(
    real_host: RealHost,
) -> None:
    async with real_host.forked(2, ForkOptions()) as children:
        (zygote,) = real_host.vmm_processes() - {child.pid for child in children}

        assert [machines_of_kvm(child.pid) for child in children] == [1, 1]
        assert machines_of_kvm(zygote) == 1
    assert machines_of_kvm(zygote) == 1
