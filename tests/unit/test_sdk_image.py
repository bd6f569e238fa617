"""Images that are described in Python are recipes that the daemon reads."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from forkd import Client, Image
from forkd.errors import InvalidRequest
from forkd.images.recipe import LINE_DOTS_MAX, Recipe, load_recipe
from forkd.sdk._image import DEBIAN_PACKAGES
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon

HOSTILE = 'a"b\\c\n\t\x01\x7fé\u2028'


def read(image: Image, folder: Path) -> Recipe:
    """Return the recipe as the daemon reads it."""
    contents = b"".join(image.archive().pieces())
    with tarfile.open(fileobj=io.BytesIO(contents)) as archive:
        archive.extractall(folder, filter="data")
    return load_recipe(folder)


def test_every_step_is_in_the_recipe(tmp_path: Path) -> None:
    tool, data = tmp_path / "tool", tmp_path / "data"
    tool.write_text("#!/bin/sh\n")
    data.mkdir()
    (data / "a.csv").write_text("1")
    image = (
        Image.debian("trixie")
        .apt_install("git", ["curl", "jq=1.6-2"])
        .pip_install("numpy", ("pandas>=2",))
        .run_commands("mkdir /work", 'echo "$HOME"')
        .env({"A": HOSTILE}, MODE="test")
        .env(MODE="later")
        .workdir("/work")
        .user("nobody")
        .add_local_file(tool, "/usr/local/bin/tool", mode=0o755)
        .add_local_dir(data, "/data")
        .warm_up("import numpy")
        .warm_up("x = 1")
    )

    recipe = read(image, tmp_path / "recipe")

    debian = recipe.image.debian
    assert debian is not None
    assert (debian.suite, set(debian.packages)) == (
        "trixie",
        {*DEBIAN_PACKAGES, "git", "curl", "jq=1.6-2"},
    )
    assert recipe.pip.requirements == ("numpy", "pandas>=2")
    assert recipe.warmup.run == ("mkdir /work", 'echo "$HOME"')
    assert recipe.env == {"A": HOSTILE, "MODE": "later"}
    assert (recipe.cwd, recipe.user) == ("/work", "nobody")
    assert (recipe.warmup.runtime, recipe.warmup.code) == ("python", "import numpy\nx = 1\n")
    first, second = recipe.files
    assert (first.target, first.mode, second.target) == ("/usr/local/bin/tool", 0o755, "/data")
    assert (tmp_path / "recipe" / first.source).read_text() == "#!/bin/sh\n"
    assert (tmp_path / "recipe" / second.source / "a.csv").read_text() == "1"


def test_an_image_of_a_registry_is_its_reference(tmp_path: Path) -> None:
    for number, said in enumerate(("python:3.12-slim", "docker://python:3.12-slim")):
        recipe = read(Image.from_registry(said).pip_install("six"), tmp_path / str(number))
        assert recipe.image.oci == "docker://python:3.12-slim"
        assert recipe.warmup.runtime == "auto"
    with pytest.raises(InvalidRequest, match=r"apt_install is for Image\.debian\(\): .*python"):
        Image.from_registry("python:3.12-slim").apt_install("git")


def test_a_step_changes_no_image_that_was_there_before() -> None:
    base = Image.debian()
    before = str(base)
    base.apt_install("git").env(A="b").run_commands("true").pip_install("six")
    assert str(base) == before


def test_the_same_steps_make_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")

    def made(*, packages: list[str]) -> bytes:
        image = Image.debian().apt_install(packages).add_local_file(tmp_path / "a", "/a")
        return b"".join(image.archive().pieces())

    assert made(packages=["git", "jq"]) == made(packages=["jq", "git"])
    assert made(packages=["git", "jq"]) != made(packages=["git"])


def test_a_text_with_many_dots_is_within_the_limit_of_a_line(tmp_path: Path) -> None:
    line = f"echo {'.' * (LINE_DOTS_MAX + 1)}"
    assert read(Image.debian().run_commands(line), tmp_path).warmup.run == (line,)


@pytest.mark.parametrize("step", ["apt_install", "pip_install", "run_commands"])
def test_what_is_no_text_is_refused_by_its_step(step: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{step} takes texts, and 7 is none"):
        getattr(Image.debian(), step)("a", ["b", 7])


def test_a_file_that_is_not_there_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    image = Image.debian().add_local_file(tmp_path / "nothing", "/a")
    with pytest.raises(InvalidRequest, match=r"cannot read .*nothing: No such file"):
        image.archive()


def test_an_image_is_used_as_any_other(daemon: RunningDaemon) -> None:
    daemon.service.stored = some_snapshots("warm")
    image = Image.debian().apt_install("git")
    with Client(daemon.url) as client:
        client.snapshots.create("made", image=image)
        client.snapshots.create("again", image)
        assert client.images.build(image).name == "image"
        with client.sandbox(image=image) as sandbox:
            assert sandbox.is_running()
    assert "git" in str(image)
    assert image.recipe()["image"]["debian"]["suite"] == "bookworm"
    assert repr(image) == "<Image debian bookworm>"
    assert repr(Image.from_registry("alpine")) == "<Image alpine>"
