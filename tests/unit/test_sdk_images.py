"""An image of this host is found, checked, and travels as a recipe that has it."""

from __future__ import annotations

import io
import tarfile
import tomllib
from pathlib import Path

import pytest

from forkd.errors import InvalidRequest, NotFound
from forkd.sdk import _recipes
from forkd.sdk._images import LocalImage, find_local_image
from tests.support.oci import regular, write_layout


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def layout(here: Path) -> Path:
    return write_layout(here / "layout", [[regular("hello", b"hi" * 5_000)]])


def saved(path: Path) -> Path:
    """Write what `docker save` might."""
    with tarfile.open(path, "w") as archive:
        for name in ("layer.tar", "manifest.json"):
            info = tarfile.TarInfo(name)
            info.size = 4_000
            archive.addfile(info, io.BytesIO(bytes(4_000)))
    return path


def unpacked(image: LocalImage) -> dict[str, bytes]:
    data = b"".join(image.archive().pieces())
    assert len(data) == image.archive().size_bytes
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        files = [each for each in archive.getmembers() if each.isfile()]
        return {each.name: archive.extractfile(each).read() for each in files}  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["python", "python:3.12", "layout2", "docker://layout", "a/b:1"])
@pytest.mark.usefixtures("layout")
def test_what_is_nothing_here_is_the_daemons_to_find(text: str) -> None:
    assert find_local_image(text) == text


@pytest.mark.parametrize(
    ("text", "oci"),
    [
        ("layout", "layout"),
        ("./layout:v1", "layout:v1"),
        ("oci:layout:v1", "oci:layout:v1"),
        ("My Image.tar", "image.tar"),
        ("docker-archive:My Image.tar", "docker-archive:image.tar"),
    ],
)
def test_an_image_of_this_host_travels_as_a_recipe(layout: Path, text: str, oci: str) -> None:
    archive = saved(layout.parent / "My Image.tar")

    found = find_local_image(text)

    assert isinstance(found, LocalImage)
    files = unpacked(found)
    recipe = tomllib.loads(files.pop("recipe.toml").decode())
    assert recipe["image"] == {"oci": oci}
    assert recipe["warmup"] == {"runtime": "auto"}
    if "layout" in oci:
        paths = [each for each in layout.rglob("*") if each.is_file()]
        inside = {
            str(Path("layout") / each.relative_to(layout)): each.read_bytes() for each in paths
        }
        assert (files, recipe["name"]) == (inside, "layout")
    else:
        assert files == {"image.tar": archive.read_bytes()}
        assert recipe["name"] == "my-image"


def test_a_recipe_stands_for_its_image(here: Path) -> None:
    (here / "recipe.toml").write_text("")

    assert find_local_image("./recipe.toml") == Path("recipe.toml")
    assert find_local_image(here) == here


@pytest.mark.parametrize("text", ["./none", "none.tar", "/none", "oci:none:tag", "none.tar.gz"])
def test_a_path_that_leads_nowhere_is_not_found(text: str) -> None:
    with pytest.raises(NotFound, match=r"no image at .*none"):
        find_local_image(text)


def test_a_folder_that_is_no_image_says_what_it_lacks(here: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"neither an oci-layout nor a recipe\.toml"):
        find_local_image(here)


@pytest.mark.parametrize("length", [0, 100, 3_000, 6_000])
def test_an_archive_that_is_cut_is_refused_before_it_travels(here: Path, length: int) -> None:
    path = saved(here / "image.tar")
    path.write_bytes(path.read_bytes()[:length])

    with pytest.raises(InvalidRequest, match=r"image\.tar is no image archive: ") as raised:
        find_local_image(path).archive()  # type: ignore[union-attr]

    assert raised.value.context["field"] == "image"
    assert "\n" not in str(raised.value)


def test_an_image_of_one_file_too_many_is_refused(
    layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = find_local_image(layout)
    assert isinstance(image, LocalImage)
    entries = sum(1 for _ in layout.rglob("*")) + 2  # the folder, and the recipe
    monkeypatch.setattr(_recipes, "RECIPE_ENTRIES_MAX", entries)
    image.archive()
    (layout / "more").touch()

    with pytest.raises(InvalidRequest, match=f"holds more than {entries} files"):
        image.archive()
