"""A recipe says what it means, or is refused with the key at fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from forkd import limits
from forkd.errors import InvalidRequest, NotFound
from forkd.images import recipe as recipes
from forkd.images.recipe import load_recipe, parse_recipe
from tests.support.recipes import NO_FILES, NO_NAMES, NO_RECIPES

if TYPE_CHECKING:
    from pathlib import Path

MINIMAL: dict[str, Any] = {"name": "x", "image": {"debian": {"packages": ["python3"]}}}


def refusal(folder: Path, **more: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_recipe({**MINIMAL, **more}, folder=folder)
    return caught.value


def test_a_recipe_of_two_keys_has_defaults_for_all_others(tmp_path: Path) -> None:
    recipe = parse_recipe(MINIMAL, folder=tmp_path)

    assert recipe.image.debian is not None
    assert recipe.image.debian.suite == "bookworm"
    assert (recipe.machine.vcpus, recipe.machine.memory_mib) == (1, 512)
    assert recipe.machine.cpu == "host"
    assert (recipe.machine.kernel, recipe.init, recipe.warmup.runtime) == (
        "debian",
        "agent",
        "none",
    )


@pytest.mark.parametrize(
    ("more", "field", "nearest"),
    [
        ({"machin": {}}, "machin", "machine"),
        ({"machine": {"memroy_mib": 256}}, "machine.memroy_mib", "memory_mib"),
        ({"image": {"debian": {"package": []}}}, "image.debian.package", "packages"),
        (
            {"files": [{"source": "a", "target": "/a", "moode": 1}]},
            "files[0].moode",
            "mode",
        ),
        ({"warmup": {"ready": {"comand": ["true"]}}}, "warmup.ready.comand", "command"),
        ({"warmup": {"timeout_seconds": 1}}, "warmup.timeout_seconds", "timeout_secs"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_known_one(
    tmp_path: Path, more: dict[str, object], field: str, nearest: str
) -> None:
    error = refusal(tmp_path, **more)

    assert str(error) == f"recipe has the unknown key '{field}'; did you mean '{nearest}'?"
    assert error.context == {"field": field}


@pytest.mark.parametrize("key", ["timeout_secs", "timeout_s"])
def test_a_time_is_said_as_over_the_api_or_as_it_first_was(tmp_path: Path, key: str) -> None:
    assert parse_recipe({**MINIMAL, "warmup": {key: 7}}, folder=tmp_path).warmup.timeout_s == 7


def test_the_folder_cannot_be_set_from_inside_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown key 'folder'"):
        parse_recipe({**MINIMAL, "folder": "/"}, folder=tmp_path)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"machine": {"vcpus": limits.VCPUS_MAX + 1}}, "machine.vcpus"),
        ({"machine": {"vcpus": 0}}, "machine.vcpus"),
        ({"machine": {"cpu": "i386"}}, "machine.cpu"),
        ({"machine": {"cpu": True}}, "machine.cpu"),
        ({"machine": {"vcpus": True}}, "machine.vcpus"),
        ({"machine": {"memory_mib": limits.MEMORY_MIB_MIN - 2}}, "machine.memory_mib"),
        ({"machine": {"memory_mib": limits.MEMORY_MIB_MAX + 2}}, "machine.memory_mib"),
        ({"machine": {"memory_mib": 513}}, "machine.memory_mib"),
        ({"machine": {"disk_mib": limits.DISK_MIB_MIN - 1}}, "machine.disk_mib"),
        ({"machine": {"disk_mib": limits.DISK_MIB_MAX + 1}}, "machine.disk_mib"),
        ({"machine": {"cmdline": "x" * (recipes.CMDLINE_BYTES_MAX + 1)}}, "machine.cmdline"),
        ({"machine": {"cmdline": "a\nb"}}, "machine.cmdline"),
        ({"warmup": {"timeout_s": recipes.WARM_UP_S_MAX + 1}}, "warmup.timeout_s"),
        ({"warmup": {"timeout_s": float("nan")}}, "warmup.timeout_s"),
        ({"warmup": {"timeout_secs": 0}}, "warmup.timeout_secs"),
        ({"warmup": {"timeout_secs": 1, "timeout_s": 1}}, "warmup.timeout_s"),
        (
            {"warmup": {"runtime": "python", "code": "x" * (recipes.CODE_BYTES_MAX + 1)}},
            "warmup.code",
        ),
        (
            {"warmup": {"post_fork_command": ["x"] * (recipes.COMMAND_ARGS_MAX + 1)}},
            "warmup.post_fork_command",
        ),
        ({"warmup": {"post_fork_command": []}}, "warmup.post_fork_command"),
        ({"pip": {"requirements": ["six"] * (recipes.REQUIREMENTS_MAX + 1)}}, "pip.requirements"),
        (
            {"image": {"debian": {"packages": ["bash"] * (recipes.PACKAGES_MAX + 1)}}},
            "image.debian.packages",
        ),
        (
            {"image": {"oci": "x", "modules": ["fuse"] * (recipes.MODULES_MAX + 1)}},
            "image.modules",
        ),
        ({"env": {f"A{n}": "" for n in range(recipes.ENV_MAX + 1)}}, "env"),
        ({"env": {"A": "x" * (recipes.ENV_VALUE_BYTES_MAX + 1)}}, "env.A"),
        ({"cwd": "/" + "x" * recipes.TEXT_BYTES_MAX}, "cwd"),
        ({"name": "x" * 65}, "name"),
        (
            {"files": [{"source": "a", "target": "/a"}] * (recipes.FILES_MAX + 1)},
            "files",
        ),
        ({"files": [{"source": "a", "target": "/a", "mode": 0o10000}]}, "files[0].mode"),
    ],
)
def test_one_past_a_limit_is_refused(
    tmp_path: Path, section: dict[str, object], field: str
) -> None:
    assert refusal(tmp_path, **section).context == {"field": field}


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"name": "../x"}, "name"),
        ({"cwd": "srv"}, "cwd"),
        ({"cwd": "/srv/../.."}, "cwd"),
        ({"user": "-root"}, "user"),
        ({"image": {"debian": {"packages": ["-o=x"]}}}, "image.debian.packages[0]"),
        ({"image": {"debian": {"packages": ["a,b"]}}}, "image.debian.packages[0]"),
        ({"image": {"debian": {"packages": ["./x.deb"]}}}, "image.debian.packages[0]"),
        ({"image": {"debian": {"suite": "--help"}}}, "image.debian.suite"),
        ({"image": {"oci": "x", "modules": "most"}}, "image.modules"),
        ({"image": {"oci": "x", "modules": ["../fuse"]}}, "image.modules"),
        ({"image": {"oci": "x", "modules": [1]}}, "image.modules"),
        ({"image": {"rootfs": "x", "modules": "all"}}, "image"),
        ({"pip": {"requirements": ["--index-url=x"]}}, "pip.requirements[0]"),
        ({"pip": {"requirements": ["six @ file:///x"]}}, "pip.requirements[0]"),
        ({"files": [{"source": "../x", "target": "/x"}]}, "files[0].source"),
        ({"files": [{"source": "/etc/shadow", "target": "/x"}]}, "files[0].source"),
        ({"files": [{"source": "x", "target": "x"}]}, "files[0].target"),
        ({"files": [{"source": "x", "target": "/../x"}]}, "files[0].target"),
        ({"files": [{"source": "x\0", "target": "/x"}]}, "files[0].source"),
        ({"warmup": {"runtime": "python", "file": "../warm.py"}}, "warmup.file"),
    ],
)
def test_nothing_can_be_smuggled_into_a_path_or_a_command_line(
    tmp_path: Path, section: dict[str, object], field: str
) -> None:
    assert refusal(tmp_path, **section).context == {"field": field}


@pytest.mark.parametrize("image", [{}, {"oci": "a", "rootfs": "b"}, {"oci": "a", "base": "b"}])
def test_an_image_comes_from_exactly_one_place(tmp_path: Path, image: dict[str, str]) -> None:
    assert "exactly one of debian, oci, rootfs and base" in str(refusal(tmp_path, image=image))


@pytest.mark.parametrize(
    "more",
    [
        {"files": [{"source": "a", "target": "/a"}]},
        {"pip": {"requirements": ["six"]}},
        {"machine": {"disk_mib": 64}},
    ],
)
def test_a_finished_rootfs_is_used_as_it_is(tmp_path: Path, more: dict[str, object]) -> None:
    assert "do not go with image.rootfs" in str(refusal(tmp_path, image={"rootfs": "r"}, **more))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"oci": "a", "packages": ["git"]}, "packages go with base"),
        ({"base": "a", "modules": "all"}, "modules are those of the base"),
        ({"base": "a", "packages": ["--yes"]}, "image.packages[0]"),
        ({"base": ""}, "image.base"),
    ],
)
def test_what_goes_with_a_base_and_what_does_not(
    tmp_path: Path, image: dict[str, object], message: str
) -> None:
    assert message in str(refusal(tmp_path, image=image))


@pytest.mark.parametrize("key", ["folder", "under"])
def test_a_recipe_cannot_say_what_forkd_knows(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^recipe has the unknown key '{key}'$"):
        parse_recipe({**MINIMAL, key: MINIMAL}, folder=tmp_path)


@pytest.mark.parametrize("key", ["code", "file", "post_fork"])
def test_code_needs_a_runtime(tmp_path: Path, key: str) -> None:
    assert "need runtime" in str(refusal(tmp_path, warmup={key: "x"}))


@pytest.mark.parametrize("name", ["node", "shell", "r-4.3", "a" * 32])
def test_a_runtime_may_be_one_that_only_the_image_knows(tmp_path: Path, name: str) -> None:
    warmup = {"runtime": name, "code": "1"}

    assert parse_recipe({**MINIMAL, "warmup": warmup}, folder=tmp_path).warmup.runtime == name


@pytest.mark.parametrize("name", ["", "Node", "../x", "a b", "a" * 33])
def test_the_name_of_a_runtime_is_no_path(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, warmup={"runtime": name}).context == {"field": "warmup.runtime"}


def test_the_warm_up_file_becomes_the_code(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        'name = "x"\n[image]\noci = "y"\n[warmup]\nruntime = "python"\nfile = "warm.py"\n'
    )
    (tmp_path / "warm.py").write_text("import numpy\n")

    recipe = load_recipe(tmp_path)

    assert recipe.warmup.code == "import numpy\n"
    assert recipe == load_recipe(tmp_path / "recipe.toml")


def test_a_warm_up_file_behind_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("x")
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "warm.py").symlink_to(outside)

    error = refusal(folder, warmup={"runtime": "python", "file": "warm.py"})

    assert "leads out of the recipe's folder" in str(error)


def test_code_and_file_exclude_each_other(tmp_path: Path) -> None:
    error = refusal(tmp_path, warmup={"runtime": "python", "code": "1", "file": "w.py"})

    assert "not both" in str(error)


def test_a_missing_recipe_and_a_missing_warm_up_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no recipe at"):
        load_recipe(tmp_path)
    with pytest.raises(NotFound, match="no warm-up at"):
        parse_recipe({**MINIMAL, "warmup": {"runtime": "python", "file": "w.py"}}, folder=tmp_path)


@pytest.mark.parametrize(("data", "words"), NO_RECIPES)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "recipe.toml").write_bytes(data)

    with pytest.raises(InvalidRequest, match=words):
        load_recipe(tmp_path)


def test_a_recipe_of_the_largest_size_is_read(tmp_path: Path) -> None:
    recipe = b'name = "x"\nimage.debian = {}\n'
    (tmp_path / "recipe.toml").write_bytes(recipe.ljust(recipes.RECIPE_BYTES_MAX, b"#"))

    assert load_recipe(tmp_path).name == "x"


@pytest.mark.parametrize("kind", sorted(NO_FILES))
def test_what_is_no_file_is_no_recipe(tmp_path: Path, kind: str) -> None:
    """A FIFO that was opened would wait for a writer for ever."""
    NO_FILES[kind](tmp_path / "recipe.toml")

    with pytest.raises(InvalidRequest, match=f"recipe.toml is a {kind}, not a regular file"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_path_that_no_file_can_have_is_one_error(tmp_path: Path, name: str) -> None:
    with pytest.raises((InvalidRequest, NotFound)):
        load_recipe(tmp_path / name)


def test_links_that_lead_to_each_other_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")

    with pytest.raises(NotFound, match="no recipe at"):
        load_recipe(tmp_path / "a")
    with pytest.raises(NotFound, match="no warm-up at"):
        parse_recipe({**MINIMAL, "warmup": {"runtime": "python", "file": "a"}}, folder=tmp_path)


def test_a_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = parse_recipe(MINIMAL, folder=tmp_path)

    with pytest.raises(ValueError, match="frozen"):
        setattr(recipe.machine, "vcpus", 2)  # noqa: B010 - mypy refuses it as it should
