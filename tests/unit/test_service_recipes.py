"""Recipes are the operator's, by name or path, or were uploaded, and are confined then."""

from __future__ import annotations

import hashlib
import os
import time
from typing import TYPE_CHECKING

import pytest

from forkd.errors import CapacityError, InvalidRequest, NotFound
from forkd.model.recipe import NamedRecipe, UploadedRecipe
from forkd.service import recipes
from forkd.service.recipes import UNUSED_S_MAX, Recipes
from forkd.service.workers import Workers
from forkd.store.recipes import RecipeStore
from forkd.telemetry.telemetry import Telemetry
from tests.support.archives import HOSTILE, RECIPE, TOML, archive, entry, folder
from tests.support.callers import CALLER
from tests.support.recipes import NO_RECIPES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from forkd.model.recipe import StoredRecipe


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1_000):
        yield data[start : start + 1_000]


@pytest.fixture
def store(tmp_path: Path) -> RecipeStore:
    made = RecipeStore(tmp_path)
    made.prepare()
    return made


@pytest.fixture
def uploads(tmp_path: Path, store: RecipeStore) -> Iterator[Recipes]:
    with Workers() as workers:
        yield Recipes(Telemetry(), (tmp_path / "shelf",), store, workers)


def kept(tmp_path: Path) -> list[str]:
    return [each.name for each in (tmp_path / "recipes").iterdir()]


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

    assert [each.name for each in uploads.tidy(dry_run=True)] == [old.source.digest]
    assert len(kept(tmp_path)) == 2
    (removed,) = uploads.tidy()

    assert (removed.kind, removed.name) == ("recipe", old.source.digest)
    assert kept(tmp_path) == [fresh.source.digest]
    with pytest.raises(NotFound, match="upload it again"):
        uploads.find(old.source)


async def test_a_recipe_that_is_used_is_kept_for_another_week(
    tmp_path: Path, uploads: Recipes
) -> None:
    recipe = await upload(uploads, archive(TOML))
    os.utime(tmp_path / "recipes" / recipe.source.digest, times=(0, 0))

    uploads.find(recipe.source)

    assert uploads.tidy() == []


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
