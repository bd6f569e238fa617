"""What zygotes hold of KVM, and what they have it do before a guest runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import ForkOptions
from tests.support.real_host import REAL, value

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PAGE_BYTES = 4096
ENTRY_BYTES = 8
FILE_OR_SHARED, PRESENT = 1 << 61, 1 << 63
"""Bits of an entry of a page map."""

KVM_STATISTICS = Path("/sys/kernel/debug/kvm")


def machines_of_kvm(pid: int | None) -> int:
    """Return how many virtual machines a process holds."""
    opened = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    return opened.count("anon_inode:kvm-vm")


def pages_written(pid: int) -> int:
    """Return how many pages of the image in memory a process has copied."""
    written = 0
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" not in line:
                continue
            start, end = (int(address, 16) for address in line.split()[0].split("-"))
            pagemap.seek(start // PAGE_BYTES * ENTRY_BYTES)
            entries = memoryview(pagemap.read((end - start) // PAGE_BYTES * ENTRY_BYTES)).cast("Q")
            written += sum(e & (PRESENT | FILE_OR_SHARED) == PRESENT for e in entries)
    return written


def pages_mapped_by_exits(pid: int) -> int:
    """Return how many pages KVM has mapped because the guest touched them."""
    return sum(int((vm / "pf_fixed").read_text()) for vm in KVM_STATISTICS.glob(f"{pid}-*"))


@pytest.mark.soak(only=True)
async def test_a_zygote_keeps_one_machine_of_kvm_and_no_child_has_that(
    real_host: RealHost,
) -> None:
    async with real_host.forked(2, ForkOptions()) as children:
        (zygote,) = real_host.vmm_processes() - {child.pid for child in children}

        assert [machines_of_kvm(child.pid) for child in children] == [1, 1]
        assert machines_of_kvm(zygote) == 1
    assert machines_of_kvm(zygote) == 1


@pytest.mark.needs("pre-fault")
async def test_a_page_that_forks_write_is_no_exit(real_host: RealHost) -> None:
    async with real_host.forked(1, ForkOptions()) as (child,):
        assert child.pid is not None
        exits, written = pages_mapped_by_exits(child.pid), pages_written(child.pid)

        assert 0 < exits < written
        assert await value(real_host, child.id, "6 * 7") == 42
