"""Results of steps of builds are written once, found by their keys, and keep what an image says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from forkd import limits
from forkd.errors import Conflict, Forbidden, InvalidRequest, NotFound
from forkd.model.caller import ALL_SCOPES, Caller, Scope, Tenant
from forkd.model.ids import Tag, parse_tag
from forkd.model.image import ImageConfig
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import BuildLinkRequest, LinkRequest, SnapshotStatus
from forkd.store import manifest
from tests.support.callers import CALLER
from tests.support.service_host import TAG, FakeHost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.ids import SandboxId
    from forkd.model.snapshot import Snapshot
    from forkd.service.host import Host

KEY, OTHER_KEY = "a" * 64, "b" * 64
NAMED = parse_tag("app")
CONFIG = ImageConfig(
    env={"A": "1"},
    cwd="/srv",
    user="app",
    entrypoint=("run",),
    labels={"a": "b"},
    healthcheck={"test": ("CMD", "check"), "retries": "3"},
)
MEMBER = Caller("token:member", Tenant("team"), ALL_SCOPES - {Scope.ADMIN}, "test")


@pytest.fixture
async def host(fake_host: FakeHost) -> AsyncIterator[Host]:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        yield host


@contextlib.asynccontextmanager
async def fork(host: Host, tag: Tag = TAG) -> AsyncIterator[SandboxId]:
    (made,) = (await host.sandboxes.fork(CALLER, tag, 1, ForkOptions())).sandboxes
    try:
        yield made.id
    finally:
        await host.sandboxes.delete(CALLER, made.id)


async def find(host: Host, key: str, tag: Tag | None = None) -> Snapshot:
    return await host.build_links.link(CALLER, BuildLinkRequest(key, CONFIG, tag=tag))


async def write(host: Host, key: str, on: Tag = TAG, tag: Tag | None = None) -> Snapshot:
    async with fork(host, on) as sandbox:
        request = BuildLinkRequest(key, CONFIG, sandbox, tag)
        return await host.build_links.link(CALLER, request)


async def test_a_result_is_written_once_and_found_by_its_key(host: Host) -> None:
    with pytest.raises(NotFound, match=KEY):
        await find(host, KEY)
    made = await write(host, KEY)
    assert (made.status, made.parent, made.cached) == (SnapshotStatus.READY, TAG, True)
    assert (made.build_key, made.config) == (KEY, CONFIG)
    assert await find(host, KEY) == made
    assert (await write(host, KEY)).created_at == made.created_at
    with pytest.raises(NotFound):
        await find(host, OTHER_KEY)


async def test_a_result_can_be_named_and_stands_on_others(host: Host) -> None:
    first = await write(host, KEY)
    named = await write(host, OTHER_KEY, on=first.tag, tag=NAMED)
    assert (named.tag, named.parent, named.cached) == (NAMED, first.tag, False)
    assert (await find(host, OTHER_KEY, NAMED)).tag == NAMED
    with pytest.raises(NotFound):
        await find(host, KEY, NAMED)
    with pytest.raises(Conflict, match="snapshot app exists"):
        await write(host, KEY, tag=NAMED)


async def test_what_an_image_says_stays_with_its_links_and_over_a_restart(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        made = await write(host, KEY, tag=NAMED)
        request = LinkRequest(parse_tag("above"), NAMED, command="echo")
        async for _ in host.chains.extend(CALLER, request):
            pass
        flat = await host.chains.compact(CALLER, NAMED, parse_tag("flat"))
    async with fake_host.service() as host:
        found = await host.snapshots.get(CALLER, NAMED)
        above = await host.snapshots.get(CALLER, parse_tag("above"))
        assert (found.config, found.build_key) == (CONFIG, KEY)
        assert (above.config, above.build_key) == (CONFIG, None)
        assert flat.config == CONFIG
        assert manifest.load(made.directory).version == 3
        assert (await host.snapshots.get(CALLER, TAG)).config is not None


async def test_the_key_of_another_tenant_names_another_result(host: Host) -> None:
    await write(host, KEY)
    await host.snapshots.share(CALLER, TAG, shared=True)
    with pytest.raises(NotFound):
        await host.build_links.link(MEMBER, BuildLinkRequest(KEY, CONFIG))
    (theirs,) = (await host.sandboxes.fork(MEMBER, TAG, 1, ForkOptions())).sandboxes
    made = await host.build_links.link(MEMBER, BuildLinkRequest(KEY, CONFIG, theirs.id))
    assert made.tag != (await find(host, KEY)).tag
    await host.sandboxes.delete(MEMBER, theirs.id)


async def test_a_sandbox_of_another_tenant_is_not_written_down(host: Host) -> None:
    async with fork(host) as sandbox:
        with pytest.raises(NotFound):
            await host.build_links.link(MEMBER, BuildLinkRequest(KEY, CONFIG, sandbox))
    reader = Caller("token:reader", MEMBER.tenant, frozenset({Scope.SNAPSHOTS}), "test")
    with pytest.raises(Forbidden):
        await host.build_links.link(reader, BuildLinkRequest(KEY, CONFIG))


async def test_the_configuration_and_the_key_have_limits(host: Host) -> None:
    with pytest.raises(InvalidRequest, match="64 hex digits"):
        BuildLinkRequest("A" * 64, CONFIG)
    with pytest.raises(InvalidRequest, match=f"at most {limits.IMAGE_CONFIG_BYTES_MAX} are kept"):
        BuildLinkRequest(KEY, ImageConfig(labels={"a": "b" * limits.IMAGE_CONFIG_BYTES_MAX}))
    large = ImageConfig(env={"A": "b" * limits.SANDBOX_ENV_BYTES_MAX})
    async with fork(host) as sandbox:
        with pytest.raises(InvalidRequest, match="env"):
            await host.build_links.link(CALLER, BuildLinkRequest(KEY, large, sandbox))


async def test_results_under_a_named_snapshot_take_nothing_of_the_cache(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as host:
        await fake_host.bake(host, fake_host.recipe())
        first = await write(host, KEY)
        await write(host, OTHER_KEY, on=first.tag, tag=NAMED)
        lone = await write(host, "c" * 64)
        cache = host.image_cache
        assert await cache._taken_bytes() == lone.stored_bytes  # noqa: SLF001 - what counts
