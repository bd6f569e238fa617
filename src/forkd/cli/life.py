"""`forkd ttl`, `rename`, `pause`, `resume`, `wait`: how sandboxes live, and their names."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from forkd.cli import render
from forkd.cli.context import EXIT_TIMED_OUT, shared
from forkd.cli.names import label_changes
from forkd.cli.options import Id, Ids, Json
from forkd.cli.sandbox_info import expiry_shown
from forkd.cli.units import duration, shown_duration
from forkd.errors import ForkdError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.cli.help_text import Commands
    from forkd.sdk import Sandbox
    from forkd.wire.v2 import SandboxInfo

AGAIN_S = 1.0
"""How soon to look again at a sandbox that does not run and has not ended."""

NEVER = "never"
"""When a sandbox ends that lives until it is killed."""

GONE = "deleted"
"""Why a sandbox ended of which the daemon knows no more."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    for command in (ttl, rename, label, pause, resume, wait):
        app.command()(command)
    app.command("unpause")(resume)


def ttl(
    sandbox: Id,
    end: Annotated[
        str | None,
        typer.Argument(
            metavar="DURATION",
            help="When it ends, counted from now: 1h, `default` (of the daemon), or `never`.",
        ),
    ] = None,
    *,
    idle: Annotated[
        str | None,
        typer.Option(
            "--idle",
            metavar="DURATION",
            help="End it once nobody has used it for this time; `never` ends that.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show or change when a sandbox ends by itself.

    A program, an evaluation, a file, a connection or a change uses a sandbox; `ping` does not.

    Examples:
      forkd ttl sb-7q66th9abcde
      forkd ttl sb-7q66th9abcde 1h
      forkd ttl sb-7q66th9abcde never
      forkd ttl sb-7q66th9abcde --idle 10m
    """
    ttl_s: float | Literal["default"] | None = None
    if end == "default":
        ttl_s = "default"
    elif end is not None:
        ttl_s = _time(end, "DURATION", "`default` or `never`")
    idle_ttl_s = None if idle is None else _time(idle, "--idle", "`never`")
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        info = found.info if end is None else found.set_ttl(ttl_s)
        info = info if idle is None else found.set_idle_ttl(idle_ttl_s)
    if json:
        render.document(info)
    else:
        typer.echo(expiry_shown(info) or NEVER)


def _time(typed: str, where: str, others: str) -> float | None:
    """Return a time in seconds; None for never."""
    if typed == NEVER:
        return None
    try:
        time_s = duration(typed)
    except typer.BadParameter as error:
        field = "ttl_secs" if where == "DURATION" else "idle_ttl_secs"
        raise InvalidRequest(f"{where}: {error.message}, or {others}", field=field) from None
    shared.typed[where] = time_s
    return time_s


def rename(
    sandbox: Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its new name; empty for no name.")],
    *,
    json: Json = False,
) -> None:
    """Give a sandbox another name.

    Commands take a sandbox's name in the place of its id.

    Examples:
      forkd rename sb-7q66th9abcde db
      forkd rename db ''
    """
    with shared.client(as_json=json) as client:
        info = client.sandboxes.get(sandbox).rename(name or None)
    if json:
        render.document(info)
    else:
        typer.echo(info.name or info.id)


def label(
    sandbox: Id,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="A label to set, or KEY- to remove the label of that key.",
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Show, set or remove labels of a sandbox.

    Labels that you do not name stay as they are.

    Examples:
      forkd label db
      forkd label db team=search tier=1
      forkd label db tier-
    """
    with shared.client(as_json=json) as client:
        found = client.sandboxes.get(sandbox)
        info = found.change_labels(label_changes(changes)) if changes else found.info
    if json:
        render.document(info)
    else:
        for key, value in info.labels.items():
            typer.echo(f"{key}={value}")


def pause(sandboxes: Ids, *, json: Json = False) -> None:
    """Stop the virtual CPUs of sandboxes and keep their memory.

    What needs the guest is refused until `forkd resume`.  The time to live goes on.

    Examples:
      forkd pause sb-7q66th9abcde
    """
    _each(sandboxes, lambda found: found.pause(), as_json=json)


def resume(sandboxes: Ids, *, json: Json = False) -> None:
    """Let paused sandboxes go on.

    `forkd unpause` is the same command.

    Examples:
      forkd resume sb-7q66th9abcde
    """
    _each(sandboxes, lambda found: found.resume(), as_json=json)


def _each(names: list[str], change: Callable[[Sandbox], SandboxInfo], *, as_json: bool) -> None:
    """Change sandboxes one after another, and print the id of each that was changed."""
    changed: list[SandboxInfo] = []
    with shared.client(as_json=as_json) as client:
        for each in [client.sandboxes.get(name) for name in dict.fromkeys(names)]:
            changed.append(change(each))
            if not as_json:
                typer.echo(each.id)
    if as_json:
        render.document(changed)


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
            if sandbox.refresh().condition not in {"exited", "running"}:
                sleep(AGAIN_S)  # it is starting, stopping or paused
        except NotFound:
            reports.put((sandbox.id, GONE))
            return
        except ForkdError as error:
            reports.put((sandbox.id, error))
            return
