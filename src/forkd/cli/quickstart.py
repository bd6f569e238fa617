"""`forkd quickstart`: from a fresh installation to forks that answer, with consent."""

from __future__ import annotations

import json as json_form
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from forkd import checks, installed
from forkd.cli import render
from forkd.cli.context import shared
from forkd.cli.local_builds import prepared_to_bake
from forkd.cli.options import Json
from forkd.errors import ForkdError, HostError, InvalidRequest
from forkd.machine import host_setup, lifecycle
from forkd.machine.kernel import default_cache
from forkd.sdk import Client
from forkd.sdk._endpoint import state_dir

TAG = "quickstart"
"""The snapshot that is made."""

RECIPE = "python"

QUESTION, ANSWER = "sum(range(1_000))", 499_500

FORKS_MAX = 100
"""Most forks: each of them is an emulated machine where there is no KVM."""

DOCTOR_TIMEOUT_S = 120.0
"""Time to examine this host."""

NEEDED = (checks.DEBIAN_IMAGES,)
"""Checks that have to pass before an image can be built, though forkd runs without."""


@dataclass(frozen=True, slots=True)
class Result:
    """What was made.

    Attributes:
        mode: Where the daemon runs, `native` or `helper`.
        url: Where it answers.
        snapshot: The snapshot that was made, or was there.
        forks: How many sandboxes answered.
        forked_ms: Time until all of them ran, in ms.
        answered_ms: Time until all of them had answered from then on, in ms.
    """

    mode: str
    url: str
    snapshot: str
    forks: int
    forked_ms: int
    answered_ms: int


def register(app: Any) -> None:  # noqa: ANN401 - typer's own type
    """Add the command of this file."""
    app.command()(quickstart)


def quickstart(
    count: Annotated[
        int, typer.Option("-n", "--count", min=1, max=FORKS_MAX, help="How many forks to start.")
    ] = 10,
    *,
    yes: Annotated[
        bool,
        typer.Option(
            "-y", "--yes", help="Do all of it without asking, the host's set-up included."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Start forkd on this host, and have ten forks of a small Python answer.

    Checks this host, says what it will do and asks, starts the daemon, makes
    the snapshot `quickstart`, and forks it. What has been done is not done again.
    As root on a host with usable KVM it offers `forkd host setup` first.

    Examples:
      forkd quickstart
      forkd quickstart --yes -n 3
    """
    shared.as_json = json
    if not yes and (json or not sys.stdin.isatty()):
        raise InvalidRequest(
            "quickstart asks before it changes anything, and there is no terminal to ask on; "
            "`forkd quickstart --yes` does not ask",
            field="yes",
        )
    _examine()
    _offer_setup(yes=yes, as_json=json)
    _introduce(as_json=json)
    if not (yes or typer.confirm("Go on?", default=True, err=True)):
        raise typer.Exit(1)
    made = _made(count, as_json=json)
    if json:
        render.document(asdict(made))
    else:
        _conclude(made)


def _examine() -> None:
    """Return if this host has all that is needed.

    Raises:
        HostError: Something is missing; the message says what, and what installs it.
    """
    if (lack := installed.lacking("daemon") or installed.lacking("packs")) is not None:
        raise HostError(lack)
    command = [sys.executable, "-m", "forkd.daemon", "doctor", "--json"]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, capture_output=True, timeout=DOCTOR_TIMEOUT_S, check=False
        )
        found: list[dict[str, str]] = json_form.loads(done.stdout)
        missing = [each for each in found if _is_needed(each)]
    except (OSError, ValueError, LookupError, TypeError, subprocess.SubprocessError) as error:
        raise HostError(f"this host cannot be examined: {error}; run `forkd doctor`") from error
    if missing:
        lines = (f"\n  {each['name']}: {each['found']}\n    {each['advice']}" for each in missing)
        raise HostError(
            f"this host lacks something that forkd needs; nothing was changed:{''.join(lines)}\n"
            "Then run `forkd quickstart` again"
        )


def _is_needed(check: dict[str, str]) -> bool:
    status = check["status"]
    is_missing = check["name"] in NEEDED and status == checks.Status.WARN
    return status == checks.Status.FAIL or is_missing


def _offer_setup(*, yes: bool, as_json: bool) -> None:
    """Set this host up if that is of use, and wanted.

    Without root nothing is offered, and none of it matters to sandboxes in the helper machine.

    Raises:
        HostError: It did not run; nothing was changed.
    """
    if os.geteuid() != 0 or lifecycle.why_not_native() is not None:
        return
    changes = host_setup.changes()
    if not changes:
        return
    if not as_json:
        render.note("This host is not set up for forkd. `forkd host setup` would:")
        for change in changes:
            render.note(f"  {change.title}: {change.why}")
    if not (yes or typer.confirm("Do that? `forkd host undo` takes it back.", err=True)):
        return
    outcome = host_setup.setup()
    if not as_json:
        render.note(f"{len(outcome.done)} of them are done")
        for part, reason in outcome.refused.items():
            render.note(f"refused: {part}: {reason}")


def _introduce(*, as_json: bool) -> None:
    if as_json:
        return
    render.note(
        "This starts the forkd daemon, builds a small image of Debian 12 with Python (about 60 MB\n"
        "of packages and 80 MB of kernel are downloaded the first time), makes the snapshot\n"
        f"`{TAG}` of it, and forks that. Everything is kept in two folders of yours:\n"
        f"  {state_dir()}\n  {default_cache()}\n"
        "`forkd down --purge` removes all of it."
    )


def _made(count: int, *, as_json: bool) -> Result:
    """Start the daemon, make the snapshot and ask forks of it.

    Raises:
        ForkdError: As any of these; before, it is said what stays.
    """
    tell = (lambda _: None) if as_json else render.note
    daemon = lifecycle.up(state_dir(), progress=tell)
    try:
        with Client(daemon.url, token=_token(daemon)) as client:
            _bake(client, as_json=as_json)
            began = time.monotonic()
            with client.fork(TAG, count) as sandboxes:
                forked = time.monotonic()
                answers = [each.value for each in sandboxes.eval(QUESTION)]
                answered = time.monotonic()
    except (ForkdError, KeyboardInterrupt):
        tell("The daemon keeps running, with what was made so far: `forkd quickstart` goes on from")
        tell("there, `forkd down` ends it, and `forkd down --purge` removes everything.")
        raise
    if answers != [ANSWER] * count:
        raise HostError(f"forks answered {answers} to {QUESTION}")
    times = round(1000 * (forked - began)), round(1000 * (answered - forked))
    return Result(daemon.mode, daemon.url, TAG, count, *times)


def _token(daemon: lifecycle.RunningDaemon) -> str | None:
    return None if daemon.token_file is None else daemon.token_file.read_text("ascii").strip()


def _bake(client: Client, *, as_json: bool) -> None:
    """Make the snapshot, unless it is there."""
    if any(each.tag == TAG for each in client.snapshots.list()):
        return
    with render.steps(as_json=as_json) as steps:
        recipe = prepared_to_bake(RECIPE, client, steps, None)
        client.snapshots.create(TAG, recipe, on_progress=steps)


def _conclude(made: Result) -> None:
    where = "on this host" if made.mode == "native" else "in the helper machine, which is slower"
    render.note(
        f"{made.forks} forks ran after {made.forked_ms} ms, and each had answered {ANSWER} after "
        f"{made.answered_ms} ms more.\n"
        f"The daemon runs {where}. The forks are gone; the snapshot `{TAG}` stays. Next:\n"
        f"  forkd run -it {TAG}\n"
        f"  forkd run {TAG} -- python3 -c 'print(6 * 7)'\n"
        "  forkd snapshot create numpy --recipe python-numpy\n"
        "To end it: `forkd down`. To remove all of it: `forkd down --purge`, then\n"
        "`forkd host undo` if this host was set up, and uninstall the package."
    )
