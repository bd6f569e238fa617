"""Recipes are the operator's, by name or path, or were uploaded, and are confined then."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, InvalidRequest, NotFound, QuotaExceeded
from forkd.model.caller import Caller, Scope, Tenant
from forkd.model.recipe import NamedRecipe, UploadedRecipe
from forkd.model.tenant import Amounts, Quotas
from forkd.service import recipes
from forkd.service.ledger import Ledger
from forkd.service.recipes import IN_USE_S_MAX, UNUSED_S_MAX, Recipes
from forkd.service.supervision import Supervisor
from forkd.service.workers import Workers
from forkd.store.recipes import RecipeStore
from forkd.telemetry.telemetry import Telemetry
from tests.support.archives import HOSTILE, RECIPE, TOML, archive, entry, folder
from tests.support.callers import CALLER
from tests.support.recipes import NO_RECIPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from forkd.model.recipe import StoredRecipe


TEAM = Tenant("team")
MEMBER = Caller("token:member", TEAM, frozenset({Scope.SNAPSHOTS}), "test")


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1_000):
        yield data[start : start + 1_000]


@pytest.fixture
def store(tmp_path: Path) -> RecipeStore:
    made = RecipeStore(tmp_path)
    made.prepare()
    return made


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
async def uploads(tmp_path: Path, store: RecipeStore, ledger: Ledger) -> AsyncIterator[Recipes]:
    with Workers() as workers:
        async with Supervisor() as tasks:
            yield Recipes(Telemetry(), (tmp_path / "shelf",), store, workers, ledger, tasks)


def kept(tmp_path: Path) -> list[str]:
    names = sorted(each.name for each in (tmp_path / "recipes").iterdir())
    recipes = [each for each in names if not each.startswith(".owner-")]
    owned = {each for each in recipes if not each.startswith(".")}
    assert {each.removeprefix(".owner-") for each in names if each not in recipes} == owned
    return recipes


async def upload(uploads: Recipes, data: bytes) -> StoredRecipe:
    return await uploads.upload(CALLER, pieces(data))


async def test_an_upload_is_named_by_its_contents_and_kept_once(
    tmp_path: Path, uploads: Recipes
) -> None:
    data = archive(TOML, folder("data"), entry("data/file", b"x" * 5_000))

    first, second = await upload(uploads, data), await upload(uploads, data)

    digest = hashlib.sha256(data).hexdigest()
    assert (first, first.name) == (second, "uploaded")
    assert first.source == UploadedRecipe(digest)
    assert kept(tmp_path) == [digest]
    found = uploads.find(first.source)
    assert found.confined
    assert (found.path / "data/file").read_bytes() == b"x" * 5_000


@pytest.mark.parametrize("name", sorted(HOSTILE))
async def test_nothing_is_left_of_an_archive_that_is_refused(
    tmp_path: Path, uploads: Recipes, name: str
) -> None:
    data, words = HOSTILE[name]

    with pytest.raises(InvalidRequest, match=words):
        await upload(uploads, data)

    assert kept(tmp_path) == []


async def test_an_archive_of_one_entry_too_many_is_refused(
    tmp_path: Path, uploads: Recipes
) -> None:
    files = [entry(f"f{number}") for number in range(10_000)]

    with pytest.raises(InvalidRequest, match="more than 10000 entries"):
        await upload(uploads, archive(TOML, *files))

    assert kept(tmp_path) == []


async def test_an_archive_without_a_recipe_is_refused(tmp_path: Path, uploads: Recipes) -> None:
    with pytest.raises(InvalidRequest, match=r"holds no recipe\.toml"):
        await upload(uploads, archive(entry("recipe.tml", RECIPE)))

    assert kept(tmp_path) == []


@pytest.mark.parametrize(("data", "words"), NO_RECIPES)
async def test_an_archive_with_no_valid_recipe_is_refused(
    tmp_path: Path, uploads: Recipes, data: bytes, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await upload(uploads, archive(entry("recipe.toml", data)))

    assert str(tmp_path) not in str(caught.value)
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ('image = { rootfs = "/etc/shadow" }', "image.rootfs"),
        ('image = { rootfs = "../../forkd.db" }', "image.rootfs"),
        ('image = { oci = "/var/lib/image.tar" }', "image.oci"),
        ('image = { oci = "oci:../../..:tag" }', "image.oci"),
        ('image = { oci = "docker-archive:/etc/shadow" }', "image.oci"),
        ('image = { debian = {} }\nmachine = { kernel = "/boot/vmlinuz" }', "machine.kernel"),
        (
            'image = { debian = {} }\nmachine = { kernel = "k", modules = "/lib/modules" }',
            "machine.modules",
        ),
    ],
)
async def test_an_uploaded_recipe_uses_its_own_files_only(
    uploads: Recipes, recipe: str, field: str
) -> None:
    text = f'name = "sly"\n{recipe}\n'.encode()

    with pytest.raises(InvalidRequest, match="leads out of the recipe's folder") as caught:
        await upload(uploads, archive(entry("recipe.toml", text), entry("k")))

    assert caught.value.context["field"] == field


async def test_a_registrys_image_and_ones_own_are_no_files_of_the_host(uploads: Recipes) -> None:
    for image in ("debian:12", "docker://ghcr.io/a/b:tag", "oci:layout:tag", "image.tar"):
        text = f'name = "fine"\nimage = {{ oci = "{image}" }}\n'.encode()
        assert (await upload(uploads, archive(entry("recipe.toml", text)))).name == "fine"


async def test_an_upload_ends_at_its_limit(
    tmp_path: Path, uploads: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = archive(TOML)
    monkeypatch.setattr(recipes, "RECIPE_UPLOAD_BYTES_MAX", len(data))
    await upload(uploads, data)

    with pytest.raises(InvalidRequest, match=f"longer than {len(data)} bytes"):
        await upload(uploads, data + b"\0")

    assert len(kept(tmp_path)) == 1


async def test_an_upload_leaves_room_for_others(
    uploads: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "ROOM_BYTES_MIN", 1 << 62)

    with pytest.raises(CapacityError, match="no room"):
        await upload(uploads, archive(TOML))


async def test_an_upload_whose_client_leaves_leaves_nothing(
    tmp_path: Path, uploads: Recipes
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield archive(TOML)[:700]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await uploads.upload(CALLER, broken())

    assert kept(tmp_path) == []


async def test_a_crash_in_the_middle_of_an_upload_is_forgotten_at_the_start(
    tmp_path: Path, store: RecipeStore
) -> None:
    (store.aside() / "recipe").mkdir(parents=True)
    assert kept(tmp_path) != []

    store.prepare()

    assert kept(tmp_path) == []


async def test_uploads_that_no_build_uses_are_removed_after_a_week(
    tmp_path: Path, uploads: Recipes
) -> None:
    old = await upload(uploads, archive(TOML))
    fresh = await upload(uploads, archive(TOML, entry("more")))
    a_week_ago = time.time() - UNUSED_S_MAX
    for recipe, age_s in ((old, 60), (fresh, -60)):
        os.utime(tmp_path / "recipes" / recipe.source.digest, times=(a_week_ago - age_s,) * 2)

    assert [each.name for each in await uploads.tidy(dry_run=True)] == [old.source.digest]
    assert len(kept(tmp_path)) == 2
    (removed,) = await uploads.tidy()

    assert (removed.kind, removed.name) == ("recipe", old.source.digest)
    assert kept(tmp_path) == [fresh.source.digest]
    with pytest.raises(NotFound, match="upload it again"):
        uploads.find(old.source)


async def test_an_upload_counts_for_whoever_was_first_until_it_is_removed(
    tmp_path: Path, uploads: Recipes, ledger: Ledger, store: RecipeStore
) -> None:
    big, small = archive(TOML, entry("big", b"x" * (3 << 20))), archive(TOML)
    ledger.quotas[TEAM] = Quotas(snapshot_mib=3)
    with pytest.raises(QuotaExceeded):
        await uploads.upload(MEMBER, pieces(big))
    assert kept(tmp_path) == []

    ledger.quotas[TEAM] = Quotas(snapshot_mib=4)
    stored = await uploads.upload(MEMBER, pieces(big))
    await upload(uploads, big)
    assert ledger.promised() == ledger.used(TEAM) == Amounts(snapshot_mib=-(-stored.bytes >> 20))
    with pytest.raises(QuotaExceeded):
        await uploads.upload(MEMBER, pieces(small))

    again = Ledger()
    with Workers() as workers:
        other = Recipes(Telemetry(), (), store, workers, again, Supervisor())
        await other.load()
    assert again.used(TEAM) == ledger.used(TEAM)

    os.utime(tmp_path / "recipes" / stored.source.digest, times=(0, 0))
    await uploads.tidy()
    assert ledger.promised() == Amounts()


async def test_what_a_tenant_has_not_used_for_long_gives_way_to_what_it_uploads(
    tmp_path: Path, uploads: Recipes, ledger: Ledger
) -> None:
    ledger.quotas[TEAM] = Quotas(snapshot_mib=2)
    datas = [archive(TOML, entry(name)) for name in ("older", "old", "new")]
    older, old = [await uploads.upload(MEMBER, pieces(each)) for each in datas[:2]]
    theirs = await upload(uploads, archive(TOML, entry("theirs")))
    now_s = time.time()
    for recipe, age_s in ((older, IN_USE_S_MAX - 60), (old, IN_USE_S_MAX - 120), (theirs, 10**6)):
        path = tmp_path / "recipes" / recipe.source.digest
        os.utime(path, times=(now_s - age_s,) * 2)
    with pytest.raises(QuotaExceeded):  # a build may be using them
        await uploads.upload(MEMBER, pieces(datas[2]))

    path = tmp_path / "recipes" / old.source.digest
    os.utime(path, times=(now_s - IN_USE_S_MAX - 1,) * 2)
    new = await uploads.upload(MEMBER, pieces(datas[2]))

    assert ledger.used(TEAM) == Amounts(snapshot_mib=2)
    left = sorted(each.source.digest for each in (older, theirs, new))
    assert [each for each in kept_now(tmp_path) if not each.startswith(".")] == left


def kept_now(tmp_path: Path) -> list[str]:
    return sorted(each.name for each in (tmp_path / "recipes").iterdir())


async def test_a_recipe_that_is_used_is_kept_for_another_week(
    tmp_path: Path, uploads: Recipes
) -> None:
    recipe = await upload(uploads, archive(TOML))
    os.utime(tmp_path / "recipes" / recipe.source.digest, times=(0, 0))

    uploads.find(recipe.source)

    assert await uploads.tidy() == []


def test_a_recipe_is_found_by_name_and_by_a_path_inside(tmp_path: Path, uploads: Recipes) -> None:
    for name in ("one", "two"):
        (tmp_path / "shelf" / name).mkdir(parents=True)
        (tmp_path / "shelf" / name / "recipe.toml").write_text("")
    (tmp_path / "shelf" / "no-recipe").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "shelf")

    assert uploads.find(NamedRecipe("one")).path == tmp_path / "shelf/one"
    assert uploads.find(tmp_path / "alias/two").path == tmp_path / "shelf/two"
    assert not uploads.find(tmp_path / "shelf/one").confined
    for name in ("no-recipe", "three"):
        with pytest.raises(NotFound, match=f"no recipe '{name}'; there are: one, two"):
            uploads.find(NamedRecipe(name))


@pytest.mark.parametrize("path", ["etc/passwd", "", "shelf/../elsewhere", "shelf-too", "shelf/out"])
def test_a_path_outside_of_the_folders_is_refused_whether_it_exists_or_not(
    tmp_path: Path, uploads: Recipes, path: str
) -> None:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "out").symlink_to("..")

    with pytest.raises(InvalidRequest, match="is in no folder of recipes") as caught:
        uploads.find(tmp_path / path)

    assert caught.value.context["field"] == "recipe"
