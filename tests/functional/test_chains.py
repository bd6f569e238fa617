"""Real machines are written down while they run, stacked, compacted, and come back whole."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.errors import ChainError
from forkd.model.ids import Tag, parse_tag
from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotStatus
from tests.support.callers import CALLER
from tests.support.memory import image_bytes, private_bytes
from tests.support.real_host import REAL, TAG, real_host, value
from tests.support.soak import only_in_soak

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ONE = ForkOptions()
MIB = 1 << 20
DEPTH = 8

ZYGOTE_BYTES = 8 * MIB
"""What a zygote may have for itself: its own few MiB, and the ends of huge pages."""

EXTEND = """
import hashlib, os
{tag} = bytearray(os.urandom(1 << 20))
open('/root/{tag}', 'wb').write({tag})
hashlib.sha256({tag}).hexdigest()
"""

CHECK = """
import hashlib
[hashlib.sha256({tag}).hexdigest(), hashlib.sha256(open('/root/{tag}', 'rb').read()).hexdigest()]
"""


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(real_host: RealHost) -> AsyncIterator[None]:
    yield
    service = real_host.service
    for each in await service.sandboxes.list(CALLER):
        await service.sandboxes.delete(CALLER, each.id)
    for snapshot in await service.snapshots.list(CALLER):
        if snapshot.depth == 1 or snapshot.tag == "flat":
            await service.snapshots.delete(CALLER, snapshot.tag, cascade=True)
    assert [each.tag for each in await service.snapshots.list(CALLER)] == [TAG]


async def forked(host: RealHost, tag: Tag) -> SandboxId:
    return (await host.service.sandboxes.fork(CALLER, tag, 1, ONE)).sandboxes[0].id


async def extended(host: RealHost, tag: Tag, parent: Tag) -> str:
    """Write a link with a MiB of memory and of disk that no other has; return its digest."""
    sandbox = await forked(host, parent)
    digest = await value(host, sandbox, EXTEND.format(tag=tag))
    await host.service.branches.snapshot(CALLER, sandbox, tag, wait=True)
    await host.service.sandboxes.delete(CALLER, sandbox)
    return str(digest)


async def check(host: RealHost, tag: Tag, digests: dict[Tag, str]) -> None:
    """Check that a fork of `tag` has, in memory and on its disk, what its ancestors wrote."""
    sandbox = await forked(host, tag)
    for link, digest in digests.items():
        assert await value(host, sandbox, CHECK.format(tag=link)) == [digest, digest]
    await host.service.sandboxes.delete(CALLER, sandbox)


async def chain(host: RealHost, depth: int) -> dict[Tag, str]:
    digests: dict[Tag, str] = {}
    parent = TAG
    for number in range(1, depth + 1):
        tag = parse_tag(f"link{number}")
        digests[tag] = await extended(host, tag, parent)
        parent = tag
    return digests


async def test_a_snapshot_has_what_its_source_had_at_that_instant_and_the_source_goes_on(
    real_host: RealHost,
) -> None:
    service, taken = real_host.service, parse_tag("taken")
    source = await forked(real_host, TAG)
    await value(real_host, source, "thought = 7; open('/root/note', 'w').write('seven')")

    made = await service.branches.snapshot(CALLER, source, taken, wait=True)
    await value(real_host, source, "thought = 8; open('/root/note', 'w').write('eight')")

    assert (made.status, made.parent, made.source) == (SnapshotStatus.READY, TAG, source)
    assert made.stored_bytes < real_host.snapshot.stored_bytes / 3
    assert made.pause_ms is not None
    assert made.pause_ms > 0
    sibling = await forked(real_host, taken)
    both = "(thought, open('/root/note').read())"
    assert await value(real_host, sibling, both) == [7, "seven"]
    assert await value(real_host, source, both) == [8, "eight"]


async def test_a_fork_waits_for_a_snapshot_that_is_being_written(real_host: RealHost) -> None:
    taken = parse_tag("taken")
    source = await forked(real_host, TAG)
    await value(real_host, source, "mark = 5")

    made = await real_host.service.branches.snapshot(CALLER, source, taken, wait=False)
    await real_host.service.sandboxes.delete(CALLER, source)

    assert made.status is SnapshotStatus.WRITING
    assert await value(real_host, await forked(real_host, taken), "mark") == 5


@pytest.mark.soak(only=True)
async def test_a_chain_comes_back_whole_after_a_restart_and_when_it_was_compacted(
    real_host: RealHost,
) -> None:
    digests = await chain(real_host, 3)
    head, middle = parse_tag("link3"), parse_tag("link2")
    stored = [(await real_host.service.snapshots.get(CALLER, tag)).stored_bytes for tag in digests]
    assert max(stored) < real_host.snapshot.stored_bytes / 3

    await real_host.restart()
    await check(real_host, head, digests)

    flat = await real_host.service.chains.compact(CALLER, head, parse_tag("flat"))
    assert (flat.depth, flat.parent) == (0, None)
    await check(real_host, flat.tag, digests)

    made = await real_host.service.chains.compact(CALLER, middle)
    assert (made.depth, (await real_host.service.snapshots.get(CALLER, head)).depth) == (0, 1)
    await real_host.service.snapshots.delete(CALLER, parse_tag("link1"))
    await check(real_host, head, digests)
    await real_host.service.snapshots.delete(CALLER, middle, cascade=True)


@pytest.mark.soak(only=True)
async def test_ten_siblings_of_the_head_of_a_deep_chain_answer(real_host: RealHost) -> None:
    digests = await chain(real_host, DEPTH)
    head = parse_tag(f"link{DEPTH}")
    assert (await real_host.service.snapshots.get(CALLER, head)).depth == DEPTH
    await check(real_host, head, digests)

    result = await real_host.service.sandboxes.fork(CALLER, head, 10, ONE)

    assert result.failures == ()
    first = f"hashlib.sha256({parse_tag('link1')}).hexdigest()"
    answers = [value(real_host, each.id, first) for each in result.sandboxes]
    assert set(await asyncio.gather(*answers)) == {digests[parse_tag("link1")]}


@pytest.mark.soak(only=True)
async def test_the_base_of_a_chain_is_in_memory_once(real_host: RealHost) -> None:
    await real_host.warm()
    base = image_bytes(real_host.vmm_processes())
    await chain(real_host, DEPTH)
    head = parse_tag(f"link{DEPTH}")
    await real_host.service.sandboxes.delete(CALLER, await forked(real_host, head))
    links = [each for each in await real_host.service.snapshots.list(CALLER) if each.depth]

    assert len(real_host.vmm_processes()) == DEPTH + 1
    images = image_bytes(real_host.vmm_processes())
    assert base.items() <= images.items()
    assert max(base.values()) > real_host.snapshot.stored_bytes / 2
    private = private_bytes(real_host.vmm_processes())
    beside = sum(images.values()) - sum(base.values()) + private
    stored_bytes = sum(each.stored_bytes for each in links)
    assert beside < stored_bytes + DEPTH * ZYGOTE_BYTES


async def test_a_command_makes_a_link(real_host: RealHost) -> None:
    request = LinkRequest(parse_tag("tool"), TAG, "echo made > /root/made && echo done")
    *steps, made = [event async for event in real_host.service.chains.extend(CALLER, request)]

    assert isinstance(made, Snapshot)
    assert "done" in [step.message for step in steps if not isinstance(step, Snapshot)]
    assert await real_host.service.sandboxes.list(CALLER) == ()
    sandbox = await forked(real_host, made.tag)
    assert await value(real_host, sandbox, "open('/root/made').read()") == "made\n"


async def test_a_command_reaches_the_host_through_the_network_that_was_asked_for(
    real_host: RealHost,
) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104 - a link has its own address
        server.settimeout(120)
        port = server.getsockname()[1]

        def serve() -> str:
            peer, (address, _) = server.accept()
            with peer:
                peer.sendall(b"a wheel")
            return str(address)

        fetch = (
            "python3 - <<'END'\nimport fcntl, ipaddress, os, socket, struct\n"
            "(name,) = {*os.listdir('/sys/class/net')} - {'lo'}\n"
            "end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "asked = fcntl.ioctl(end, 0x8915, struct.pack('256s', name.encode()))\n"
            "host = str(ipaddress.ip_address(asked[20:24]) - 1)\n"
            f"with socket.create_connection((host, {port}), 30) as peer:\n"
            "    open('/root/fetched', 'wb').write(peer.recv(100))\nEND"
        )
        request = LinkRequest(parse_tag("fetched"), TAG, fetch, network=HOST)
        serving = asyncio.get_running_loop().run_in_executor(None, serve)
        *_, made = [event async for event in real_host.service.chains.extend(CALLER, request)]
        address = await serving

    assert isinstance(made, Snapshot)
    assert ip_address(address) in real_host.names.network.pool
    sandbox = await forked(real_host, made.tag)
    assert await value(real_host, sandbox, "open('/root/fetched').read()") == "a wheel"


@pytest.mark.parametrize(
    "file",
    [
        "memory",  # the others of a base: tests/functional/test_service_machines.py
        only_in_soak("state"),
        only_in_soak("disk.layer"),
    ],
)
async def test_a_flipped_bit_in_a_link_is_named_before_anything_runs(
    real_host: RealHost, file: str
) -> None:
    await chain(real_host, 2)
    await real_host.restart()
    path = real_host.settings.state_dir / "snapshots" / "link1" / file
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)

    with pytest.raises(ChainError, match="link1") as caught:
        await real_host.service.sandboxes.fork(CALLER, parse_tag("link2"), 1, ONE)

    assert caught.value.context["link"] == "link1"
    assert await real_host.service.sandboxes.list(CALLER) == ()
