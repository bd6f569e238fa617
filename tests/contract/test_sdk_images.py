"""The same steps make the same image in Python and in TypeScript, to the byte."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from forkd import Image
from forkd.errors import InvalidRequest
from tests.support.daemon import daemon, running_daemon
from tests.support.fake_service import some_snapshots
from tests.support.npm_project import answer, package

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.daemon import RunningDaemon
    from tools.typescript_package import Package

__all__ = ["daemon", "package", "running_daemon"]

pytestmark = [pytest.mark.needs("node"), pytest.mark.timeout(180)]

HOSTILE = 'a"b\\c\n\t\x01\x7fé\u2028'

Step = tuple[str, list[Any], dict[str, Any]]


def images(folder: Path) -> list[list[Step]]:
    """Return images, each as its steps; their files are in a folder."""
    tree = folder / "tree"
    (tree / ("deep" * 20) / ("long" * 20)).mkdir(parents=True)
    (tree / ("deep" * 20) / ("long" * 20) / "é.csv").write_text("1")
    for name in ("b", "a", "Z", "ä", "10"):
        (tree / name).write_bytes(name.encode() * 400)
    (tree / "a").chmod(0o755)
    (tree / "link").symlink_to("a")
    (tree / "empty").touch()
    everything: list[Step] = [
        ("debian", ["trixie"], {}),
        ("apt_install", ["git", ["curl", "jq=1.6-2"]], {}),
        ("apt_install", ["git"], {}),
        ("pip_install", ["numpy", ["pandas>=2"]], {}),
        ("run_commands", ["mkdir /work", 'echo "$HOME"', "." * 101], {}),
        ("env", [{"A": HOSTILE, "MODE": "test"}], {}),
        ("env", [{"MODE": "later"}], {}),
        ("workdir", ["/work"], {}),
        ("user", ["nobody"], {}),
        ("add_local_file", [str(tree / "a"), "/usr/local/bin/a"], {"mode": 0o700}),
        ("add_local_file", [str(tree / "b"), "/b"], {}),
        ("add_local_dir", [str(tree), "/data"], {}),
        ("warm_up", ["import numpy"], {}),
        ("warm_up", [f"x = {HOSTILE!r}"], {}),
    ]
    registry: Step = ("from_registry", ["docker://python:3.12-slim"], {})
    return [
        everything,
        [("debian", [], {})],
        [registry, ("pip_install", ["six"], {})],
        [registry, ("apt_install", ["git"], {})],
        [("debian", [], {}), ("run_commands", ["a", ["b", 7]], {})],
        [("debian", [], {}), ("add_local_file", [str(folder / "nothing"), "/a"], {})],
        [("debian", [], {}), ("add_local_file", ["/dev/null", "/a"], {})],
    ]


def python_makes(steps: list[Step]) -> list[str]:
    """Return the recipe and the digest of an image, or the error."""
    image: Any = Image
    try:
        for name, args, options in steps:
            image = getattr(image, name)(*args, **options)
        contents = b"".join(image.archive().pieces())
    except InvalidRequest as error:
        return [error.code, str(error)]
    return [str(image), hashlib.sha256(contents).hexdigest()]


def plain(answer: list[str]) -> list[str]:
    """Return an answer without what each language says in its own way."""
    return [each.replace("aptInstall", "apt_install").replace("runCommands", "run_commands")
            .replace("No such file", "no such file") for each in answer]  # fmt: skip


def test_the_same_steps_make_the_same_image(
    package: Package, daemon: RunningDaemon, tmp_path: Path
) -> None:
    daemon.service.stored = some_snapshots("warm")
    described = images(tmp_path)

    answers, used = answer(package, "images.mjs", described, daemon.url)

    assert [plain(each) for each in answers] == [plain(python_makes(each)) for each in described]
    assert [len(each[1]) for each in answers[:3]] == [64, 64, 64]
    assert used == ["made", "again", "image", "ready", True, True]
