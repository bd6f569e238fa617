"""What a VMM's threads may ask the kernel (`crates/vmm/src/jail/filter.rs`), in real machines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from forkd.service.seeds import retired_for
from tests.support import injected
from tests.support.callers import CALLER
from tests.support.real_host import FORK_DEADLINE_S, REAL, real_host, value
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DEADLINE_S = 120.0

SHOWN = ("Name", "Seccomp", "NoNewPrivs", "Seccomp_filters")
"""Of the status of a thread, as `/proc` has it."""

FILTERED, UNPRIVILEGED = "2", "1"

PROT_ALL = 7

KVM_CREATE_VM = 0xAE01

AF_INET = 2

SIGSYS = 31

X32 = 1 << 30

CALLS = [
    pytest.param("main", (101,), "ptrace (101)", id="main-ptrace"),
    pytest.param("main", (59,), "execve (59)", id="main-execve"),
    pytest.param("main", (10, 0, 0, PROT_ALL), "mprotect (10)", id="main-executable-memory"),
    pytest.param("main", (41, AF_INET, 1), "socket (41)", id="main-internet"),
    pytest.param("main", (13, SIGSYS), "rt_sigaction (13)", id="main-handler"),
    pytest.param("main", (X32 | 39,), "unknown (1073741863)", id="main-x32"),
    pytest.param("vcpu0", (425,), "io_uring_setup (425)", id="vcpu-io-uring"),
    pytest.param("vcpu0", (16, 99, KVM_CREATE_VM), "ioctl (16)", id="vcpu-kvm"),
    pytest.param("vcpu0", (435,), "clone3 (435)", id="vcpu-clone3"),
    pytest.param("vcpu0", (234, 1, 1, 6), "tgkill (234)", id="vcpu-signal-to-another"),
]


KVMS = "kvm-nx-lpage"
"""A thread of each machine since Linux 6.14, unless `kvm.nx_huge_pages` is `never`: it is in the
process, and runs code of the kernel alone."""


def threads_of(pid: int) -> Iterator[tuple[str, ...]]:
    """Give of each thread of a process what `SHOWN` says, but of the one that KVM has made."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().startswith(KVMS):
            continue
        lines = (task / "status").read_text().splitlines()
        status = {name: rest.strip() for name, _, rest in (line.partition(":") for line in lines)}
        yield tuple(status[name] for name in SHOWN)


def all_threads(host: RealHost) -> list[tuple[str, ...]]:
    """Return what the kernel says of each thread of a host's VMM processes, in order."""
    pids = host.vmm_processes()
    pids |= retired_for(pids)
    return sorted(each for pid in pids for each in threads_of(pid))


async def ended(host: RealHost, sandbox: Sandbox) -> Sandbox:
    """Wait until a sandbox has ended; return it as it is then."""
    async with asyncio.timeout(DEADLINE_S):
        async for _ in host.service.sandboxes.follow_console_log(CALLER, sandbox.id):
            pass  # the log ends with the machine
    return await host.service.sandboxes.get(CALLER, sandbox.id)


async def test_every_thread_has_a_filter_and_vcpus_and_seeds_have_one_more(
    real_host: RealHost,
) -> None:
    service = real_host.service
    async with real_host.forked(1, ForkOptions()) as (source,):
        options = BranchOptions(deadline_s=FORK_DEADLINE_S)
        result = await service.branches.branch(CALLER, source.id, 1, options)
        assert result.fork.failures == ()
        try:
            # The zygote, the source and its vCPU, the retired seed, the sibling and its vCPU.
            expected = [
                ("forkd-seed", FILTERED, UNPRIVILEGED, "2"),
                *[("forkd-vmm", FILTERED, UNPRIVILEGED, "1")] * 3,
                *[("vcpu0", FILTERED, UNPRIVILEGED, "2")] * 2,
            ]
            # The seed has answered before it gives up the rest.
            await until(lambda: all_threads(real_host) == expected)
        finally:
            for sibling in result.fork.sandboxes:
                await service.sandboxes.delete(CALLER, sibling.id)


@pytest.mark.parametrize(("thread", "made", "named"), CALLS)
async def test_a_call_that_a_thread_does_not_need_ends_its_sandbox_alone_which_names_it(
    real_host: RealHost, thread: str, made: tuple[int, ...], named: str
) -> None:
    async with real_host.forked(2, ForkOptions()) as (taken, sibling):
        assert taken.pid is not None
        threads = injected.threads(taken.pid)

        injected.call(threads[thread] if thread != "main" else taken.pid, *made)

        found = await ended(real_host, taken)
        reason = f"its VMM was killed by the filter: system call {named}"
        assert (found.state, found.exit_reason) == (SandboxState.EXITED, reason)
        assert await value(real_host, sibling.id, "1 + 1") == 2
