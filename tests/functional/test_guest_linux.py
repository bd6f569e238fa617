"""A guest whose process 1 is the agent is a Linux as a distribution sets it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.model.exec import ExecRequest, Exited, Stderr, Stdout
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import REAL, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WATCHES = """
import ctypes, os
library = ctypes.CDLL(None)
notify = library.inotify_init()
made = 0
for number in range(9_000):
    os.makedirs(f"/tmp/watched/{number}")
    made += library.inotify_add_watch(notify, f"/tmp/watched/{number}".encode(), 256) > 0
os.close(notify)
made
"""

ON_DEMAND = """
set -e
test ! -e /sys/module/loop
mkdir -p /mnt/vfat
truncate -s 1M /tmp/disk.ext4
exec 3<>/dev/loop-control
test -e /sys/module/loop
exec 4<>/dev/net/tun
test -e /sys/module/tun
test "$(stat -c %a /dev/fuse)" = 666
exec 5<>/dev/fuse
mkdir /tmp/lower /tmp/upper /tmp/work /tmp/merged
modprobe squashfs
grep -q squashfs /proc/filesystems
modprobe -a wireguard veth br_netfilter nf_tables binfmt_misc inet_diag tls
mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
cat /proc/sys/fs/binfmt_misc/status
! modprobe no-such-module 2>/dev/null
"""


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(real_host: RealHost) -> AsyncIterator[SandboxId]:
    async with real_host.forked(1, ForkOptions()) as (child,):
        yield child.id


async def as_nobody(host: RealHost, sandbox: SandboxId, command: str) -> tuple[str, int | None]:
    request = ExecRequest(("sh", "-c", command), user="nobody")
    async with await host.service.guests.exec(CALLER, sandbox, request) as session:
        events = [event async for event in session]
    printed = b"".join(each.data for each in events if isinstance(each, (Stdout, Stderr)))
    (code,) = (each.exit_code for each in events if isinstance(each, Exited))
    return printed.decode(), code


@pytest.mark.soak(only=True)
async def test_limits_are_those_of_a_distribution(real_host: RealHost, sandbox: SandboxId) -> None:
    limits = await shell(real_host, sandbox, "ulimit -Sn; ulimit -Hn")
    assert limits.split() == ["65536", "524288"]
    raised = await as_nobody(real_host, sandbox, "ulimit -n 500000 && ulimit -n")
    assert raised == ("500000\n", 0)
    files = "files = [open('/dev/null') for _ in range(5_000)]; len(files)"
    assert await value(real_host, sandbox, files) == 5_000
    settings = "fs/inotify/max_user_watches vm/max_map_count kernel/pid_max net/unix/max_dgram_qlen"
    found = await shell(real_host, sandbox, f"cd /proc/sys && cat {settings}")
    assert found.split() == ["1048576", "1048576", "4194304", "512"]
    assert await value(real_host, sandbox, WATCHES) == 9_000


async def test_what_the_image_has_below_run_is_there(
    real_host: RealHost, sandbox: SandboxId
) -> None:
    found = await shell(real_host, sandbox, "stat -c '%a %U:%G' /run /run/lock /var/run/lock")

    assert found.splitlines() == ["755 root:root", "1777 root:root", "1777 root:root"]


async def test_kernel_modules_are_loaded_when_they_are_used(
    real_host: RealHost, sandbox: SandboxId
) -> None:
    assert await shell(real_host, sandbox, ON_DEMAND) == "enabled\n"
