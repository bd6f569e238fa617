"""Recipes are listed, shown and begun."""

from __future__ import annotations

import os
import tomllib
from typing import TYPE_CHECKING

from forkd import programs
from forkd.cli import render
from forkd.images.recipe import parse_recipe
from forkd.machine import lifecycle
from forkd.machine.build import Step
from forkd.machine.process import ProcessId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


def test_a_recipe_that_was_begun_is_a_recipe(forkd: Forkd, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "mine"

    ended = forkd("recipe", "init", str(folder))

    assert (ended.code, ended.out) == (0, f"{folder}/recipe.toml\n")
    recipe = parse_recipe(tomllib.loads((folder / "recipe.toml").read_text()), folder=folder)
    assert recipe.name == "mine"
    assert 'name = "mine"' in forkd("recipe", "show", str(folder)).out
    named = forkd("recipe", "init", str(tmp_path / "Other"), "--name", "x", "--json").document
    assert named == {"file": f"{tmp_path}/Other/recipe.toml", "name": "x"}


def test_what_is_there_is_left_as_it_is(forkd: Forkd, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("mine")
    (tmp_path / "file").write_text("mine")

    ended = forkd("recipe", "init", str(tmp_path), "--name", "x")

    assert ended.code == 4
    assert "recipe.toml exists already; nothing was changed" in ended.err
    assert (tmp_path / "recipe.toml").read_text() == "mine"
    assert forkd("recipe", "init", str(tmp_path / "file")).code == 4
    assert forkd("recipe", "init", str(tmp_path / "file" / "deep")).code == 1
    wrong = forkd("recipe", "init", str(tmp_path / "A B"))
    assert (wrong.code, "'A B' is not the name of a recipe" in wrong.err) == (2, True)
    assert not (tmp_path / "A B").exists()


def test_a_recipe_of_this_host_is_shown_by_name(forkd: Forkd) -> None:
    assert 'name = "python-numpy"' in forkd("recipe", "show", "python-numpy").out
    unknown = forkd("recipe", "show", "nothing")
    assert (unknown.code, "no recipe 'nothing' on this host" in unknown.err) == (3, True)
    assert forkd("recipe", "show", "/etc/passwd/x").code == 3


def test_the_recipes_of_the_daemon_are_listed(forkd: Forkd) -> None:
    listed = forkd("recipe", "ls", "-o", "{name}")

    assert listed.code == 0, listed.err
    assert forkd("recipe", "ls").out.splitlines()[0].split() == ["NAME", "BASE", "DESCRIPTION"]
    names = [each["name"] for each in forkd("recipe", "ls", "--json").document]
    assert names == listed.out.splitlines()
    assert "good" in names


def test_recipes_that_are_built_on_this_host_are_listed_with_those_of_a_helper(
    forkd: Forkd, daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    process = ProcessId.of(os.getpid())
    assert process is not None

    def listed(mode: lifecycle.Mode, url: str) -> list[str]:
        lifecycle.publish(tmp_path, lifecycle.RunningDaemon(url, None, mode, process))
        return forkd("recipe", "ls", "-o", "{name}: {description}").out.splitlines()

    with_helper = listed("helper", daemon.url)

    assert any(each.startswith("python-numpy: ") and len(each) > 20 for each in with_helper)
    assert any(each.startswith("good: ") for each in with_helper)
    assert with_helper == sorted(with_helper, key=lambda each: each.partition(":")[0])
    for other in (listed("native", daemon.url), listed("helper", "http://elsewhere")):
        assert not any("python-numpy" in each for each in other)


def test_every_recipe_that_comes_with_forkd_is_listed_with_a_helper_and_shown(
    forkd: Forkd, daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_HOME", str(tmp_path))
    process = ProcessId.of(os.getpid())
    assert process is not None
    lifecycle.publish(tmp_path, lifecycle.RunningDaemon(daemon.url, None, "helper", process))
    ours = [path.parent.name for path in programs.RECIPES.glob("*/recipe.toml")]

    listed = forkd("recipe", "ls", "--json").document

    described = {each["name"] for each in listed if each["description"]}
    assert set(ours) <= described
    for name in ours:
        assert f'name = "{name}"' in forkd("recipe", "show", name).out


def test_a_step_is_told_once_though_both_the_builder_and_the_daemon_tell_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told = [
        ("rootfs", "modules", 0.0),
        ("rootfs", "another builder has it", None),
        ("rootfs", "another builder has it", None),
        ("rootfs", "written", 1.0),
        ("rootfs", "from the cache", 1.0),
        ("boot", "booting", 0.0),
    ]

    with render.steps(as_json=False) as steps:
        for stage, message, fraction in told:
            steps(Step(stage, message, fraction))

    lines = [each.split(maxsplit=1)[1] for each in capfd.readouterr().err.splitlines()]
    assert lines == ["modules", "another builder has it", "written", "booting"]
