"""Servers of Debian run in a guest as its packages set them up, under systemd, and after a fork."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.errors import EngineExited
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from forkd.service.sandboxes.owner import REASON_AGENT
from tests.support.callers import CALLER
from tests.support.real_host import REAL_IN_SOAK, SERVICES, baked_host, shell

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(1_800)]

JOURNAL = """
set -e
logger --tag said-by-a-test hello-from-a-fork
journalctl --sync
journalctl --quiet --lines 5 --no-pager --identifier said-by-a-test
test "$(journalctl --boot --quiet --no-pager | wc -l)" -gt 0
systemctl restart systemd-journald
logger --tag said-by-a-test hello-again
journalctl --sync
journalctl --quiet --boot --no-pager --identifier said-by-a-test | tail -n 1
"""

HISTORY = "journalctl --quiet --no-pager --unit nginx.service | grep --count Started"

BUS = """
set -e
hostnamectl | grep 'Machine ID' | tr -dc 0-9a-f | tail -c 32; echo
busctl --list >/dev/null
systemd-run --quiet --wait true
loginctl >/dev/null
cat /etc/machine-id
cat /var/lib/dbus/machine-id
ls /var/log/journal
"""

DEADLINE_S = 300.0

DELAYED_KILL = """
setsid sh -c 'sleep 30; kill -9 $(pgrep -o -f ^/run/forkd/bin/agent)' </dev/null >/dev/null 2>&1 &
"""

DOCKER = r"""
set -e
mkdir -p /tmp/root/bin && cp /bin/busybox /tmp/root/bin/
tar -C /tmp/root -c . | docker import - local/busybox >/dev/null
docker run --rm local/busybox /bin/busybox echo from a container
docker run --rm -p 8080:80 -d local/busybox \
    /bin/busybox nc -l -p 80 -e /bin/busybox echo published >/dev/null
busybox nc 127.0.0.1 8080
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(bakes: Bakes) -> AsyncIterator[RealHost]:
    async with baked_host(bakes, SERVICES) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(host: RealHost) -> AsyncIterator[Sandbox]:
    async with host.forked(1, ForkOptions()) as (child,):
        await shell(host, child.id, "true")  # its connection would look like a test's leak
        yield child


async def test_systemd_runs_and_its_journal_follows_the_fork(
    host: RealHost, sandbox: Sandbox
) -> None:
    assert await shell(host, sandbox.id, "systemctl --failed --no-legend --plain") == ""
    said = await shell(host, sandbox.id, JOURNAL)
    assert re.findall(r"hello-\S+", said) == ["hello-from-a-fork", "hello-again"]
    assert int(await shell(host, sandbox.id, HISTORY)) >= 1
    assert await shell(host, sandbox.id, "systemctl is-system-running") == "running\n"


async def test_everybody_in_a_guest_knows_it_by_the_same_id_and_no_sibling_has_it(
    host: RealHost, sandbox: Sandbox
) -> None:
    ids = (await shell(host, sandbox.id, BUS)).split()
    async with host.forked(1, ForkOptions()) as (sibling,):
        other = await shell(host, sibling.id, "cat /etc/machine-id")

    assert len(set(ids)) == 1, ids
    assert len(ids) == 4
    assert other.strip() not in ids


async def test_the_servers_of_debian_answer(host: RealHost, sandbox: Sandbox) -> None:
    assert await shell(host, sandbox.id, "redis-cli ping") == "PONG\n"
    assert await shell(host, sandbox.id, "mariadb -N -e 'SELECT 6 * 7'") == "42\n"
    query = "cd / && su postgres -c 'psql -tAc \"SELECT 6 * 7\"'"
    assert await shell(host, sandbox.id, query) == "42\n"
    page = await shell(host, sandbox.id, "busybox wget -q -O - http://127.0.0.1/")
    assert "Welcome to nginx" in page
    banner = await shell(host, sandbox.id, "busybox nc 127.0.0.1 22 </dev/null | head -n 1")
    assert banner.startswith("SSH-2.0-OpenSSH")
    kept = await shell(host, sandbox.id, "cat /run/app/keep && stat -c '%a %U' /run/mysqld")
    assert kept == "kept\n755 mysql\n"


async def test_an_agent_is_spared_when_memory_runs_out_and_missed_when_it_is_killed(
    host: RealHost, sandbox: Sandbox
) -> None:
    scores = (
        "cat /proc/self/oom_score_adj /proc/$(pgrep -o -f '^/run/forkd/bin/agent')/oom_score_adj"
    )
    assert (await shell(host, sandbox.id, scores)).split() == ["0", "-1000"]

    async with host.forked(1, ForkOptions()) as (other,):
        with pytest.raises(EngineExited, match=f"has exited: {REASON_AGENT}"):
            await shell(host, other.id, "kill -9 -1; sleep 60")
        found = await host.service.sandboxes.get(CALLER, other.id)

    assert (found.state, found.exit_reason) == (SandboxState.EXITED, REASON_AGENT)


@pytest.mark.parametrize("used", [True, False])
async def test_an_agent_that_is_killed_in_an_idle_sandbox_is_missed_without_an_operation(
    host: RealHost, *, used: bool
) -> None:
    async with host.forked(1, ForkOptions()) as (source,):
        await shell(host, source.id, DELAYED_KILL)
        idle = source
        if not used:  # nobody ever has a connection to its agent
            branched = await host.service.branches.branch(CALLER, source.id, 1, BranchOptions())
            (idle,) = branched.fork.sandboxes
        async with asyncio.timeout(DEADLINE_S):
            async for _ in host.service.sandboxes.follow_console_log(CALLER, idle.id):
                pass
        found = await host.service.sandboxes.get(CALLER, idle.id)

    assert (found.state, found.exit_reason) == (SandboxState.EXITED, REASON_AGENT)


async def test_docker_runs_a_container_of_a_local_image(host: RealHost, sandbox: Sandbox) -> None:
    said = await shell(host, sandbox.id, DOCKER)

    assert said == "from a container\npublished\n"
