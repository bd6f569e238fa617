"""The root of the container image, made without Docker by the steps of its Dockerfile.

The Dockerfile is read by `forkd build`'s own reader, so no step of it is written down a second
time.  Its base is made from Debian's packages.  What the steps before the first COPY leave is kept,
and so is the whole until the wheel or the Dockerfile changes.

In the helper machine, which has no network, it is the one that was made last on the host outside:
`tests.machine.run` makes it before the machine boots.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.sdk._dockerfile.context import Context
from forkd.sdk._dockerfile.plan import Base, RunAction, StagePlan, Wish, plan
from forkd.sdk._dockerfile.settings import Config
from forkd.sdk._dockerfile.stages import parse
from tests.support import fresh_root, needs, wheels
from tests.support.docs import ROOT

if TYPE_CHECKING:
    from forkd.sdk._dockerfile.plan import Step

DOCKERFILE = ROOT / "packaging/container/Dockerfile"

RELEASES = {"debian:bookworm-slim": "bookworm"}
"""Debian's releases, by the base images that have nothing else in them."""

NAME = "container"
"""What folders of images are called, before their keys."""

STEP_TIMEOUT_S = 900

STEP = f"""\
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mount -t proc none proc
mount --rbind /dev dev
for file in /etc/resolv.conf {fresh_root.CERTIFICATES}; do
    [ ! -e $file ] || [ ! -e .$file ] || mount --bind $file .$file
done
shift
exec chroot . "$@"
"""
"""What is run for a step, in new namespaces: the root, and then the step's program."""


@dataclass(frozen=True, slots=True)
class ContainerImage:
    """An image.

    Attributes:
        root: Its files, which nobody writes to.
        config: What it says of programs in it.
    """

    root: Path
    config: Config


def planned(context: Path) -> StagePlan:
    """Return what the Dockerfile does with the files of a folder."""
    wish = Wish(parse(DOCKERFILE.read_text(), DOCKERFILE.name), {}, None, Context(context, None))
    bases = {name: Base(name, RELEASES[name], Config(), 0) for name in wish.images()}
    (stage,) = plan(wish, bases).stages
    return stage


def made(wheel: Path) -> ContainerImage:
    """Return the image with a wheel, made if need be.

    Args:
        wheel: The wheel, alone in a folder.
    """
    stage = planned(wheel.parent)
    assert isinstance(stage.base, Base)
    folder = _folder(NAME, stage.key)
    if not folder.is_dir():
        before = [each for each in stage.steps if _is_alone(stage, each)]
        after = stage.steps[len(before) :]
        _keep(NAME, folder, _under(stage.base, before), after, wheel.parent)
    return ContainerImage(folder, stage.config)


def built() -> ContainerImage:
    """Return the image of this checkout's wheel, made if need be."""
    with tempfile.TemporaryDirectory() as folder:
        return made(wheels.built("platform", Path(folder)))


def made_before() -> ContainerImage:
    """Return the image that was made last; nothing is made.

    Raises:
        AssertionError: There is none.
    """
    found = [each for each in fresh_root.CACHE.glob(f"{NAME}_*") if each.suffix != ".partial"]
    assert len(found) == 1, f"{found}: one image is made by `tests.machine.run`, outside"
    return ContainerImage(found[0], config())


@pytest.fixture(scope="session")
def container_image() -> ContainerImage:
    """The image of this checkout's wheel."""
    return made_before() if needs.PROBES["helper"]() else built()


def config() -> Config:
    """Return what the image says of programs in it, without making it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "forkd_vm-0-py3-none-manylinux_2_17_x86_64.none.whl").touch()
        return planned(Path(folder)).config


def _is_alone(stage: StagePlan, step: Step) -> bool:
    """Whether neither a step nor one before it has files of the context."""
    index = stage.steps.index(step)
    return all(isinstance(each.action, RunAction) for each in stage.steps[: index + 1])


def _under(base: Base, steps: list[Step]) -> Path:
    """Return the root that the steps before the first COPY leave."""
    bare = fresh_root.made(f"{base.identity}-bare", (), base.identity)
    folder = _folder("container-packages", steps[-1].key)
    if not folder.is_dir():
        _keep("container-packages", folder, bare, tuple(steps), Path())
    return folder


def _folder(name: str, key: str) -> Path:
    return fresh_root.CACHE / f"{name}_{key[:16]}"


def _keep(name: str, folder: Path, lower: Path, steps: tuple[Step, ...], context: Path) -> None:
    """Do steps on a copy of a root, and keep it instead of what had that name."""
    for old in fresh_root.CACHE.glob(f"{name}_*"):
        shutil.rmtree(old)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        _checked("cp", "-a", "--reflink=auto", lower, partial)
        for step in steps:
            _do(step, partial, context)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _do(step: Step, root: Path, context: Path) -> None:
    action = step.action
    if isinstance(action, RunAction):
        assert action.script is None
        variables = {"PATH": fresh_root.SH_PATH, **fresh_root.indexes(), **action.env}
        settings = [f"{name}={value}" for name, value in variables.items()]
        unshare = (*fresh_root.UNSHARE, "--mount", "--pid")
        _checked(*unshare, "sh", "-c", STEP, "sh", root, "env", "-i", *settings, *action.args)
        return
    assert action.origin is None
    assert action.is_folder
    target = root / action.target.lstrip("/")
    target.mkdir(parents=True, exist_ok=True)
    for part in action.parts:
        assert part.entry is not None
        shutil.copy(context / part.entry.path, target / part.name)


def _checked(*command: str | Path) -> None:
    done = subprocess.run(  # noqa: S603 - a test's own
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=STEP_TIMEOUT_S,
    )  # fmt: skip
    said = shlex.join(map(str, command[-3:]))
    assert done.returncode == 0, f"{said}: {done.stdout}{done.stderr}"


def main() -> None:
    """Make the image of this checkout's wheel."""
    sys.stdout.write(f"{built().root}\n")


if __name__ == "__main__":
    main()
