"""`forkd run`: fork, run a command, pass its output on, and remove the sandbox."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from forkd.cli import complete, render
from forkd.cli.context import shared
from forkd.cli.guests import (
    LOGIN_SHELL,
    SIGNAL_EXIT_BASE,
    How,
    Interactive,
    NoStdin,
    Timeout,
    Tty,
    failing_as_a_shell,
    without_dashes,
)
from forkd.cli.help_text import Trailing
from forkd.cli.images import Image
from forkd.cli.names import pairs
from forkd.cli.options import (
    Bandwidth,
    Cpus,
    Cwd,
    Disk,
    Env,
    IdleTtl,
    Io,
    IoOps,
    Json,
    Label,
    Memory,
    Name,
    Network,
    Pids,
    Secret,
    User,
)
from forkd.cli.ports import Listeners, Publish
from forkd.cli.units import duration
from forkd.errors import ForkdError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from forkd.cli.help_text import Commands
    from forkd.sdk import Client, Sandbox
    from forkd.sdk._requests import NamedForkOptions

LEASE_S_MIN = 1.0
"""Shortest life of a sandbox that can be prolonged in time."""

RENEWALS = 3
"""How often the end of a sandbox is moved before it would come."""

ENDING = tuple(each for each in signal.Signals if each.name in {"SIGTERM", "SIGHUP"})
"""Signals of which this process ends while no program has them; Ctrl-C raises already."""


def register(app: Commands) -> None:
    """Add the command of this file."""
    app.command(cls=RunCommand)(run)


class RunCommand(Trailing):
    """A command whose first argument is the program's if there is an image."""

    first = ("--image",)


MaybeTag = Annotated[
    str | None,
    typer.Argument(
        metavar="TAG",
        help="The name of a snapshot; left out with --image.",
        autocompletion=complete.snapshots,
    ),
]
Program = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="COMMAND",
        help="The program and its arguments; in a terminal a login shell unless set.",
    ),
]
Pull = Annotated[
    Literal["missing", "always"],
    typer.Option("--pull", help="always: ask the registry which image the name stands for."),
]
Keep = Annotated[
    bool, typer.Option("--keep", help="Keep the sandbox, and print its id on standard error.")
]
End = Annotated[
    float | None,
    typer.Option(
        "--ttl",
        metavar="DURATION",
        parser=duration,
        help="End the sandbox after this time, even if the command still runs.",
    ),
]


def run(  # noqa: PLR0913 - one for each option
    tag: MaybeTag = None,
    args: Program = None,
    *,
    image: Image = None,
    pull: Pull = "missing",
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    interactive: Interactive = False,  # noqa: ARG001 - it is so without, too
    tty: Tty = False,
    no_stdin: NoStdin = False,
    timeout: Timeout = None,
    keep: Keep = False,
    rm: Annotated[bool, typer.Option("--rm", hidden=True)] = False,  # noqa: ARG001 - as above
    ttl: End = None,
    idle_ttl: IdleTtl = None,
    name: Name = None,
    label: Label = None,
    publish: Publish = None,
    network: Network = None,
    secret: Secret = None,
    memory: Memory = None,
    disk: Disk = None,
    cpus: Cpus = None,
    pids: Pids = None,
    io: Io = None,
    io_ops: IoOps = None,
    bandwidth: Bandwidth = None,
    json: Json = False,
) -> None:
    """Run a command in a new sandbox and remove the sandbox when the command ends.

    Standard input, output and error are attached, and the exit code is the command's (124 if it
    timed out, 125 if forkd failed, 126 if the program cannot be executed, 127 if there is no such
    program).  The sandbox is removed on Ctrl-C, too.  If forkd itself is killed, the daemon ends
    the sandbox within a few minutes.

    With -p 8080:80, port 8080 of this host goes to port 80 in the sandbox.  The forwarding ends
    with the command, even if the sandbox is kept.

    The first run of an image bakes a snapshot, and later runs fork it.  With --image, --memory and
    --disk are the sizes of the machine; without, they are limits of the sandbox.

    Examples:
      forkd run numpy -- python3 -c 'print(6 * 7)'
      forkd run numpy -it -- bash
      forkd run -it --image python:3.12-slim bash
      forkd run --network internet --timeout 10m -e DEBUG=1 numpy -- pip install rich
      forkd run -p 8000 --image python:3.12-slim -- python3 -m http.server
      cat data.csv | forkd run numpy -- python3 -c 'import sys; print(len(sys.stdin.read()))'
    """
    options: NamedForkOptions = {
        "name": name,
        "memory_limit_mib": memory if image is None else None,
        "disk_limit_mib": disk if image is None else None,
        "cpu_limit": cpus,
        "pids_limit": pids,
        "io_limit_mib_s": io,
        "io_limit_ops": io_ops,
        "bandwidth_limit_mbit": bandwidth,
        "network": network or None,
        "secrets": secret or None,
        "ttl_s": ttl if ttl is not None or keep else "default",
        "idle_ttl_s": idle_ttl,
    }
    with failing_as_a_shell(as_json=json):
        options["labels"] = pairs(label, "--label") or None
        program = without_dashes(args or [])
        if image is not None and tag is not None:
            program, tag = [tag, *program], None
        if (tag is None) == (image is None):
            raise InvalidRequest("name a snapshot: forkd run TAG, or forkd run --image IMAGE")
        if not program:
            program, tty = _shell(), True
        how = How(pairs(env, "--env"), cwd, user, tty, not no_stdin, timeout, json)
        how.check()
        with (
            shared.client(as_json=json) as client,
            _ended_by_signals(),
            Listeners(publish) as listeners,
        ):
            if image is not None:
                with render.steps(as_json=json) as steps:
                    tag = client.snapshots.for_image(
                        image, memory_mib=memory, disk_mib=disk, pull=pull, on_progress=steps
                    ).tag
            status = _run(client, tag or "", options, how, program, listeners=listeners, keep=keep)
    raise typer.Exit(status)


def _shell() -> list[str]:
    """Return what runs if no command was given.

    Raises:
        InvalidRequest: There is no terminal for a shell.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("give a command: forkd run TAG -- COMMAND", field="args")
    return LOGIN_SHELL


def _run(  # noqa: PLR0913 - what a run is
    client: Client,
    tag: str,
    options: NamedForkOptions,
    how: How,
    program: list[str],
    *,
    listeners: Listeners,
    keep: bool,
) -> int:
    sandbox = client.sandbox(tag, **options)
    try:
        alive = _kept_alive(sandbox) if options["ttl_s"] == "default" else nullcontext()
        with alive, listeners.noted(sandbox):
            return how.run(sandbox, program)
    finally:
        if keep:
            render.note(f"kept {sandbox.id}")
        else:
            _remove(sandbox)


@contextmanager
def _kept_alive(sandbox: Sandbox) -> Iterator[None]:
    """Move the sandbox's end while the block lasts: it comes soon after this process is killed."""
    info, done = sandbox.info, threading.Event()
    lease_s = (info.expires_at_unix or info.created_at_unix) - info.created_at_unix

    def renew() -> None:
        while not done.wait(max(lease_s, LEASE_S_MIN) / RENEWALS):
            with suppress(ForkdError):  # it is tried again, and the program says what is wrong
                sandbox.set_ttl("default")

    threading.Thread(target=renew, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _remove(sandbox: Sandbox) -> None:
    """Remove the sandbox, whatever signals come; a daemon that is away ends it by itself."""
    for number in (*ENDING, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        sandbox.kill()
    except ForkdError as error:
        render.note(f"{sandbox.id} was not removed: {error}; its time to live ends it")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End as a shell's command does when a signal comes that no program has, and clean up."""
    before = {number: signal.signal(number, _end) for number in ENDING} | {
        signal.SIGINT: signal.getsignal(signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    raise typer.Exit(SIGNAL_EXIT_BASE + number)
