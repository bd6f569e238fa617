"""Build images on the user's own host, for a daemon in the helper machine.

An emulated build would take about twelve times as long.  The cache is shared with the machine,
whose daemon then finds the image there, by its contents.  The recipe itself is uploaded to it, as
to any daemon.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd import programs
from forkd.errors import BuildError, InvalidRequest, NotFound
from forkd.machine import lifecycle
from forkd.machine.kernel import default_cache

STOP_DEADLINE_S = 30.0
"""Time a build has to clean up once nobody wants it."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far a build is."""

    stage: str
    message: str
    fraction: float | None


Progress = Callable[[Step], object]


@dataclass(frozen=True, slots=True)
class Memory:
    """What the machine that is baked may have, so that one too large is refused before its build.

    Attributes:
        max_mib: Of the helper machine, asked for only if an image is built here.
        asked_mib: Of the machine, in place of the recipe's.
    """

    max_mib: Callable[[], int]
    asked_mib: int | None = None

    def arguments(self) -> list[str]:
        """Return how the image builder is told."""
        asked = [] if self.asked_mib is None else ["--memory-mib", str(self.asked_mib)]
        return [*asked, "--memory-mib-max", str(self.max_mib())]


def prepare(  # noqa: PLR0913 - a recipe, where it goes, and how it is built
    recipe: Path | str,
    url: str,
    state_dir: Path,
    progress: Progress,
    *,
    memory: Memory | None = None,
    build: Callable[[Path, Progress, Memory | None], object] | None = None,
) -> Path | str:
    """Return what a client of the daemon at `url` is given for a recipe.

    If that is the daemon in the helper machine of `state_dir`, the image is built here first;
    any other daemon builds its images itself.

    Args:
        recipe: A path of this host, or text that the daemon knows: the name of a recipe, say.
        url: Where the daemon is.
        state_dir: That of `forkd up`.
        progress: Called with each step.
        memory: Of the machine that is baked; None if none is.
        build: What builds an image; `build_image` if None.

    Raises:
        BuildError: The image could not be built.
        InvalidRequest: The recipe says something it may not, or asks for too much memory.
    """
    if not _is_our_helper(url, state_dir):
        return recipe
    path = recipe if isinstance(recipe, Path) else programs.RECIPES / recipe
    if not (isinstance(recipe, Path) or path.is_dir()):
        return recipe
    (build or build_image)(path, progress, memory)
    return path


def recipes_here(url: str, state_dir: Path) -> list[Path]:
    """Return the TOML files of the recipes that `prepare` finds by name, by name."""
    if not _is_our_helper(url, state_dir):
        return []
    return sorted(programs.RECIPES.glob("*/recipe.toml"))


def _is_our_helper(url: str, state_dir: Path) -> bool:
    """Whether a daemon is the one in the helper machine of `state_dir`."""
    try:
        daemon = lifecycle.find(state_dir)
    except NotFound:
        return False
    return daemon.mode == "helper" and daemon.url == url


def build_image(recipe: Path, progress: Progress, memory: Memory | None = None) -> dict[str, Any]:
    """Build a recipe's image into this host's cache, unless it is there; return what it is.

    Raises:
        BuildError: It could not be built.
        InvalidRequest: The recipe says something it may not, or asks for too much memory.
    """
    command = [
        *(sys.executable, "-m", "forkd.images", "build", str(recipe), "--json"),
        *("--cache", str(default_cache()), "--agent", str(programs.find(programs.AGENT))),
        *("--recipes", str(programs.RECIPES)),
        *(() if memory is None else memory.arguments()),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - ours
        try:
            return _follow(process, progress)
        except BaseException:
            _end(process)
            raise


def _follow(process: subprocess.Popen[bytes], progress: Progress) -> dict[str, Any]:
    for line in process.stdout or ():
        said: dict[str, Any] = json.loads(line)
        match said["event"]:
            case "progress":
                progress(Step(said["stage"], said["message"], said["fraction"]))
            case "built":
                return said
            case "failed":
                refused = said["code"] == InvalidRequest.code
                error = InvalidRequest if refused else BuildError
                raise error(said["message"], **said["context"])
    raise BuildError("the image builder ended without a result")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
