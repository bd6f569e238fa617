"""Bake each recipe once per test run, and give what came of it to any number of hosts.

A bake takes half a minute where machines are emulated, and most tests are about what is done with a
snapshot, not about how it is made.  The files of a copy are hard links wherever the file system can
have them, because nothing changes a stored file in place.  A test that damages one gives itself a
file of its own first, with `unshare`; if it forgets to, the next copy is refused.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host import files
from forkd.model.snapshot import Snapshot, SnapshotRequest
from forkd.service.host import open_host
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in
from tests.support.real_host import STATE_PARENT, TAG, fresh_folders

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED = ("images", "snapshots")
"""What there is of a bake in a state folder."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "together(name): modules that one machine should run, as they share a bake"
    )


class Bake:
    """What a bake has left in a state folder, which no daemon uses."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._files = self._look()

    def copy_to(self, state: Path) -> None:
        """Put everything into a state folder in which nothing is stored yet."""
        changed = {path for path, was in self._look().items() if self._files.get(path) != was}
        assert not changed, f"{changed}: a test changed a stored file in place without `unshare`"
        for name in STORED:
            shutil.copytree(
                self._state / name, state / name, symlinks=True, copy_function=_link_or_copy
            )

    def _look(self) -> dict[Path, tuple[int, int]]:
        """Return size and time of change of every stored file."""
        paths = [path for name in STORED for path in (self._state / name).rglob("*")]
        found = {path: path.lstat() for path in paths if path.is_file()}
        return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


class Bakes:
    """The bakes of one test run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[tuple[tuple[str, bytes], ...], Bake] = {}

    def of(self, recipe: Path) -> Bake:
        """Return the bake of a recipe, made on first use; blocks.

        Recipes with the same files are the same recipe, wherever they lie.
        """
        paths = sorted(path for path in recipe.rglob("*") if path.is_file())
        key = tuple((str(path.relative_to(recipe)), path.read_bytes()) for path in paths)
        if key not in self._made:
            # A thread of its own, because ours may run an event loop already.
            with ThreadPoolExecutor(1) as pool:
                state = pool.submit(asyncio.run, _bake(recipe, self._folder)).result()
            self._made[key] = Bake(state)
        return self._made[key]


@pytest.fixture(scope="session")
def bakes() -> Iterator[Bakes]:
    """What was baked in this run; nothing is left of it afterwards."""
    STATE_PARENT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="test-bakes-", dir=STATE_PARENT) as folder:
        yield Bakes(Path(folder))


def unshare(path: Path) -> None:
    """Give a host a stored file of its own, which a test may damage."""
    contents = path.read_bytes()
    path.unlink()
    path.write_bytes(contents)


def lead_to_cache(state: Path) -> None:
    """Have the stored images of a copy be links into the user's cache.

    They lead there by way of the folder of the bake, which another root may not have.
    """
    for link in filter(Path.is_symlink, (state / "images").rglob("*")):
        image = link.resolve()
        link.unlink()
        link.symlink_to(image)


async def _bake(recipe: Path, parent: Path) -> Path:
    """Bake a recipe under `TAG`, in a service that has ended then; return its state folder."""
    state, run_dir = fresh_folders(parent)
    request = SnapshotRequest(TAG, recipe)
    try:
        async with open_host(settings_in(state, run_dir)) as service:
            *_, made = [event async for event in service.snapshots.bake(CALLER, request)]
        assert isinstance(made, Snapshot)
    finally:
        shutil.rmtree(run_dir)
    return state


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        files.copy_sparse(Path(source), Path(target))
