"""Images and snapshots of images are made once, counted, and removed for want of room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import (
    BuildError,
    Conflict,
    HostError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
)
from forkd.host import files
from forkd.images import builder, inventory, kernel
from forkd.images.kernel import Kernel
from forkd.images.layout import Cache
from forkd.limits import RUN_LINES_MAX
from forkd.model.caller import ALL_SCOPES, Caller, Scope, Tenant
from forkd.model.ids import parse_tag
from forkd.model.image import ImageSnapshotRequest
from forkd.model.progress import Progress
from forkd.model.recipe import RecipeChanges, parse_image_source
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import LinkRequest, Snapshot, SnapshotRequest
from forkd.model.tenant import Amounts, Quotas
from tests.support import registry as registries
from tests.support.callers import CALLER
from tests.support.oci import regular, write_layout
from tests.support.service_host import TAG, FakeHost

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.registry import Registry

MACHINE = RecipeChanges(memory_mib=256)

SMALL = RecipeChanges(disk_mib=32, memory_mib=128)
"""For images of a registry, whose file systems are made."""

TEAM = Tenant("team")
MEMBER = Caller("token:member", TEAM, frozenset({Scope.SNAPSHOTS, Scope.READ}), "test")
OTHER = Caller("token:other", Tenant("other"), frozenset({Scope.SNAPSHOTS, Scope.READ}), "test")


@dataclass(frozen=True, slots=True)
class World:
    """A service over the fake VMM, and a registry that has images."""

    fake: FakeHost
    host: Host
    registry: Registry
    folder: Path

    def push(self, text: bytes, name: str = "team/app:1") -> str:
        layout = write_layout(self.folder / text.decode(), [[regular("hello", text)]])
        return self.registry.push(layout, name)

    def image(self, name: str) -> str:
        """Put an image among the recipes of the host, which needs no tools; return its name."""
        rootfs = self.fake.recipe(name=name) / "rootfs.ext4"
        rootfs.write_bytes(rootfs.read_bytes()[:-64] + name.encode().ljust(64))
        return name

    async def ask(
        self,
        reference: str,
        changes: RecipeChanges = MACHINE,
        *,
        pull: bool = False,
        caller: Caller = CALLER,
    ) -> tuple[Snapshot, list[str]]:
        """Return the snapshot of an image, and the stages of its making."""
        request = ImageSnapshotRequest(parse_image_source(reference), changes, pull)
        events = self.host.image_snapshots.for_image(caller, request)
        async with contextlib.aclosing(events):
            every = [event async for event in events]
        stages = [each.stage for each in every if isinstance(each, Progress)]
        (made,) = [each for each in every if isinstance(each, Snapshot)]
        return made, list(dict.fromkeys(stages))

    async def tags(self) -> list[str]:
        return [each.tag for each in await self.host.snapshots.list(CALLER)]

    async def keys(self, caller: Caller = CALLER) -> list[str]:
        return [each.key for each in await self.host.image_cache.list(caller)]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(autouse=True)
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this be Debian's kernel, which needs no network."""
    path = tmp_path / "vmlinuz"
    path.write_bytes(
        bytes(0x202) + b"HdrS" + struct.pack("<H", 0x20F) + bytes(0x2E) + b"\x03" + bytes(4096)
    )
    given = Kernel("6.1-test", path, None)
    monkeypatch.setattr(kernel, "debian_kernel", lambda *_: given)
    monkeypatch.setattr(kernel, "newest_cached", lambda *_: given)


@pytest.fixture
async def world(fake_host: FakeHost, registry: Registry, tmp_path: Path) -> AsyncIterator[World]:
    async with fake_host.service() as host:
        yield World(fake_host, host, registry, tmp_path)


needs_registry = pytest.mark.needs("docker-registry")
pytestmark = [needs_registry, pytest.mark.timeout(120)]


async def test_a_snapshot_of_an_image_is_made_once_and_found_again(world: World) -> None:
    reference = world.push(b"one")

    made, stages = await world.ask(reference, SMALL)
    again, none = await world.ask(reference, SMALL)

    assert made.cached
    assert (made.memory_bytes >> 20, made.disk_bytes >> 20, made.runtime) == (128, 32, "python")
    assert {"resolve", "packages", "boot", "save"} <= set(stages)
    assert (again, none) == (made, [])
    assert [each.cached for each in await world.host.snapshots.list(CALLER)] == [True]
    (image,) = await world.host.image_cache.list(CALLER)
    assert image.reference == f"{world.registry.host}/team/app"
    assert (image.digest or "").startswith("sha256:")
    assert image.snapshots == (made.tag,)


async def test_requests_at_the_same_time_make_it_once(world: World) -> None:
    reference = world.image("one")

    answers = await asyncio.gather(*(world.ask(reference) for _ in range(5)))

    assert len({made.tag for made, _ in answers}) == 1
    assert sum("boot" in stages for _, stages in answers) == 1
    assert len(await world.tags()) == 1


async def test_waiting_requests_are_told_of_one_failure_and_the_next_one_tries_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, tries = world.image("one"), []
    build = builder.build_recipe

    def failing(*args: object) -> object:
        tries.append(args)
        raise BuildError("the disk is on fire")

    monkeypatch.setattr(builder, "build_recipe", failing)
    answers = await asyncio.gather(
        *(world.ask(reference) for _ in range(3)), return_exceptions=True
    )
    assert {str(each) for each in answers} == {"the disk is on fire"}
    assert await world.tags() == []

    monkeypatch.setattr(builder, "build_recipe", build)
    made, _ = await world.ask(reference)
    assert await world.tags() == [made.tag]


async def test_who_waits_goes_on_when_the_first_leaves(world: World) -> None:
    reference = world.image("one")
    request = ImageSnapshotRequest(parse_image_source(reference), MACHINE)
    first = world.host.image_snapshots.for_image(CALLER, request)
    async for event in first:
        if isinstance(event, Progress) and event.stage == "boot":
            break
    second = asyncio.create_task(world.ask(reference))
    await asyncio.sleep(0)

    await first.aclose()

    made, _ = await second
    assert await world.tags() == [made.tag]


async def test_a_tag_means_what_it_meant_unless_the_registry_is_to_be_asked(world: World) -> None:
    reference = world.push(b"one")
    one, _ = await world.ask(reference, SMALL)
    world.push(b"two")

    assert (await world.ask(reference, SMALL))[0].tag == one.tag
    two, stages = await world.ask(reference, SMALL, pull=True)

    assert two.tag != one.tag
    assert "resolve" in stages
    assert (await world.ask(reference, SMALL))[0].tag == two.tag


async def test_other_machines_and_other_tenants_have_snapshots_of_their_own(world: World) -> None:
    reference = world.image("one")
    one, _ = await world.ask(reference)

    large, stages = await world.ask(reference, replace(MACHINE, memory_mib=512))
    theirs, _ = await world.ask(reference, caller=MEMBER)

    assert len({one.tag, large.tag, theirs.tag}) == 3
    assert "boot" in stages
    assert theirs.owner.tenant == TEAM
    assert len(await world.keys()) == 1


async def test_another_agent_makes_another_snapshot(world: World) -> None:
    reference = world.image("one")
    one, _ = await world.ask(reference)
    agent = world.fake.settings.agent
    agent.write_bytes(agent.read_bytes() + b"new")
    os.utime(agent, (1, 1))

    two, _ = await world.ask(reference)

    assert two.tag != one.tag


async def test_what_is_no_image_is_one_error_and_leaves_nothing(world: World) -> None:
    with pytest.raises(NotFound, match="has no such repository or tag"):
        await world.ask(f"{world.registry.host}/team/none:1")

    assert await world.tags() == []
    assert await world.keys() == []
    assert world.fake.left_over() == []


async def test_a_recipe_of_the_host_goes_before_an_image_of_its_name(world: World) -> None:
    world.fake.recipe(name="fake")

    made, _ = await world.ask("fake", RecipeChanges(memory_mib=256))

    assert (made.recipe, made.memory_bytes >> 20) == ("fake", 256)
    assert (await world.ask("fake", RecipeChanges(memory_mib=256)))[1] == []
    world.fake.recipe(name="fake", code="answer = 43")
    assert (await world.ask("fake", RecipeChanges(memory_mib=256)))[0].tag != made.tag


async def test_the_names_of_such_snapshots_are_kept_for_them(world: World) -> None:
    tag = parse_tag("image-0123456789ab")
    with pytest.raises(InvalidRequest, match="is kept for snapshots that forkd makes of images"):
        await world.fake.bake(world.host, world.fake.recipe(), tag)
    await world.fake.bake(world.host, world.fake.recipe())
    request = LinkRequest(tag, TAG, "true")
    with pytest.raises(InvalidRequest, match="is kept for"):
        await anext(world.host.chains.extend(CALLER, request))

    await world.fake.bake(world.host, world.fake.recipe(name="other"), "image-0123456789abc")


async def test_a_named_snapshot_of_an_image_runs_its_lines(world: World) -> None:
    changes = replace(SMALL, run=("echo hello",) * RUN_LINES_MAX, ready="true", vcpus=2)
    request = SnapshotRequest(TAG, parse_image_source(world.push(b"one")), changes)

    events = [each async for each in world.host.snapshots.bake(CALLER, request)]

    made = events[-1]
    assert isinstance(made, Snapshot)
    assert (made.tag, made.vcpus, made.cached) == (TAG, 2, False)
    said = [each.message for each in events if isinstance(each, Progress) and each.stage == "run"]
    assert said.count("echo hello") == RUN_LINES_MAX


# What goes


def age(world: World, made: Snapshot, seconds: int) -> None:
    """Have a snapshot and its image be last used so many seconds after the beginning of time."""
    folder = world.fake.settings.state_dir / "snapshots" / made.tag
    if (folder / "cached").exists():
        os.utime(folder / "cached", (seconds, seconds))
    image = world.fake.settings.cache_dir / "images" / made.image_key
    os.utime(image, (seconds, seconds))


async def test_an_image_is_removed_unless_a_snapshot_needs_it(world: World) -> None:
    made, _ = await world.ask(world.image("one"))
    (key,) = await world.keys()

    with pytest.raises(Conflict, match=f"image {key} is needed by {made.tag}"):
        await world.host.image_cache.remove(CALLER, key)
    await world.host.snapshots.delete(CALLER, made.tag)
    age(world, made, 1)
    await world.host.image_cache.remove(CALLER, key)

    assert await world.keys() == []
    with pytest.raises(NotFound, match=f"no image '{key}'"):
        await world.host.image_cache.remove(CALLER, key)


async def test_another_tenants_image_does_not_exist(world: World) -> None:
    made, _ = await world.ask(world.image("one"), caller=MEMBER)

    assert await world.keys(OTHER) == []
    assert await world.keys(MEMBER) == [made.image_key]
    with pytest.raises(NotFound):
        await world.host.image_cache.remove(OTHER, made.image_key)
    assert made.image_key in await world.keys(replace(OTHER, scopes=ALL_SCOPES))


async def test_beyond_the_budget_what_was_used_longest_ago_goes(
    fake_host: FakeHost, registry: Registry, tmp_path: Path
) -> None:
    small = FakeHost(fake_host.folder, replace(fake_host.settings, image_cache_mib=0))
    async with fake_host.service() as host:
        world = World(fake_host, host, registry, tmp_path)
        named = SnapshotRequest(TAG, parse_image_source(world.image("named")))
        *_, kept = [each async for each in host.snapshots.bake(CALLER, named)]
        idle, _ = await world.ask(world.image("idle"))
        used, _ = await world.ask(world.image("used"))
        below, _ = await world.ask(world.image("below"))
        await host.sandboxes.fork(CALLER, used.tag, 1, ForkOptions(network=None))
        assert isinstance(kept, Snapshot)
        for number, each in enumerate((kept, used, below, idle)):
            age(world, each, 10 + number)
        source = (await host.sandboxes.fork(CALLER, below.tag, 1, ForkOptions())).sandboxes[0]
        link = LinkRequest(parse_tag("link"), source.id)
        assert [each async for each in host.chains.extend(CALLER, link)]
        await host.sandboxes.delete(CALLER, source.id)
        assert not await host.image_cache.trim()  # there is room

    async with small.service() as host:
        world = World(small, host, registry, tmp_path)
        await host.image_cache.trim()

        assert await world.tags() == sorted([TAG, used.tag, below.tag, "link"])
        keys = {kept.image_key, used.image_key, below.image_key}
        assert set(await world.keys()) == keys
        await host.sandboxes.delete_all([each.id for each in await host.sandboxes.list(CALLER)])
        await host.image_cache.trim()

        assert await world.tags() == sorted([TAG, below.tag, "link"])
        assert used.image_key not in await world.keys()


async def test_what_was_just_used_stays_whatever_the_budget(
    fake_host: FakeHost, registry: Registry, tmp_path: Path
) -> None:
    small = FakeHost(fake_host.folder, replace(fake_host.settings, image_cache_mib=0))
    async with small.service() as host:
        world = World(small, host, registry, tmp_path)
        made, _ = await world.ask(world.image("one"))

        assert not await host.image_cache.trim()
        assert await world.tags() == [made.tag]


async def test_a_snapshot_that_is_asked_for_again_is_used_now(world: World) -> None:
    made, _ = await world.ask(world.image("one"))
    age(world, made, 10)

    assert await world.ask("one") == (made, [])

    used_at_s = (made.directory / "cached").stat().st_mtime
    assert used_at_s > time.time() - 600


# What counts


async def test_an_image_counts_for_who_has_built_it_also_after_a_restart(
    fake_host: FakeHost, registry: Registry, tmp_path: Path
) -> None:
    async with fake_host.service() as host:
        world = World(fake_host, host, registry, tmp_path)
        made, _ = await world.ask(world.image("one"), caller=MEMBER)
        await world.ask("one")  # another tenant's snapshot of it
        before = host.tenants.ledger.used(TEAM)

    image = inventory.image_of(Cache.open(fake_host.settings.cache_dir), made.image_key)
    assert image is not None
    assert image.tenant == TEAM
    assert before.snapshot_mib == mib(image.stored_bytes) + mib(made.stored_bytes)
    async with fake_host.service() as host:
        assert host.tenants.ledger.used(TEAM) == before
        await host.snapshots.delete(CALLER, made.tag)
        assert host.tenants.ledger.used(TEAM).snapshot_mib == mib(image.stored_bytes)


def mib(size_bytes: int) -> int:
    return -(-size_bytes // (1 << 20))


async def test_a_tenants_own_unused_snapshots_make_room_for_its_next(world: World) -> None:
    first, _ = await world.ask(world.image("one"), caller=MEMBER)
    ledger = world.host.tenants.ledger
    age(world, first, 10)
    most_mib = 256 + 1  # what the next may take while it is written
    ledger.quotas[TEAM] = Quotas(snapshot_mib=most_mib + 2)

    second, _ = await world.ask(world.image("two"), caller=MEMBER)

    assert await world.tags() == [second.tag]


async def test_an_image_beyond_the_quota_is_refused_and_removed(world: World) -> None:
    ledger = world.host.tenants.ledger
    ledger.quotas[TEAM] = Quotas(snapshot_mib=0)

    with pytest.raises(QuotaExceeded, match="snapshot_mib up to 0"):
        await world.ask(world.image("one"), caller=MEMBER)

    assert await world.keys() == []
    assert ledger.used(TEAM).snapshot_mib == 0


async def test_a_tenants_unneeded_image_makes_room_for_what_it_uploads_or_builds(
    world: World,
) -> None:
    first, _ = await world.ask(world.image("one"), caller=MEMBER)
    await world.host.snapshots.delete(CALLER, first.tag)
    ledger = world.host.tenants.ledger
    used_mib = ledger.used(TEAM).snapshot_mib
    ledger.quotas[TEAM] = Quotas(snapshot_mib=used_mib)
    with pytest.raises(QuotaExceeded):
        ledger.check(TEAM, Amounts(snapshot_mib=1))  # it was used just now
    age(world, first, 10)

    ledger.check(TEAM, Amounts(snapshot_mib=1))

    assert ledger.used(TEAM).snapshot_mib == used_mib - 1
    assert await world.keys() == []


def test_an_image_of_a_lower_layer_is_removed_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overlay does not rename folders of its lower layers, and says EXDEV."""
    cache = Cache.open(tmp_path)
    image = cache.images / ("0" * 32)
    image.mkdir()
    (image / "rootfs.ext4").touch()

    def rename(old: Path, _: Path) -> None:
        raise HostError(f"rename {old}: Invalid cross-device link")

    monkeypatch.setattr(files, "rename", rename)

    assert inventory.remove_image(cache, image.name, unused_since_s=time.time() + 1)
    assert list(cache.images.iterdir()) == []
    assert not inventory.remove_image(cache, image.name, unused_since_s=time.time() + 1)


def test_what_tags_meant_is_remembered_for_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "REFERENCES_MAX", 2)
    cache = Cache.open(tmp_path)
    for number, name in enumerate(("a", "b", "c")):
        inventory.remember(cache, name, f"sha256:{number}")
        for each in (tmp_path / "references").iterdir():
            if f'"{name}"' in each.read_text():
                os.utime(each, (number, number))

    known = [inventory.digest_of(cache, name) for name in ("a", "b", "c", "d")]
    assert known == [None, "sha256:1", "sha256:2", None]
