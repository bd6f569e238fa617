"""`forkd wait`: how long sandboxes live."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import EXIT_TIMED_OUT, shared
from forkd.cli.options import Ids, Json
from forkd.cli.units import duration, shown_duration
from forkd.errors import ForkdError, NotFound

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands
    from forkd.sdk import Sandbox

AGAIN_S = 1.0
"""How soon to look again at a sandbox that does not run and has not ended."""

GONE = "deleted"
"""Why a sandbox ended of which the daemon knows no more."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command()(wait)


def wait(
    sandboxes: Ids,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration,
            help="Stop waiting after this time and exit with 124.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Wait until sandboxes have ended, and print why each did.

    Examples:
      forkd wait sb-7q66th9abcde
      forkd wait --timeout 10m sb-7q66th9abcde sb-q4hd2mzwxyab
    """
    ended: dict[str, str] = {}
    with shared.client(as_json=json) as client:
        waited = {each.id: each for each in map(client.sandboxes.get, sandboxes)}
        reports: SimpleQueue[tuple[str, str | ForkdError]] = SimpleQueue()
        for each in waited.values():
            threading.Thread(target=_watch, args=(each, reports), daemon=True).start()
        until_s = None if timeout is None else monotonic() + timeout
        try:
            while len(ended) < len(waited):
                left_s = None if until_s is None else max(0.0, until_s - monotonic())
                id_, why = reports.get(timeout=left_s)
                if isinstance(why, ForkdError):
                    raise why
                ended[id_] = why
                if not json:
                    typer.echo(f"{id_} {why}")
        except Empty:
            render.note(f"timed out after {shown_duration(timeout or 0)}")
    if json:
        render.document([{"id": id_, "reason": why} for id_, why in ended.items()])
    if len(ended) < len(waited):
        raise typer.Exit(EXIT_TIMED_OUT)


def _watch(sandbox: Sandbox, reports: SimpleQueue[tuple[str, str | ForkdError]]) -> None:
    """Report why a sandbox ended, once it has."""
    while True:
        try:
            info = sandbox.refresh()
            if info.exit_reason is not None or info.status == "exited":
                reports.put((sandbox.id, info.exit_reason or info.status))
                return
            for _ in sandbox.follow_logs():
                pass  # the console's log goes on while the sandbox runs
            if sandbox.refresh().status not in {"exited", "running"}:
                sleep(AGAIN_S)  # it is starting, stopping or paused
        except NotFound:
            reports.put((sandbox.id, GONE))
            return
        except ForkdError as error:
            reports.put((sandbox.id, error))
            return
