"""A recipe over a base has the base's machine, and nothing that a fork of it cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import InvalidRequest, NotFound
from forkd.images.bases import over_base
from forkd.images.keys import image_key
from forkd.images.recipe import parse_recipe

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.images.recipe import Recipe

BASE: dict[str, Any] = {
    "name": "base",
    "image": {"debian": {"packages": ["python3"]}, "modules": "none"},
    "env": {"A": "1", "B": "1"},
    "cwd": "/srv",
    "user": "app",
    "machine": {"memory_mib": 256, "vcpus": 2},
    "warmup": {
        "runtime": "python",
        "code": "import json",
        "post_fork": "one()",
        "post_fork_command": ["renew"],
    },
}

APP: dict[str, Any] = {"name": "app", "image": {"base": "base"}}


def parsed(folder: Path, table: dict[str, Any]) -> Recipe:
    place = folder / str(table["name"])
    place.mkdir(exist_ok=True)
    return parse_recipe(table, folder=place)


def put(folder: Path, app: dict[str, Any], base: dict[str, Any] = BASE) -> Recipe:
    return over_base(parsed(folder, app), lambda _, __: parsed(folder, base))


def test_what_a_recipe_does_not_say_is_as_in_its_base(tmp_path: Path) -> None:
    made = put(tmp_path, APP)
    assert made.under is not None
    assert made.under.name == "base"
    assert (made.machine.memory_mib, made.machine.vcpus) == (256, 2)
    assert (made.env, made.cwd, made.user) == ({"A": "1", "B": "1"}, "/srv", "app")
    assert made.image.wanted_modules == "none"
    assert (made.warmup.runtime, made.warmup.code) == ("python", "")
    assert (made.warmup.post_fork, made.warmup.post_fork_command) == ("one()", ("renew",))


def test_what_forks_of_the_base_do_is_done_first(tmp_path: Path) -> None:
    warmup = {"runtime": "python", "post_fork": "two()", "post_fork_command": ["other"]}
    made = put(tmp_path, {**APP, "cwd": "/home", "warmup": warmup})
    assert made.warmup.post_fork == "one()\ntwo()"
    assert made.warmup.post_fork_command == ("other",)
    assert made.cwd == "/home"


def test_a_recipe_without_a_base_is_as_it_was(tmp_path: Path) -> None:
    recipe = parsed(tmp_path, BASE)
    assert over_base(recipe, lambda _, __: recipe) is recipe


def test_what_is_said_alike_is_no_difference(tmp_path: Path) -> None:
    same = {"machine": {"memory_mib": 256}, "init": "agent", "env": {"A": "1"}}
    assert put(tmp_path, {**APP, **same}).machine.memory_mib == 256


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"machine": {"memory_mib": 512}}, "machine.memory_mib"),
        ({"machine": {"disk_mib": 512}}, "machine.disk_mib"),
        ({"machine": {"cmdline": "quiet"}}, "machine.cmdline"),
        ({"init": "image"}, "init"),
        ({"warmup": {"runtime": "node"}}, "warmup.runtime"),
        ({"env": {"A": "2"}, "warmup": {"runtime": "python"}}, "env"),
    ],
)
def test_what_a_fork_cannot_have_is_refused(
    tmp_path: Path, said: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"app s.*base") as error:
        put(tmp_path, {**APP, **said})
    assert error.value.context == {"field": field}


def test_a_runtime_can_be_started_over_a_base_without_one(tmp_path: Path) -> None:
    base = {**BASE, "warmup": {}}
    said = {"env": {"A": "2"}, "warmup": {"runtime": "python", "code": "1"}}
    assert put(tmp_path, {**APP, **said}, base).warmup.runtime == "python"
    with pytest.raises(InvalidRequest, match="say its runtime in place of 'auto'"):
        put(tmp_path, APP, {**BASE, "warmup": {"runtime": "auto"}})


@pytest.mark.parametrize("base", [{"oci": "docker://a"}, {"rootfs": "disk"}])
def test_packages_need_a_base_of_packages(tmp_path: Path, base: dict[str, str]) -> None:
    app = {**APP, "image": {"base": "base", "packages": ["git"]}}
    with pytest.raises(InvalidRequest, match="base, which is not made of Debian packages"):
        put(tmp_path, app, {"name": "base", "image": base})


def test_a_base_that_is_not_there_is_named_with_the_recipe(tmp_path: Path) -> None:
    def find(_: Recipe, name: str) -> Recipe:
        raise NotFound(f"no recipe {name!r}")

    with pytest.raises(NotFound, match=r"^the base of app: no recipe 'base'$"):
        over_base(parsed(tmp_path, APP), find)


def test_bases_are_not_stacked_and_make_no_circle(tmp_path: Path) -> None:
    tables = {
        "one": {"name": "one", "image": {"base": "two"}},
        "two": {"name": "two", "image": {"base": "base"}},
        "base": BASE,
        "left": {"name": "left", "image": {"base": "right"}},
        "right": {"name": "right", "image": {"base": "left"}},
    }

    def find(_: Recipe, name: str) -> Recipe:
        return parsed(tmp_path, tables[name])

    with pytest.raises(InvalidRequest, match=r"one → two → base; name base as the base of one"):
        over_base(find(parsed(tmp_path, BASE), "one"), find)
    with pytest.raises(InvalidRequest, match=r"bases go in a circle: left → right → left"):
        over_base(find(parsed(tmp_path, BASE), "left"), find)


def test_the_key_follows_the_base_and_what_it_was_built_of(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    made, changed = put(tmp_path, APP), put(tmp_path, APP, {**BASE, "cwd": "/other"})
    keys = [
        image_key(made, rootfs=first),
        image_key(made, rootfs=second),
        image_key(changed, rootfs=first),
        image_key(parsed(tmp_path, BASE)),
    ]
    assert len(set(keys)) == 4
    assert image_key(put(tmp_path, APP), rootfs=first) == keys[0]
