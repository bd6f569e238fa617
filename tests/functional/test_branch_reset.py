"""A sibling of a running machine goes back to the instant of its branch, whoever has ended."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.errors import Conflict
from forkd.host import proc
from forkd.model.network import HOST, NetworkPolicy
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.service import seeds
from tests.support.callers import CALLER
from tests.support.real_host import REAL, TAG, real_host, value
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

DEADLINE_S = 120.0

THINK = """
import hashlib, os, subprocess, sys
thought = {thought!r}
pages = bytearray(os.urandom(4096) * 2048)
digest = hashlib.sha256(pages).hexdigest()
with open("/root/kept", "w") as file:
    file.write(thought)
    file.flush()
    os.fsync(file.fileno())
echo = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def asked(word):
    echo.stdin.write(word.encode() + b"\\n")
    echo.stdin.flush()
    return echo.stdout.readline().decode().strip()

def found():
    return [thought, hashlib.sha256(pages).hexdigest() == digest, open("/root/kept").read(),
            asked(thought), os.path.exists("/root/more"), "fresh" in globals()]
None
"""

FORGET = """
pages[::4096] = b"x" * 2048
thought = "lost"
open("/root/kept", "w").write(thought)
open("/root/more", "wb").write(os.urandom(1 << 20))
fresh = bytearray(8 << 20)
os.sync()
echo.kill()
echo.wait()
"""

WHO = "[open('/proc/sys/kernel/random/boot_id').read().strip(), os.uname().nodename]"

WOKEN = "open('/proc/interrupts').read().split('HYP:')[1].split()[0]"
"""How often KVM has said that a page of the host's is there."""


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(real_host: RealHost) -> AsyncIterator[None]:
    """Delete everything; nothing may be left, seeds included, but the snapshot's zygote."""
    yield
    for each in await real_host.service.sandboxes.list(CALLER):
        await real_host.service.sandboxes.delete(CALLER, each.id)
    await until(lambda: len(real_host.vmm_processes()) <= 1)
    assert list(real_host.settings.sandboxes_dir.iterdir()) == []


async def thinker(host: RealHost, thought: str, *, network: NetworkPolicy | None = None) -> Sandbox:
    result = await host.service.sandboxes.fork(CALLER, TAG, 1, ForkOptions(network=network))
    assert result.failures == ()
    (made,) = result.sandboxes
    await value(host, made.id, THINK.format(thought=thought))
    return made


async def branched(host: RealHost, parent: SandboxId, count: int = 1) -> tuple[Sandbox, ...]:
    result = await host.service.branches.branch(CALLER, parent, count, BranchOptions())
    assert result.fork.failures == ()
    return result.fork.sandboxes


async def forget(host: RealHost, sandbox: Sandbox) -> None:
    await value(host, sandbox.id, FORGET)


async def back(host: RealHost, sandbox: Sandbox) -> None:
    await host.service.sandboxes.reset(CALLER, sandbox.id, deadline_s=DEADLINE_S)


async def thinks(host: RealHost, sandbox: Sandbox, thought: str) -> bool:
    """Whether memory, file and process of a sandbox are those of a thought."""
    found = await value(host, sandbox.id, "found()")
    return bool(found == [thought, True, thought, thought, False, False])


@pytest.mark.soak(only=True)
async def test_a_sibling_goes_back_again_and_again_though_its_source_has_ended(
    real_host: RealHost, soak: Soak
) -> None:
    resets = soak.count(8, 100)
    source = await thinker(real_host, "step")
    (sibling,) = await branched(real_host, source.id)
    await forget(real_host, source)
    await real_host.service.sandboxes.delete(CALLER, source.id)
    seen = {(await value(real_host, sibling.id, WHO))[0]}

    for _ in range(resets):
        await forget(real_host, sibling)
        await back(real_host, sibling)

        assert await thinks(real_host, sibling, "step")
        boot_id, name = await value(real_host, sibling.id, WHO)
        assert name == sibling.hostname
        seen.add(boot_id)
    assert len(seen) == 1 + resets
    assert await real_host.service.sandboxes.get(CALLER, sibling.id) == sibling


@pytest.mark.soak(only=True)
async def test_siblings_on_each_level_go_back_to_where_each_was_branched(
    real_host: RealHost,
) -> None:
    source = await thinker(real_host, "first")
    (child,) = await branched(real_host, source.id)
    await value(real_host, child.id, THINK.format(thought="second"))
    leaf, twin = await branched(real_host, child.id, 2)
    for each in (child, leaf):
        await forget(real_host, each)

    for each in (leaf, child):
        await back(real_host, each)
    assert await thinks(real_host, leaf, "second")
    assert await thinks(real_host, child, "first")
    await value(real_host, child.id, THINK.format(thought="third"))
    (late,) = await branched(real_host, child.id)
    await real_host.service.sandboxes.delete(CALLER, child.id)
    for each, thought in ((late, "third"), (leaf, "second")):
        await forget(real_host, each)
        await back(real_host, each)
        assert await thinks(real_host, each, thought)
    assert await thinks(real_host, twin, "second")
    assert await thinks(real_host, source, "first")


async def test_who_was_promoted_goes_back_to_its_branch_under_its_parents_name(
    real_host: RealHost,
) -> None:
    parent = await thinker(real_host, "before", network=HOST)
    winner, _ = await branched(real_host, parent.id, 2)
    await forget(real_host, winner)
    promoted = (await real_host.service.promotions.promote(CALLER, winner.id)).sandbox

    await back(real_host, promoted)

    assert await thinks(real_host, promoted, "before")
    assert (await value(real_host, promoted.id, WHO))[1] == parent.hostname
    code = "subprocess.run(['hostname', '-I'], capture_output=True, text=True).stdout.split()"
    addresses = await value(real_host, promoted.id, code)
    assert addresses == [parent.address, parent.address_v6]


@pytest.mark.soak(only=True)
async def test_a_sibling_goes_back_under_the_next_daemon(real_host: RealHost) -> None:
    source = await thinker(real_host, "kept")
    (sibling,) = await branched(real_host, source.id)
    await forget(real_host, sibling)

    await real_host.restart()
    await back(real_host, sibling)

    assert await thinks(real_host, sibling, "kept")


async def test_a_sibling_whose_seed_was_killed_says_so_and_is_unharmed(
    real_host: RealHost,
) -> None:
    source = await thinker(real_host, "held")
    (sibling,) = await branched(real_host, source.id)
    assert sibling.pid is not None
    (seed,) = seeds.retired_for([sibling.pid])
    os.kill(seed, signal.SIGKILL)
    await until(lambda: seed not in proc.processes())
    await value(real_host, sibling.id, "thought = 'after'; None")

    with pytest.raises(Conflict, match="which has its fork point, has ended"):
        await back(real_host, sibling)

    assert await value(real_host, sibling.id, "[thought, asked('there')]") == ["after", "there"]
    assert await real_host.service.sandboxes.get(CALLER, sibling.id) == sibling


async def test_who_waits_for_a_page_of_the_hosts_is_woken_at_a_reset_as_at_the_branch(
    real_host: RealHost,
) -> None:
    source = await thinker(real_host, "waits")
    before = int(await value(real_host, source.id, WOKEN))
    (sibling,) = await branched(real_host, source.id)
    assert int(await value(real_host, sibling.id, WOKEN)) == before + 1

    await back(real_host, sibling)

    assert int(await value(real_host, sibling.id, WOKEN)) == before + 1
