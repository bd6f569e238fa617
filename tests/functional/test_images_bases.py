"""What a recipe adds to its base is built in full, and what the base's image has is left out."""

from __future__ import annotations

import functools
import http.server
import json
import subprocess
import sys
import tarfile
import threading
import zipfile
from typing import TYPE_CHECKING

import pytest

from forkd.images.bases import over_base
from forkd.images.builder import Additions, build_additions, build_rootfs
from forkd.images.layout import Cache
from forkd.images.recipe import parse_recipe
from forkd.images.steps import Build
from tests.support.hostile_package import cells
from tests.support.oci import folder, regular, symlink, write_layout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.images.apart import Cells
    from forkd.images.builder import Rootfs
    from forkd.images.recipe import Recipe

pytestmark = [pytest.mark.timeout(120)]

WHEEL = {
    "tool.py": b"answer = 42\n",
    "tool-1.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tool\nVersion: 1\n",
    "tool-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tool-1.dist-info/RECORD": b"",
}

PACKAGES = "usr/local/lib/python3.11/dist-packages"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have pip find a wheel and no others."""
    place = tmp_path / "wheels"
    place.mkdir()
    with zipfile.ZipFile(place / "tool-1-py3-none-any.whl", "w") as wheel:
        for name, data in WHEEL.items():
            wheel.writestr(name, data)
    handler = functools.partial(_Quiet, directory=str(place))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        yield
        server.shutdown()
        thread.join()


def base_in(tmp_path: Path) -> Recipe:
    members = [
        folder("usr/bin"),
        symlink("usr/bin/python3", "python3.11"),
        regular("usr/bin/python3.11", b"large" * 4096),
        regular("etc/setting", b"the image's"),
    ]
    write_layout(tmp_path / "layout", [members], {"Env": ["A=image"], "WorkingDir": "/srv"})
    (tmp_path / "setting").write_text("the base's")
    table = {
        "name": "base",
        "image": {"oci": "layout"},
        "files": [{"source": "setting", "target": "/etc/setting"}],
        "machine": {"disk_mib": 32},
    }
    return parse_recipe(table, folder=tmp_path)


def over(base: Recipe, tmp_path: Path, **more: object) -> Recipe:
    table = {"name": "app", "image": {"base": "base"}, **more}
    return over_base(parse_recipe(table, folder=tmp_path), lambda _, __: base)


def members(added: Additions) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(added.archive) as archive:
        return {each.name: each for each in archive}


def add(recipe: Recipe, root: Rootfs, cache: Cache, where: Cells | None) -> Additions:
    return build_additions(recipe, root.path, root.config, cache, Build(), where)


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize(
    "apart", [False, pytest.param(True, marks=pytest.mark.needs("root", "binaries"))]
)
def test_requirements_are_all_that_is_added_beside_files(tmp_path: Path, *, apart: bool) -> None:
    where = cells() if apart else None
    cache, base = Cache.open(tmp_path / "cache"), base_in(tmp_path)
    root = build_rootfs(base, cache, Build(), where)
    (tmp_path / "text").write_text("text")
    files = [{"source": "text", "target": "/opt/text"}]
    recipe = over(base, tmp_path, files=files, pip={"requirements": ["tool"]}, env={"B": "app"})

    added = add(recipe, root, cache, where)
    found = members(added)
    assert {"opt", "opt/text", f"{PACKAGES}/tool.py"} <= set(found)
    assert not {"usr/bin", "usr/bin/python3", "usr/bin/python3.11"} & set(found)
    assert not {"etc/setting", "etc/forkd/image.json"} & set(found)
    assert {(each.uid, each.gid) for each in found.values()} == {(0, 0)}
    assert added.replaced == ()
    assert (added.config.env, added.config.cwd) == ({"A": "image", "B": "app"}, "/srv")
    said = json.loads((added.archive.parent / "manifest.json").read_text())
    assert (said["name"], said["disk_bytes"]) == ("app", added.archive.stat().st_size)

    assert add(recipe, root, cache, where) == added
    assert list(cache.images.glob(".*")) == []


def test_files_are_added_without_a_look_at_the_base(tmp_path: Path) -> None:
    cache, base = Cache.open(tmp_path / "cache"), base_in(tmp_path)
    root = build_rootfs(base, cache, Build())
    (tmp_path / "text").write_text("text")
    recipe = over(base, tmp_path, files=[{"source": "text", "target": "/etc/setting"}])

    assert list(members(add(recipe, root, cache, None))) == ["etc/setting"]
    (tmp_path / "text").write_text("changed")
    assert add(recipe, root, cache, None) != add(base_changed(recipe), root, cache, None)


def base_changed(recipe: Recipe) -> Recipe:
    assert recipe.under is not None
    return recipe.model_copy(update={"under": recipe.under.model_copy(update={"env": {"X": "1"}})})


def test_a_base_that_is_not_there_is_refused_with_the_recipes_that_are(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('name = "app"\ndescription = "x"\nimage.base = "no"\n')
    known = tmp_path / "known"
    for name in ("two", "one"):
        (known / name).mkdir(parents=True)
        (known / name / "recipe.toml").touch()
    (known / "README.md").touch()
    command = [sys.executable, "-m", "forkd.images", "build", str(tmp_path), "--json"]

    done = subprocess.run(  # noqa: S603 - our own interpreter
        [*command, "--recipes", str(known), "--cache", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
    )

    said = json.loads(done.stdout.splitlines()[-1])
    assert said["message"] == "the base of app: no recipe 'no'; there are: one, two"
