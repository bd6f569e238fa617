"""A recipe over a base is baked in a fork of the base's snapshot, and is a link over it."""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd.errors import BuildError, Conflict, InvalidRequest, NotFound, WarmUpError
from forkd.images.builder import Additions
from forkd.images.plan import ImageConfig
from forkd.model.caller import Caller, Scope, Tenant
from forkd.model.ids import parse_tag
from forkd.model.image import ImageSnapshotRequest
from forkd.model.recipe import NamedRecipe, RecipeChanges
from forkd.model.sandbox import ForkOptions
from forkd.model.snapshot import Snapshot
from forkd.service.over_base import put_in
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

APP = parse_tag("app")

OVER = """
name = "{name}"
description = "Over another"
image = {{ base = "{base}" }}
{more}
[warmup]
runtime = "python"
code = "{code}"
"""


def over(  # noqa: PLR0913 - what a recipe says
    host: FakeHost,
    *,
    name: str = "app",
    base: str = "fake",
    more: str = "",
    code: str = "total = answer + 1",
    file: str = "hello",
) -> Path:
    """Write a recipe over a base."""
    folder = host.folder / "recipes" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.toml").write_text(OVER.format(name=name, base=base, more=more, code=code))
    (folder / "greeting").write_text(file)
    return folder


FILES = 'files = [{ source = "greeting", target = "/srv/greeting" }]'


@pytest.fixture
async def host(fake_host: FakeHost) -> AsyncIterator[Host]:
    fake_host.recipe()
    async with fake_host.service() as host:
        yield host


async def tags(host: Host) -> list[str]:
    return [each.tag for each in await host.snapshots.list(CALLER)]


async def test_a_fork_has_what_the_base_has_loaded_and_what_was_added(
    fake_host: FakeHost, host: Host
) -> None:
    made = await fake_host.bake(host, over(fake_host, more=FILES), APP)
    assert (made.recipe, made.runtime, made.depth, made.build_key) == ("app", "python", 1, None)
    base = await host.snapshots.get(CALLER, made.parent or APP)
    assert (base.recipe, base.cached, base.parent) == ("fake", True, None)
    assert made.image_key == base.image_key
    (fork,) = (await host.sandboxes.fork(CALLER, APP, 1, ForkOptions())).sandboxes
    assert (await host.guests.eval(CALLER, fork.id, "answer, total")).value == [42, 43]
    async with await host.guests.read_file(CALLER, fork.id, "/srv/greeting") as file:
        assert b"".join([piece async for piece in file]) == b"hello"
    await host.sandboxes.delete(CALLER, fork.id)
    assert await host.sandboxes.list(CALLER) == ()
    assert fake_host.left_over() == []


async def test_recipes_over_one_base_share_its_snapshot(fake_host: FakeHost, host: Host) -> None:
    one = await fake_host.bake(host, over(fake_host), "one")
    other = await fake_host.bake(host, over(fake_host, name="other", code="other = 1"), "other")
    assert one.parent == other.parent
    assert len(await tags(host)) == 3
    with pytest.raises(Conflict, match="one"):
        await host.snapshots.delete(CALLER, one.parent or APP)


async def test_a_base_that_changed_is_baked_anew(fake_host: FakeHost, host: Host) -> None:
    one = await fake_host.bake(host, over(fake_host), "one")
    fake_host.recipe(code="answer = 7")
    other = await fake_host.bake(host, over(fake_host), "other")
    assert other.parent != one.parent
    (fork,) = (await host.sandboxes.fork(CALLER, other.tag, 1, ForkOptions())).sandboxes
    assert (await host.guests.eval(CALLER, fork.id, "total")).value == 8
    await host.sandboxes.delete(CALLER, fork.id)


async def test_a_snapshot_without_a_name_can_be_over_a_base(
    fake_host: FakeHost, host: Host
) -> None:
    over(fake_host, more=FILES)
    request = ImageSnapshotRequest(NamedRecipe("app"), RecipeChanges())
    found = []
    for _ in range(2):
        *_, made = [each async for each in host.image_snapshots.for_image(CALLER, request)]
        assert isinstance(made, Snapshot)
        found.append(made)
    assert (found[0].cached, found[0].recipe, found[0].depth) == (True, "app", 1)
    assert found[0].tag == found[1].tag
    over(fake_host, more=FILES, file="changed")
    *_, made = [each async for each in host.image_snapshots.for_image(CALLER, request)]
    assert isinstance(made, Snapshot)
    assert made.tag != found[0].tag


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (
            {"base": "nothing"},
            NotFound,
            "the base of app: no recipe 'nothing'; there are: app, fake",
        ),
        ({"base": "app"}, InvalidRequest, "bases go in a circle: app → app"),
        (
            {"more": "[machine]\nmemory_mib = 256\n"},
            InvalidRequest,
            "app says machine.memory_mib = 256, but its base fake has 128",
        ),
        (
            {"more": "[machine]\nvcpus = 2\n"},
            InvalidRequest,
            "app says machine.vcpus = 2, but its base fake has 1",
        ),
        (
            {"more": '[machine]\nkernel = "other"\n'},
            InvalidRequest,
            "app says machine.kernel = 'other', but its base fake has 'kernel'",
        ),
        (
            {"more": 'env = { MODE = "x" }'},
            InvalidRequest,
            "app sets MODE, but the warm runtime of its base fake has started without",
        ),
        (
            {"more": 'pip = { requirements = ["a"] }'},
            InvalidRequest,
            "app adds requirements to fake, which is a finished file system",
        ),
    ],
)
async def test_a_base_that_cannot_be_is_one_error_and_leaves_nothing(
    fake_host: FakeHost,
    host: Host,
    said: dict[str, str],
    kind: type[Exception],
    message: str,
) -> None:
    recipe = over(fake_host, **said)
    with pytest.raises(kind) as error:
        await fake_host.bake(host, recipe, APP)
    assert str(error.value).startswith(message)
    assert await tags(host) == []
    assert fake_host.left_over() == []


async def test_bases_of_bases_are_refused(fake_host: FakeHost, host: Host) -> None:
    over(fake_host, name="middle")
    with pytest.raises(InvalidRequest, match=r"app → middle → fake; name fake as the base of app"):
        await fake_host.bake(host, over(fake_host, base="middle"), APP)
    over(fake_host, name="middle", base="app")
    with pytest.raises(InvalidRequest, match="bases go in a circle: app → middle → app"):
        await fake_host.bake(host, over(fake_host, base="middle"), APP)
    assert await tags(host) == []


async def test_a_warm_up_that_fails_leaves_the_base_alone(fake_host: FakeHost, host: Host) -> None:
    with pytest.raises(WarmUpError, match="as asked"):
        await fake_host.bake(host, over(fake_host, code="raise"), APP)
    (left,) = await host.snapshots.list(CALLER)
    assert (left.recipe, left.cached) == ("fake", True)
    assert await host.sandboxes.list(CALLER) == ()
    await fake_host.bake(host, over(fake_host), APP)


async def test_what_cannot_be_made_in_the_guest_fails_the_bake(
    fake_host: FakeHost, host: Host
) -> None:
    more = FILES.replace("/srv/greeting", "/proc/greeting")
    with pytest.raises(BuildError, match="/proc/greeting could not be made"):
        await fake_host.bake(host, over(fake_host, more=more), APP)
    assert APP not in await tags(host)


async def test_what_changes_its_kind_takes_the_place_of_what_the_base_has(
    fake_host: FakeHost, host: Host, tmp_path: Path
) -> None:
    made = await fake_host.bake(host, fake_host.recipe(), APP)
    (fork,) = (await host.sandboxes.fork(CALLER, made.tag, 1, ForkOptions())).sandboxes
    guest = host.sandboxes.roster.get(CALLER, fork.id).running_guest()
    await host.guests.make_dir(CALLER, fork.id, "/srv/greeting", parents=True)
    for name in ("/srv/greeting/old", "/srv/kept"):
        await host.guests.write_file(CALLER, fork.id, name, pieces(b"of the base"))
    (tmp_path / "greeting").write_text("of the recipe")
    with tarfile.open(tmp_path / "added.tar", "w") as archive:
        archive.add(tmp_path / "greeting", "srv/greeting")
    settings = ImageConfig(env={}, cwd="/", user="root", post_fork_command=())

    added = Additions("key", tmp_path / "added.tar", ("srv/greeting",), settings)
    await put_in(guest, added)

    for name, contents in (("greeting", b"of the recipe"), ("kept", b"of the base")):
        async with await host.guests.read_file(CALLER, fork.id, f"/srv/{name}") as file:
            assert b"".join([piece async for piece in file]) == contents
    with pytest.raises(NotFound):
        await host.guests.read_file(CALLER, fork.id, "/srv/greeting/old")
    await host.sandboxes.delete(CALLER, fork.id)


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_caller_who_may_bake_needs_no_right_to_fork(
    fake_host: FakeHost, host: Host
) -> None:
    baker = Caller("token:b", Tenant("team"), frozenset({Scope.SNAPSHOTS, Scope.READ}), "test")
    made = await fake_host.bake(host, over(fake_host), APP, caller=baker)
    assert made.owner.tenant == "team"


async def test_the_machine_of_a_recipe_over_a_base_cannot_be_changed(
    fake_host: FakeHost, host: Host
) -> None:
    over(fake_host)
    request = ImageSnapshotRequest(NamedRecipe("app"), RecipeChanges(memory_mib=256))
    with pytest.raises(InvalidRequest, match="memory_mib = 256, but its base fake has 128"):
        async for _ in host.image_snapshots.for_image(CALLER, request):
            pass


async def test_a_list_of_recipes_says_the_bases(fake_host: FakeHost, host: Host) -> None:
    over(fake_host)
    over(fake_host, name="lost", base="nothing")
    found = {each.name: each for each in await host.recipes.list(CALLER)}
    assert (found["app"].base, found["fake"].base) == ("fake", None)
    assert str(found["lost"].error).startswith("the base of lost: no recipe 'nothing'")
