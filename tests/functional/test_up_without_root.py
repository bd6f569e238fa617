"""An ordinary user on a host with a usable KVM: `forkd up` is native, and goes as far as it can."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.images.layout import default_cache_folder
from tests.support.real_host import RECIPE, TAG
from tests.support.rootless_daemon import USER, as_user, unmount

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.bakes import Bakes

pytestmark = [
    pytest.mark.soak(only=True),
    pytest.mark.needs("kvm", "root", "binaries", "cgroup2"),
    pytest.mark.timeout(900),
]

SYSTEM_PYTHON = "/usr/bin/python3"
"""One that every user may execute: that of the tests may be in the home folder of root."""

SERVER = "python3 -m http.server 8000 >/dev/null 2>&1 & sleep 0"


class Home:
    """The user's home, and the command line in it.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._env = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }

    def command(self, *words: str) -> list[str]:
        return as_user([SYSTEM_PYTHON, "-m", "forkd", *words])

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - our own
            self.command(*words), capture_output=True, text=True, check=False,
            env=self._env, cwd="/", timeout=600,
        )  # fmt: skip

    def said(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 0, done
        return done.stdout

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command within the block."""
        with subprocess.Popen(  # noqa: S603 - our own
            self.command(*words), env=self._env, cwd="/", stdout=subprocess.PIPE, text=True
        ) as running:
            try:
                yield running
            finally:
                running.kill()


@pytest.fixture
def home(bakes: Bakes) -> Iterator[Home]:
    """A user's home, with root's images in its cache, as a user builds them elsewhere."""
    bakes.of(RECIPE)
    with contextlib.ExitStack() as mounts:
        folder = Path(mounts.enter_context(tempfile.TemporaryDirectory(prefix="fk", dir="/tmp")))
        for name in ("images", "kernels"):
            path = folder / ".cache/forkd" / name
            path.mkdir(parents=True)
            subprocess.run(  # noqa: S603 - our own
                ["/usr/bin/mount", "--bind", default_cache_folder() / name, path], check=True
            )
            mounts.callback(unmount, path)
        for path in (folder, folder / ".cache", folder / ".cache/forkd"):
            os.chown(path, USER, USER)
        home = Home(folder)
        mounts.callback(home.run, "down")
        yield home


def test_up_is_native_forks_and_says_what_root_would_add(home: Home) -> None:
    up = home.run("up")
    assert "forkd runs on this host" in up.stderr, up
    assert "without root" in up.stderr
    assert "`sudo forkd up`" in up.stderr

    home.said("snapshot", "create", str(TAG), "--recipe", str(RECIPE))
    ids = home.said("fork", str(TAG), "-n", "3").split()
    assert len(ids) == 3
    assert [home.said("eval", each, "6 * 7") for each in ids] == ["42\n"] * 3

    refused = home.run("fork", str(TAG), "--network", "example.com:443")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[0].startswith("error: ")
    assert "only if the daemon is root" in refused.stderr
    assert "`sudo forkd up`" in refused.stderr
    assert len(home.said("ls", "-o", "{id}").split()) == 3

    home.said("exec", ids[0], "--", "sh", "-c", SERVER)
    with home.started("port", ids[0], "0:8000") as forwarding:
        assert forwarding.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+) -> ", forwarding.stdout.readline())
        assert found is not None

    checks = {each["name"]: each for each in json.loads(home.run("doctor", "--json").stdout)}
    assert checks["daemon"]["status"] == "PASS"
    assert "(the daemon of this host), with 3 sandboxes" in checks["daemon"]["found"]
    assert checks["privileges"]["found"] == "not root"
    assert "gives sandboxes a network, limits, and a user each" in checks["privileges"]["advice"]
    assert "no limits of sandboxes, no networks" in checks["host of the daemon"]["found"]
    assert checks["KVM"]["status"] == "PASS"

    assert home.run("down").returncode == 0
    assert not (home.folder / ".local/state/forkd/run").exists()
    assert home.run("ls").returncode == 7
