"""Chains of snapshots for tests: how to make links and look into sandboxes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from forkd.model.ids import SandboxId, Tag, parse_tag
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import Snapshot
    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

ONE = ForkOptions()
NOW = ForkOptions(wait=False)
A, B, C = (parse_tag(name) for name in "abc")


@contextlib.asynccontextmanager
async def forked(service: Host, tag: Tag = TAG) -> AsyncIterator[Sandbox]:
    (sandbox,) = (await service.sandboxes.fork(CALLER, tag, 1, ONE)).sandboxes
    yield sandbox
    await service.sandboxes.delete(CALLER, sandbox.id)


async def write(service: Host, sandbox: SandboxId, path: str, text: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield text.encode()

    await service.guests.write_file(CALLER, sandbox, path, pieces())


async def read(service: Host, sandbox: SandboxId, path: str) -> str:
    async with await service.guests.read_file(CALLER, sandbox, path) as reader:
        return b"".join([piece async for piece in reader]).decode()


async def value(service: Host, sandbox: SandboxId, code: str) -> object:
    result = await service.guests.eval(CALLER, sandbox, code)
    assert result.error is None, result.error
    return result.value


async def add_link(service: Host, tag: Tag, parent: Tag = TAG) -> Snapshot:
    """Make a link whose memory and disk have what is named after it."""
    async with forked(service, parent) as sandbox:
        await value(service, sandbox.id, f"globals().update({tag}=1)")
        await write(service, sandbox.id, f"/{tag}", tag)
        return await service.branches.snapshot(CALLER, sandbox.id, tag, wait=True)


async def chain(fake_host: FakeHost, service: Host) -> None:
    """Make base, a, b and c, each over the one before."""
    await fake_host.bake(service, fake_host.recipe())
    for tag, parent in ((A, TAG), (B, A), (C, B)):
        await add_link(service, tag, parent)


def freed(fake_host: FakeHost) -> bool:
    """Whether nothing is left of seeds and writes."""
    return fake_host.left_over() == [] and fake_host.vmm_processes() == []


def let_go(fake_host: FakeHost) -> None:
    """Let machines with `link=wait` write what they were asked to."""
    (fake_host.settings.state_dir / "go").touch()
