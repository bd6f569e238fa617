"""What a package's maintainer script gets at of the host that builds an image with it: nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host.cells import python_paths
from forkd.images import apart
from forkd.images.builder import build_rootfs
from forkd.images.layout import Cache
from forkd.images.recipe import parse_recipe
from forkd.images.steps import Build
from tests.support.docs import tries_in
from tests.support.ext4 import listing, read
from tests.support.hostile_package import NAME, REPORT, WITH_ARCHIVE, cells, write_archive

if TYPE_CHECKING:
    from forkd.images.builder import Rootfs

pytestmark = [
    pytest.mark.needs("root", "binaries", "mmdebstrap", "network"),
    pytest.mark.timeout(900),
]

TRIES_LEAST = 60
BACKGROUND = "forkd-hostile-stays"
SECRET = b"secret of the host"


def staying() -> list[str]:
    """Return the processes that a package has left behind."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                command = (each / "cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if BACKGROUND.encode() in command:
                found.append(each.name)
    return found


def shown_of_root() -> str:
    """Return what is shown of root's home folder: where our Python is, if it is there."""
    home = Path("/root")
    shown = {each.relative_to(home).parts[0] for each in python_paths() if home in each.parents}
    return min(shown, default="")


def built(tmp_path: Path, cache: Path, archive: Path) -> Rootfs:
    table = {
        "name": "hostile",
        "image": {"debian": {"packages": [NAME]}},
        "machine": {"disk_mib": 700},
    }
    recipe = parse_recipe(table, folder=tmp_path)
    return build_rootfs(recipe, Cache.open(cache), Build(), cells(archive))


@pytest.mark.soak(only=True)
def test_a_hostile_package_is_refused_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    for name in ("token", "forkd.db"):
        (state / name).write_bytes(SECRET)
        (state / name).chmod(0o644)  # that it is not there is what keeps it
    marker = Path(f"/tmp/forkd-hostile-{os.getpid()}")
    marker.write_bytes(SECRET)
    abstract = f"forkd-hostile-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0{abstract}")
        named.listen()
        words = {
            "TOKEN": state / "token",
            "DATABASE": state / "forkd.db",
            "STATE": state,
            "MARKER": marker,
            "SHOWN": shown_of_root(),
            "CACHE": tmp_path / "cache",
            "PID": os.getpid(),
            "PORT": server.getsockname()[1],
            "ABSTRACT": abstract,
            "BACKGROUND": BACKGROUND,
        }
        archive = write_archive(tmp_path / "package", words)
        tools = {**apart.TOOLS, "mmdebstrap": WITH_ARCHIVE.format(archive=archive)}
        monkeypatch.setattr(apart, "TOOLS", tools)
        try:
            root = built(tmp_path, tmp_path / "cache", archive)
        finally:
            marker.unlink()

    said = [line.split("\t") for line in read(root.path, REPORT).decode().splitlines()]
    escaped, *tries = said
    assert escaped == ["escaped", "yes"]  # what it tried was tried outside of its root file system
    assert [each for each in tries if each[2] != "refused"] == []
    assert len(tries) >= TRIES_LEAST
    told = tries_in("What a hostile package was refused")
    assert {(group, name) for group, name, *_ in tries} == told
    assert staying() == []
    assert not Path("/etc/forkd-hostile").exists()
    assert not Path("/usr/forkd-hostile").exists()
    assert listing(root.path, "/etc")["passwd"].uid == 0
