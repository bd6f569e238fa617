"""The programs of recipes with a framework run on the framework's own packages, without a network.

The packages come from the index, each program's into a folder of its own below `build/frameworks`;
the program then runs against a daemon over the fake VMM.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from tests.support.docs import ROOT
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import make_host

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.needs("network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(1800),
]

FRAMEWORKS = ROOT / "build" / "frameworks"

INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target")

LAST_LINES = {
    "autogen-branch": "{'as it is': 1699, 'zlib': 58, 'numbers': 250, 'kept': 58}",
    "crewai-fanout": "{'total': '32', 'best': \"'east'\", 'north': '12', 'rows': '5'}",
    "langgraph-react": "{'constant': 435.0, 'linear': 168.0, 'square': 0.0, 'kept': 0.0}",
    "openai-swarm": "{'hasty': False, 'careful': True, 'rows': [['ada', 36], ['alan', 41]]}",
}
"""What each program prints at its end."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir:
        host = make_host(tmp_path_factory.mktemp("host"), Path(run_dir))
        with FakeDaemon(host) as daemon:
            with Client(daemon.url) as client:
                client.snapshots.create("numpy", host.recipe())
            yield daemon
        assert host.left_over() == []


def packages(name: str) -> Path:
    """Return the folder with the packages of a recipe, installed unless they are there."""
    folder, wanted = FRAMEWORKS / name, ROOT / "recipes" / name / "requirements.txt"
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_bytes() != wanted.read_bytes():
        command = [sys.executable, *INSTALL, str(folder), "--upgrade", "-r", str(wanted)]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # noqa: S603 - our own
        stamp.write_bytes(wanted.read_bytes())
    return folder


@pytest.mark.parametrize("name", LAST_LINES)
def test_the_program_of_a_framework_ends_as_it_should(
    name: str, daemon: FakeDaemon, tmp_path: Path
) -> None:
    program = ROOT / "recipes" / name / "run.py"
    path = os.pathsep.join(map(str, (packages(name), ROOT / "src")))

    ended = subprocess.run(  # noqa: S603 - our own
        [sys.executable, str(program), "numpy"],
        env={"HOME": str(tmp_path), "FORKD_URL": daemon.url, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == LAST_LINES[name]


def test_every_program_with_a_framework_is_tried() -> None:
    named = {path.parent.name for path in (ROOT / "recipes").glob("*/requirements.txt")}

    assert named == set(LAST_LINES)
