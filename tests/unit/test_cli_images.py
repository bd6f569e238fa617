"""`forkd image` shows and clears the cache; `forkd snapshot create` takes an image and options."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd import Client
from forkd.errors import InvalidRequest, NotFound
from forkd.model.recipe import RecipeChanges, RegistryImage, UploadedRecipe
from tests.support.archives import unpacked
from tests.support.fake_images import KEY, NEEDED
from tests.support.oci import regular, write_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.machine.build import Memory
    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


def test_images_are_listed_and_removed_by_the_beginning_of_their_key(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    listed = forkd("image", "ls", "-o", "{key} {name} {reference}").out.splitlines()
    assert listed == [f"{KEY} python docker.io/library/python", f"{NEEDED} numpy -"]
    assert "200 MiB" in forkd("image", "ls").out

    ended = forkd("image", "rm", "000")

    assert (ended.code, ended.out) == (0, f"{KEY}\n")
    assert list(daemon.service.image_cache.images) == [NEEDED]


def test_an_image_that_is_needed_or_is_none_stays_with_one_error(forkd: Forkd) -> None:
    needed, none = forkd("image", "rm", NEEDED), forkd("image", "rm", "f00")

    assert (needed.code, none.code) == (4, 3)
    assert f"image {NEEDED} is needed by numpy" in needed.err
    assert "no image 'f00'; `forkd image ls` lists them" in none.err


def test_a_snapshot_is_made_of_an_image_with_what_the_options_say(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    ended = forkd(
        *("snapshot", "create", "py", "--image", "python:3.12-slim", "--run", "mkdir /work"),
        *("--run", "true", "--ready", "test -e /work", "--memory", "1g", "--vcpus", "2"),
        *("--disk", "4g"),
    )

    assert ended.code == 0, ended.err
    asked = daemon.service.asked
    assert asked is not None
    assert str(asked.recipe) == "docker.io/library/python:3.12-slim"
    assert asked.changes == RecipeChanges(
        ("mkdir /work", "true"), "test -e /work", memory_mib=1024, vcpus=2, disk_mib=4096
    )


def test_options_of_an_image_go_with_a_recipe_and_not_with_a_snapshot(
    forkd: Forkd, daemon: RunningDaemon
) -> None:
    assert forkd("snapshot", "create", "a", "-r", "good", "--memory", "1g").code == 0
    assert daemon.service.asked is not None
    assert daemon.service.asked.changes == RecipeChanges(memory_mib=1024)

    ended = forkd("snapshot", "create", "b", "--from", "a", "--exec", "true", "--run", "true")

    assert ended.code == 2
    assert "--run, --ready, --memory, --vcpus and --disk go with --image or --recipe" in ended.err


@pytest.mark.parametrize(
    ("image", "code", "words"),
    [
        ("Python", 2, "image is no image reference: 'Python'"),
        ("./none.tar", 3, "no image at ./none.tar: there is no such file or folder"),
        ("none.tar", 3, "no image at none.tar"),
    ],
)
def test_what_is_no_image_is_one_error(forkd: Forkd, image: str, code: int, words: str) -> None:
    ended = forkd("snapshot", "create", "py", "--image", image)

    assert (ended.code, words in ended.err) == (code, True), ended.err


def test_an_image_of_this_host_is_uploaded_once(daemon: RunningDaemon, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout", [[regular("hello", b"hi")]])
    with Client(daemon.url) as client:
        for tag in ("one", "two"):
            client.snapshots.create(tag, image=layout)
        client.snapshots.for_image(str(layout))

    (data,) = daemon.service.recipes.uploads
    assert tomllib.loads(unpacked(data)["recipe.toml"].decode())["image"] == {"oci": "layout"}
    (request,) = daemon.service.image_snapshots.asked
    assert isinstance(request.image, UploadedRecipe)


def test_the_sdk_asks_for_a_snapshot_of_an_image(daemon: RunningDaemon) -> None:
    steps: list[str] = []
    with Client(daemon.url) as client:
        made = client.snapshots.for_image(
            "python:3.12",
            memory_mib=1024,
            pull="always",
            on_progress=lambda e: steps.append(e.stage),
        )
        with pytest.raises(NotFound, match=r"no image docker\.io/library/nothing:latest"):
            client.snapshots.for_image("nothing")
        with pytest.raises(InvalidRequest, match="memory_mib"):
            client.snapshots.for_image("python", memory_mib=127)
        with pytest.raises(InvalidRequest, match="run must be a list of lines"):
            client.snapshots.create("x", image="python", run="make")
        recipes = client.recipes.list()

    assert (made.cached, steps) == (True, ["resolve"])
    first = daemon.service.image_snapshots.asked[0]
    assert isinstance(first.image, RegistryImage)
    assert (first.changes, first.pull) == (RecipeChanges(memory_mib=1024), True)
    assert [each.name for each in recipes] == ["fails", "good", "hangs"]
    assert recipes[0].description == "One that fails"


def test_images_come_in_pages_the_one_that_was_used_last_first(daemon: RunningDaemon) -> None:
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"))
    with httpx.Client(transport=transport, base_url="http://forkd") as http:
        first = http.get("/v2/images", params={"limit": 1})
        second = http.get("/v2/images", params={"limit": 1, "after": first.headers["Forkd-Next"]})
        wrong = http.delete("/v2/images/nothing")

    assert [each["key"] for each in (*first.json(), *second.json())] == [KEY, NEEDED]
    assert "Forkd-Next" not in second.headers
    assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_request")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"image": "python", "recipe": "good"}, "give exactly one of image, recipe and source"),
        ({"source": "warm", "exec": "true", "vcpus": 2}, "vcpus and disk_mib go with image or"),
        ({"image": "python", "exec": "true"}, "go with source, not with an image or a recipe"),
        ({"image": "python", "memory_mib": 129}, "memory_mib must be a multiple of 2, not 129"),
        ({"image": "python", "run": ["x"] * 257}, "run: "),
        ({"image": "python", "run": ["x" * 32_769]}, "run"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_error(
    daemon: RunningDaemon, members: dict[str, object], words: str
) -> None:
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"))
    with httpx.Client(transport=transport, base_url="http://forkd") as http:
        answer = http.post("/v2/snapshots", json={"tag": "new", **members})

    assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("options", "asked_mib"), [((), None), (("--memory", "3g"), 3072)], ids=["recipe", "option"]
)
def test_an_image_that_is_built_here_is_checked_against_the_daemons_memory(
    forkd: Forkd,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    asked_mib: int | None,
) -> None:
    told: list[tuple[int, int | None]] = []

    def prepare(recipe: str, *_: object, memory: Memory) -> str:
        told.append((memory.max_mib(), memory.asked_mib))
        return recipe

    monkeypatch.setattr("forkd.machine.build.prepare", prepare)

    assert forkd("snapshot", "create", "a", "-r", "good", *options).code == 0
    total_mib = forkd("host", "show", "-o", "{memory_total_mib}").out.strip()
    assert told == [(int(total_mib), asked_mib)]
