"""Build images on the user's own host, for a daemon in the helper machine.

An emulated build would take about twelve times as long.  The cache is shared with the machine,
whose daemon then finds the image there, by its contents.  So is a copy of the recipe: the machine
sees the host's files as they were when it started, and not those below /tmp.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd import programs
from forkd.errors import BuildError, NotFound
from forkd.machine import lifecycle
from forkd.machine.kernel import default_cache

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPE_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of a recipe's folder: it is copied, and was perhaps somebody's home."""

STOP_DEADLINE_S = 30.0
"""Time a build has to clean up once nobody wants it."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far a build is."""

    stage: str
    message: str
    fraction: float | None


def prepare(recipe: Path, url: str, state_dir: Path, progress: Callable[[Step], object]) -> Path:
    """Return the recipe as the daemon at `url` will find it.

    If that is the daemon in the helper machine of `state_dir`, its image is built here first;
    any other daemon builds its images itself.

    Raises:
        BuildError: The image could not be built.
    """
    try:
        daemon = lifecycle.find(state_dir)
    except NotFound:
        return recipe
    if daemon.mode != "helper" or daemon.url != url:
        return recipe
    build_image(recipe, progress)
    return copy_where_seen(recipe)


def copy_where_seen(recipe: Path) -> Path:
    """Copy a recipe's folder to where the helper machine sees it, named by its contents."""
    folder = recipe.parent if recipe.is_file() else recipe
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    if sum(each.stat().st_size for each in files) > RECIPE_BYTES_MAX:
        raise BuildError(
            f"{folder} holds more than {RECIPE_BYTES_MAX} bytes: no folder of a recipe"
        )
    digest = hashlib.sha256()
    for each in files:
        contents = each.read_bytes()
        digest.update(f"{each.relative_to(folder)}\0{len(contents)}\0".encode() + contents)
    target = default_cache() / "recipes" / digest.hexdigest()[:32]
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as aside:
            copy = shutil.copytree(folder, Path(aside) / folder.name)
            with contextlib.suppress(FileExistsError):
                copy.rename(target)
    return target / recipe.name if recipe.is_file() else target


def build_image(recipe: Path, progress: Callable[[Step], object]) -> dict[str, Any]:
    """Build a recipe's image into this host's cache, unless it is there; return what it is.

    Raises:
        BuildError: It could not be built.
    """
    command = [
        *(sys.executable, "-m", "forkd.images", "build", str(recipe), "--json"),
        *("--cache", str(default_cache()), "--agent", str(programs.find(programs.AGENT))),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        try:
            return _follow(process, progress)
        except BaseException:
            _end(process)
            raise


def _follow(process: subprocess.Popen[bytes], progress: Callable[[Step], object]) -> dict[str, Any]:
    for line in process.stdout or ():
        said: dict[str, Any] = json.loads(line)
        match said["event"]:
            case "progress":
                progress(Step(said["stage"], said["message"], said["fraction"]))
            case "built":
                return said
            case "failed":
                raise BuildError(said["message"], **said["context"])
    raise BuildError("the image builder ended without a result")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
