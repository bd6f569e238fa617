"""References to images are read as Docker reads them."""

from __future__ import annotations

import pytest

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.images.direct import changed, recipe_of
from forkd.images.recipe import parse_recipe
from forkd.images.registries import Registries
from forkd.model.recipe import (
    NamedRecipe,
    RecipeChanges,
    RegistryImage,
    UploadedRecipe,
    parse_image_source,
)
from forkd.model.reference import parse_reference

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("team/app", "docker.io/team/app:latest"),
        ("ghcr.io/a/b/c:V1", "ghcr.io/a/b/c:V1"),
        ("localhost/app", "localhost/app:latest"),
        ("127.0.0.1:5000/app:1", "127.0.0.1:5000/app:1"),
        ("[::1]:5000/app", "[::1]:5000/app:latest"),
        (f"python:3.12@{DIGEST}", f"docker.io/library/python@{DIGEST}"),
        ("docker://python", "docker.io/library/python:latest"),
    ],
)
def test_a_reference_says_registry_repository_and_tag(text: str, meant: str) -> None:
    assert str(parse_reference(text)) == meant


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Python",
        "python:",
        "python:-1",
        "a//b",
        "../x",
        "-x",
        "https://example.com/x",
        "python@sha256:0",
        f"python@sha512:{'0' * 64}",
        "x" * 256,
        f"x:{'y' * 129}",
        "a\nb",
        "a b",
        "--authfile=x",
    ],
)
def test_what_is_no_reference_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(InvalidRequest, match="image is no image reference") as raised:
        parse_reference(text)

    assert raised.value.context["field"] == "image"


@pytest.mark.parametrize(
    ("text", "loopback"),
    [
        ("127.0.0.1:5000/a", True),
        ("127.9.9.9/a", True),
        ("localhost:1/a", True),
        ("[::1]:5/a", True),
        ("[::1]/a", True),
        ("localhost.example.com/a", False),
        ("127.0.0.1.example.com/a", False),
        ("10.0.0.1:5000/a", False),
        ("docker.io/a", False),
    ],
)
def test_only_registries_of_this_host_need_no_tls(text: str, *, loopback: bool) -> None:
    assert Registries().is_insecure(text) is loopback
    assert Registries(frozenset({"10.0.0.1:5000"})).is_insecure("10.0.0.1:5000/a")
    assert not Registries(frozenset({"10.0.0.1:5000"})).is_insecure("10.0.0.1:5001/a")


def test_a_recipe_may_stand_for_an_image() -> None:
    assert parse_image_source(DIGEST) == UploadedRecipe("0" * 64)
    assert parse_image_source("numpy") == RegistryImage(parse_reference("numpy"), "numpy")
    for text in ("docker://numpy", "numpy:1"):
        assert parse_image_source(text) == RegistryImage(parse_reference(text), None)
    assert NamedRecipe("numpy") not in map(parse_image_source, ("numpy", "docker://numpy"))


def test_the_recipe_of_an_image_takes_what_a_request_changes() -> None:
    recipe = recipe_of(parse_reference("ghcr.io/team/app:1"))
    changes = RecipeChanges(("make",), "test -e /ok", memory_mib=1024, vcpus=2, disk_mib=4096)

    made = changed(recipe, changes)

    assert (made.name, made.image.oci) == ("app", "docker://ghcr.io/team/app:1")
    assert (made.warmup.runtime, made.warmup.run) == ("auto", ("make",))
    assert made.warmup.ready is not None
    assert made.warmup.ready.command == ("sh", "-c", "test -e /ok")
    shape = made.machine
    assert (shape.memory_mib, shape.vcpus, shape.disk_mib) == (1024, 2, 4096)
    assert changed(recipe, RecipeChanges()) == recipe


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"run": ("x",) * 257}, "run, in lines,"),
        ({"run": ("x" * (32 * 1024 + 1),)}, "run"),
        ({"run": (" ",)}, "run"),
        ({"ready": "a\0b"}, "ready"),
        ({"memory_mib": 126}, "memory_mib"),
        ({"memory_mib": 129}, "memory_mib"),
        ({"memory_mib": (1 << 20) + 2}, "memory_mib"),
        ({"vcpus": limits.VCPUS_MAX + 1}, "vcpus"),
        ({"disk_mib": 15}, "disk_mib"),
        ({"disk_mib": (1 << 24) + 1}, "disk_mib"),
    ],
)
def test_a_change_one_past_its_limit_is_refused(members: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        RecipeChanges(**members)  # type: ignore[arg-type]  # each is of its member

    assert raised.value.context["field"] == field


def test_a_finished_file_system_keeps_its_size(tmp_path: object) -> None:
    table = {"name": "disk", "image": {"rootfs": "disk.ext4"}}
    recipe = parse_recipe(table, folder=tmp_path)  # type: ignore[arg-type]  # a path

    with pytest.raises(InvalidRequest, match="disk_mib: the disk of disk is a finished file"):
        changed(recipe, RecipeChanges(disk_mib=64))
