"""Warm a guest up as its recipe says: run its lines, start its runtime, wait until it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.engine import guest_bake
from forkd.engine.guest_bake import GuestDefaults, WarmUpPlan
from forkd.engine.guest_exec import GuestExec
from forkd.errors import BuildError, NotFound
from forkd.limits import RUN_LINE_TIMEOUT_S
from forkd.model.exec import ExecRequest, Exited, Stderr, Stdout
from forkd.model.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.engine.guest import Guest
    from forkd.images.plan import ImageConfig
    from forkd.images.recipe import Recipe, WarmUp

LINE_CHARS_MAX = 200
"""How much of a line that the guest prints is shown as progress."""

LAST_LINES = 10
"""How many of them go into the error of a line that failed."""

PROBE_TIMEOUT_S = 60.0
"""How long an interpreter may take to say its version, on a slow host."""

OFFLINE = ("resolve", "resolution", "network is unreachable", "network unreachable")
"""What programs say that find no network."""

NO_NETWORK = (
    "a machine has no network while it is baked; run this on top of the snapshot instead: "
    "forkd snapshot create NEW --from TAG --network internet --exec COMMAND"
)

SHELL = ("sh", "-c")
"""What reads a line."""

_PYTHON = ("python3", "-c", "import sys; sys.exit(sys.version_info < (3, 8))")
"""Exits with 0 if it is an interpreter that can be the warm runtime."""


async def warm_up(
    guest: Guest, recipe: Recipe, config: ImageConfig, tell: Callable[[Progress], None]
) -> str:
    """Set a guest up and warm it; return the name of its runtime, or `none`.

    A runtime that runs already goes on, with what it has loaded.

    Raises:
        BuildError: A line to run failed, or the image has no shell to run it.
        WarmUpError: The warm-up failed, or was not ready in time.
        ForkdError: As `Guest.ask`.
    """
    warmup = recipe.warmup
    await guest_bake.configure(guest, _defaults(recipe, config))
    for line in warmup.run:
        await _run_line(guest, line, tell)
    runtime = await _runtime(guest, warmup)
    if runtime == "none" and warmup.ready is None:
        return runtime
    tell(Progress("warm", 0.0, f"warming up {recipe.name}"))

    def show(output: bytes) -> None:
        for line in _lines(output):
            tell(Progress("warm", None, line))

    took_s = await guest_bake.warm(guest, _warm_up_plan(warmup, runtime), show)
    tell(Progress("warm", 1.0, f"warm after {took_s:.1f} s"))
    return runtime


async def _run_line(guest: Guest, line: str, tell: Callable[[Progress], None]) -> None:
    """Run one shell line, and tell what it prints.

    Raises:
        BuildError: It failed, or there is no shell.
    """
    tell(Progress("run", None, line[:LINE_CHARS_MAX]))
    last: list[str] = []
    request = ExecRequest((*SHELL, line), timeout_s=RUN_LINE_TIMEOUT_S)
    try:
        session = await GuestExec.start(guest, request)
    except NotFound as error:
        raise BuildError(
            f"cannot run {_short(line)!r}: the image has no shell (`sh`); leave `run` out, or take "
            "an image with a shell",
            field="run",
        ) from error
    async with session:
        async for event in session:
            match event:
                case Stdout(data) | Stderr(data):
                    last = [*last, *_lines(data)][-LAST_LINES:]
                    for each in _lines(data):
                        tell(Progress("run", None, each))
                case Exited():
                    _check(line, event, last)


def _check(line: str, ended: Exited, last: list[str]) -> None:
    if ended.exit_code == 0:
        return
    how = f"exited with {ended.exit_code}"
    if ended.signal is not None:
        how = f"was ended by signal {ended.signal}"
    if ended.timed_out:
        how = f"was not done after {RUN_LINE_TIMEOUT_S:.0f} s"
    said = "\n".join(last) or "it printed nothing"
    if any(words in said.lower() for words in OFFLINE):
        said += f"\n{NO_NETWORK}"
    raise BuildError(f"{_short(line)!r} {how}: {said}", field="run")


async def _runtime(guest: Guest, warmup: WarmUp) -> str:
    """Return the runtime that is started: for `auto`, Python if the image has it."""
    if warmup.runtime != "auto":
        return warmup.runtime
    try:
        session = await GuestExec.start(guest, ExecRequest(_PYTHON, timeout_s=PROBE_TIMEOUT_S))
    except NotFound:
        return "none"
    async with session:
        async for event in session:
            if isinstance(event, Exited) and event.exit_code == 0:
                return "python"
    return "none"


def _lines(output: bytes) -> list[str]:
    text = output.decode(errors="replace")
    return [line[:LINE_CHARS_MAX] for line in text.splitlines() if line.strip()]


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]}…"


def _defaults(recipe: Recipe, config: ImageConfig) -> GuestDefaults:
    return GuestDefaults(
        env=config.env,
        cwd=config.cwd,
        user=config.user,
        post_fork=recipe.warmup.post_fork,
        post_fork_command=config.post_fork_command,
    )


def _warm_up_plan(warmup: WarmUp, runtime: str) -> WarmUpPlan:
    return WarmUpPlan(
        runtime=None if runtime == "none" else runtime,
        code=warmup.code,
        ready=None if warmup.ready is None else warmup.ready.command,
        timeout_s=warmup.timeout_s,
    )
