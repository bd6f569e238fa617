"""A guest keeps its memory limit itself: it reclaims its caches, and kills one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd.model.sandbox import ForkOptions, NewLimits, SandboxState
from tests.support.callers import CALLER
from tests.support.real_host import REAL_IN_SOAK, shell, value

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(600)]

MIB = 1 << 20

LIMIT_MIB = 192

FILE_MIB = 256
"""More than the limit, so that the page cache of the file alone exceeds it."""

AVAILABLE = "int([l for l in open('/proc/meminfo') if 'MemAvailable' in l][0].split()[1]) * 1024"

HOG = """
held = []
while True:
    held.append(b"x" * (1 << 20))
"""


async def test_a_guest_reclaims_its_cache_and_kills_one_process_within_its_limit(
    real_host: RealHost,
) -> None:
    service = real_host.service
    options = ForkOptions(memory_limit_mib=LIMIT_MIB)
    async with real_host.forked(1, options) as (sandbox,):
        group = real_host.names.cgroup_root / sandbox.id
        limited = await value(real_host, sandbox.id, AVAILABLE)
        copy = f"dd if=/dev/zero of=/root/file bs=1M count={FILE_MIB} && cat /root/file >/dev/null"
        await shell(real_host, sandbox.id, copy)
        assert [
            await value(real_host, sandbox.id, "int(open('/proc/self/oom_score_adj').read())"),
            int(await shell(real_host, sandbox.id, "cat /proc/self/oom_score_adj")),
        ] == [-300, 0]
        ended = await shell(real_host, sandbox.id, f"python3 -c '{HOG}'; echo $?")
        assert ended.splitlines()[-1] == "137"
        assert await shell(real_host, sandbox.id, "echo ok") == "ok\n"
        assert await value(real_host, sandbox.id, "int(numpy.arange(3).sum())") == 3

        found = await service.sandboxes.get(CALLER, sandbox.id)
        assert found.state is SandboxState.RUNNING
        assert "oom_kill 0" in (group / "memory.events").read_text().splitlines()
        console = await service.sandboxes.console_log(CALLER, sandbox.id)
        assert b"Out of memory: Killed process" in console

        assert limited < LIMIT_MIB * MIB
        more = NewLimits(memory_limit_mib=2 * LIMIT_MIB)
        await service.sandboxes.set_limits(CALLER, sandbox.id, more)
        assert await value(real_host, sandbox.id, AVAILABLE) > limited + LIMIT_MIB // 2 * MIB
