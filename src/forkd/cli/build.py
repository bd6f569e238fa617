"""`forkd build`: a snapshot from a Dockerfile, or the image of a recipe."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from forkd.cli import complete, render
from forkd.cli.context import shared
from forkd.cli.images import MACHINE, MachineDisk, MachineMemory, Vcpus
from forkd.cli.local_builds import prepared
from forkd.cli.names import network_rule
from forkd.cli.options import Json
from forkd.cli.units import duration
from forkd.errors import InvalidRequest
from forkd.sdk._dockerfile.opening import is_dockerfile_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.cli.help_text import Commands
    from forkd.sdk._results import BuildResult, BuildStep
    from forkd.wire.v2 import ProgressEvent

RECIPE_FILE = "recipe.toml"

DOCKERFILE = "Dockerfile"
"""The section of the help with options of builds of Dockerfiles."""

STEP_CHARS_MAX = 100
"""How much of an instruction a line shows."""

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="CONTEXT|RECIPE",
        help="The folder that COPY takes files from; or a recipe's name, folder or TOML file.",
        autocompletion=complete.recipes,
    ),
]
File = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        rich_help_panel=DOCKERFILE,
        help="The Dockerfile; Dockerfile in the context unless set.",
    ),
]
NewTag = Annotated[
    str | None,
    typer.Option(
        "--tag",
        "-t",
        metavar="TAG",
        rich_help_panel=DOCKERFILE,
        help="Name of the snapshot; one that a build made is replaced.",
    ),
]
BuildArg = Annotated[
    list[str] | None,
    typer.Option(
        "--build-arg",
        metavar="KEY=VALUE",
        rich_help_panel=DOCKERFILE,
        help="Value of an ARG; KEY alone takes it from the environment.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="STAGE", rich_help_panel=DOCKERFILE, help="Stage to build; the last one unless set."
    ),
]
NoCache = Annotated[
    bool, typer.Option("--no-cache", rich_help_panel=DOCKERFILE, help="Run every step again.")
]
Pull = Annotated[
    Literal["missing", "always"],
    typer.Option(
        "--pull",
        rich_help_panel=DOCKERFILE,
        help="always: ask the registry which image a FROM stands for.",
    ),
]
Network = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        parser=network_rule,
        rich_help_panel=DOCKERFILE,
        help="What RUN steps may reach; see `forkd fork --help`.",
    ),
]
Warm = Annotated[
    bool,
    typer.Option(
        "--warm", rich_help_panel=MACHINE, help="Start ENTRYPOINT and CMD; forks have it running."
    ),
]
Ready = Annotated[
    str | None,
    typer.Option(
        "--ready",
        metavar="COMMAND",
        rich_help_panel=MACHINE,
        help="With --warm: freeze the machine once this shell command exits with 0.",
    ),
]
StepTimeout = Annotated[
    float | None,
    typer.Option(
        "--step-timeout",
        metavar="DURATION",
        parser=duration,
        rich_help_panel=DOCKERFILE,
        help="Time limit of each step; 1h unless set.",
    ),
]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command()(build)


def build(  # noqa: PLR0913 - one for each option
    source: Source = None,
    *,
    file: File = None,
    tag: NewTag = None,
    build_arg: BuildArg = None,
    target: Target = None,
    no_cache: NoCache = False,
    pull: Pull = "missing",
    network: Network = None,
    step_timeout: StepTimeout = None,
    memory: MachineMemory = None,
    vcpus: Vcpus = None,
    disk: MachineDisk = None,
    warm: Warm = False,
    ready: Ready = None,
    json: Json = False,
) -> None:
    """Build a snapshot from a Dockerfile, or the image of a recipe.

    A folder that has a Dockerfile and no recipe.toml, and -f, mean a Dockerfile.  Each RUN, COPY
    and ADD is done in a sandbox and becomes a link of a chain; a later build goes on behind the
    last link that is the same.

    Examples:
      forkd build -t app .
      forkd build -t app -f docker/Dockerfile --build-arg VERSION=3 --network internet .
      forkd build -t db --warm --ready 'pg_isready' ./db
      forkd build python-numpy
    """
    if not _is_dockerfile(source, file):
        given = (tag, build_arg, target, network, memory, vcpus, disk, ready)
        if any(given) or no_cache or warm or pull != "missing":
            raise InvalidRequest(
                f"{source} is a recipe, for which there are no options; with -f FILE a Dockerfile "
                "is built",
                field="source",
            )
        _recipe(source or "", json=json)
        return
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:

        def tell(step: BuildStep) -> None:
            _tell(step, steps, as_json=json)

        made = client.builds.build(
            source or ".",
            dockerfile=file,
            tag=tag,
            build_args=_build_args(build_arg),
            target=target,
            cache=not no_cache,
            pull=pull,
            network=network or None,
            memory_mib=memory,
            vcpus=vcpus,
            disk_mib=disk,
            warm=warm,
            ready=ready,
            step_timeout_s=step_timeout,
            on_step=tell,
            on_progress=_progress(steps),
        )
    _show(made, as_json=json)


def _is_dockerfile(source: str | None, file: str | None) -> bool:
    if file is not None or source is None:
        return True
    folder = Path(source).expanduser()
    return is_dockerfile_folder(folder) and not (folder / RECIPE_FILE).is_file()


def _recipe(recipe: str, *, json: bool) -> None:
    with shared.client(as_json=json) as client, render.steps(as_json=json) as steps:
        made = client.images.build(prepared(recipe, client, steps), on_progress=steps)
    if json:
        render.document(made)
    else:
        render.note(f"image {made.name}: {made.key}")


def _build_args(texts: list[str] | None) -> dict[str, str]:
    """Return build arguments; a name alone has its value in the environment.

    Raises:
        InvalidRequest: It has none there, or the name is empty.
    """
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name:
            raise InvalidRequest(f"--build-arg: {text[:80]!r} has no name", field="build_arg")
        if not equals and name not in os.environ:
            raise InvalidRequest(
                f"--build-arg {name}: the environment has no such variable; write {name}=VALUE",
                field="build_arg",
            )
        found[name] = value if equals else os.environ[name]
    return found


def _progress(steps: render.Steps) -> Callable[[ProgressEvent], object]:
    """Return what shows what happens within a step: on a terminal alone."""
    ours = {"step", "run", "copy", "warm", "save"}

    def show(event: ProgressEvent) -> None:
        if steps.is_live or event.stage not in ours:
            steps(event)

    return show


def _tell(step: BuildStep, steps: render.Steps, *, as_json: bool) -> None:
    """Show an instruction that is done, in a line."""
    if as_json:
        return
    text = step.text
    if len(text) > STEP_CHARS_MAX:
        text = f"{text[: STEP_CHARS_MAX - 1]}…"
    how = ""
    if step.changes_files:
        how = "  cached" if step.cached else f"  {step.seconds:.1f}s"
    width = len(str(step.total))
    steps.say(f"[{step.number:>{width}}/{step.total}] {text}{how}")


def _show(made: BuildResult, *, as_json: bool) -> None:
    if as_json:
        render.document(
            {
                "snapshot": render.plain(made.snapshot),
                "steps": [asdict(step) for step in made.steps],
                "warnings": list(made.warnings),
            }
        )
        return
    for warning in made.warnings:
        render.note(f"warning: {warning}")
    done = [step for step in made.steps if step.changes_files]
    cached = sum(step.cached for step in done)
    render.note(f"snapshot {made.snapshot.tag}: {len(done) - cached} steps done, {cached} cached")
