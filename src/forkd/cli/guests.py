"""`forkd exec` and `eval`: programs and code inside a sandbox."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.attach import attached
from forkd.cli.context import (
    EXIT_ERROR,
    EXIT_EXEC_FAILED,
    EXIT_NO_EXECUTABLE,
    EXIT_NO_PROGRAM,
    EXIT_TIMED_OUT,
    shared,
)
from forkd.cli.help_text import Trailing
from forkd.cli.names import pairs
from forkd.cli.options import Cwd, Env, Id, Json, User
from forkd.cli.units import duration, shown_duration
from forkd.errors import ForkdError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd import EvalResult, ExecResult, Sandbox
    from forkd.cli.help_text import Commands
    from forkd.sdk._requests import ExecOptions
    from forkd.types import Result

SIGNAL_EXIT_BASE = 128

Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        parser=duration,
        help="Kill the command after this time and exit with 124.",
    ),
]
Interactive = Annotated[
    bool, typer.Option("--interactive", "-i", help="Attach standard input; this is the default.")
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Run the command in this terminal.")]
NoStdin = Annotated[bool, typer.Option("--no-stdin", "-n", help="Do not attach standard input.")]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.command("exec", cls=Trailing)(exec_)
    app.command("shell")(shell)
    app.command("eval")(eval_)


def exec_(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    args: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")
    ],
    *,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Timeout = None,
    interactive: Interactive = False,  # noqa: ARG001 - it is so without, too
    tty: Tty = False,
    no_stdin: NoStdin = False,
    json: Json = False,
) -> None:
    """Run a command in a sandbox and exit with its exit code.

    Standard input, output and error are attached.  Without --timeout the command has no time
    limit.  The exit code is 124 if it timed out, 125 if forkd failed, 126 if the program cannot
    be executed, and 127 if there is no such program.

    Examples:
      forkd exec sb-7q66th9abcde -- uname -a
      forkd exec -it sb-7q66th9abcde bash
      forkd exec --timeout 5m sb-7q66th9abcde -- sh -c 'ls | wc -l'
      forkd exec sb-7q66th9abcde -- tar -cz /data >data.tgz
    """
    how = How(pairs(env, "--env"), cwd, user, tty, not no_stdin, timeout, json)
    with failing_as_a_shell(as_json=json):
        how.check()
        with shared.client(as_json=json) as client:
            status = how.run(client.sandboxes.get(sandbox), without_dashes(args))
    raise typer.Exit(status)


def without_dashes(args: list[str]) -> list[str]:
    """Return a program and its arguments without the `--` in front of them."""
    return args[1:] if args[:1] == ["--"] else args


@dataclass(frozen=True, slots=True)
class How:
    """How a program runs in a sandbox.

    Attributes:
        env: Its environment, beside the image's.
        cwd: Where it starts; None for the image's.
        user: Who it runs as; None for the image's.
        tty: Whether it has this terminal.
        stdin: Whether it has our standard input.
        timeout_s: When it is killed; None for never.
        as_json: Whether its result is printed as JSON, instead of its output as it comes.
    """

    env: dict[str, str]
    cwd: str | None
    user: str | None
    tty: bool
    stdin: bool
    timeout_s: float | None
    as_json: bool

    def check(self) -> None:
        """Refuse what excludes each other.

        Raises:
            InvalidRequest: A terminal is asked for, and JSON.
        """
        if self.as_json and self.tty:
            raise InvalidRequest("--json and --tty exclude each other", field="tty")

    def run(self, sandbox: Sandbox, program: list[str]) -> int:
        """Run a program; return the exit status that says how it ended.

        Raises:
            ForkdError: It could not be started, or was lost.
        """
        options: ExecOptions = {"env": self.env, "cwd": self.cwd, "user": self.user}
        if self.as_json:
            result = sandbox.exec(program, timeout_s=self.timeout_s, check=False, **options)
            render.document(_program_as_json(result))
            return self._status(result.exit_code, result.signal, timed_out=result.timed_out)
        ended = attached(
            sandbox, program, options, tty=self.tty, stdin=self.stdin, timeout_s=self.timeout_s
        )
        return self._status(ended.exit_code, ended.signal, timed_out=ended.timed_out)

    def _status(self, code: int | None, signal: int | None, *, timed_out: bool) -> int:
        if timed_out:
            time = shown_duration(self.timeout_s or 0)
            render.note(f"timed out after {time}; --timeout sets the time")
            return EXIT_TIMED_OUT
        return SIGNAL_EXIT_BASE + (signal or 0) if code is None else code


@contextmanager
def failing_as_a_shell(*, as_json: bool) -> Iterator[None]:
    """Say an error, and exit as a shell does for a program that did not run."""
    try:
        yield
    except ForkdError as error:
        render.failure(error, as_json=as_json, typed=shared.typed)
        raise typer.Exit(_not_started(error)) from None


def _not_started(error: ForkdError) -> int:
    """Return the exit status for a program that did not run, as a shell has it."""
    if isinstance(error, NotFound) and "program" in error.context:
        return EXIT_NO_PROGRAM
    if error.context.get("guest_code") in {"exec_failed", "permission_denied"}:
        return EXIT_NO_EXECUTABLE
    return EXIT_EXEC_FAILED


LOGIN_SHELL = [
    "/bin/sh",
    "-c",
    "command -v bash >/dev/null && exec bash --login; exec sh -l",
]
"""A login shell of whatever image: bash where there is one."""


def shell(
    sandbox: Id,
    *,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
) -> None:
    """Open a login shell in a sandbox.

    The shell is bash where the image has it, else sh.  The exit code is the shell's.

    Examples:
      forkd shell sb-7q66th9abcde
      forkd shell -u root -w /srv sb-7q66th9abcde
    """
    how = How(pairs(env, "--env"), cwd, user, True, True, None, False)  # noqa: FBT003
    with failing_as_a_shell(as_json=False), shared.client() as client:
        if not sys.stdin.isatty():
            raise InvalidRequest(
                "forkd shell needs a terminal; `forkd exec` runs a command without one"
            )
        status = how.run(client.sandboxes.get(sandbox), LOGIN_SHELL)
    raise typer.Exit(status)


def eval_(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="Code to run; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the code from this file.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration,
            help="Interrupt the code after this time; no limit unless set.",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Language of the code, such as python, node or shell: refuse the code if the "
            "sandbox's warm runtime is another one.",
        ),
    ] = None,
    *,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run the code with names and a working directory of their own; the first use of "
            "a name makes them.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run code in the sandbox's warm interpreter and print the result.

    The language is that of the sandbox's warm runtime: Python, unless its recipe says otherwise.

    Names that the code defines are there in the next evaluation.  The exit code is 0 if the code
    ended, 1 if it raised an exception, and 124 if it timed out.

    Examples:
      forkd eval sb-7q66th9abcde 'sum(range(10))'
      forkd eval sb-7q66th9abcde --file analysis.py --timeout 10m
      echo 'print("hi")' | forkd eval sb-7q66th9abcde -
      forkd eval sb-7q66th9abcde --runtime node 'process.version'
      forkd eval sb-7q66th9abcde --context draft 'x = 1'
    """
    text = _code(code, file)
    with shared.client(as_json=json) as client:
        result = client.sandboxes.get(sandbox).eval(
            text, runtime=runtime, context=context, timeout_s=timeout, check=False
        )
    if json:
        render.document(_as_json(result))
    else:
        _show(result)
    if result.timed_out:
        raise typer.Exit(EXIT_TIMED_OUT)
    if not result.ok:
        raise typer.Exit(EXIT_ERROR)


def _code(code: str | None, file: Path | None) -> str:
    if (code is None) == (file is None):
        raise InvalidRequest("give either CODE or --file FILE", field="code")
    if code == "-":
        return sys.stdin.read()
    if file is None:
        return code or ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file}: {error}", field="file") from error


def _program_as_json(result: ExecResult[str]) -> dict[str, object]:
    return {
        "exit_code": result.exit_code,
        "signal": result.signal,
        "timed_out": result.timed_out,
        "duration_s": result.duration_s,
        "truncated": result.truncated,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


def _as_json(result: EvalResult) -> dict[str, object]:
    error = result.error
    return {
        "value": result.value,
        "value_is_json": result.value_is_json,
        "repr": result.repr,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "error": None
        if error is None
        else {"type": error.type, "message": error.message, "traceback": error.traceback},
        "timed_out": result.timed_out,
        "truncated": result.truncated,
        "results": [_forms(each) for each in result.results],
        "more_results": result.more_results,
    }


def _forms(result: Result) -> dict[str, object]:
    names = ["is_main_result", *result.formats(), "omitted"]
    return {name: result.extra.get(name, getattr(result, name, None)) for name in names}


def _show(result: EvalResult) -> None:
    sys.stdout.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.write(result.stderr)
    if result.error is not None:
        sys.stderr.write(result.error.traceback.rstrip("\n") + "\n")
    elif result.timed_out:
        render.note("timed out; names that were defined are kept; --timeout sets the time")
    _show_results(result)
    if result.truncated:
        render.note("some output was dropped, because there was too much")
    if result.more_results:
        render.note(f"{result.more_results} more results were dropped, because there were too many")


def _show_results(result: EvalResult) -> None:
    """Print the text of what the code showed; a terminal has no pictures."""
    for each in result.results:
        if each.text and each.text != "None":
            typer.echo(each.text)
        forms = [name for name in each.formats() if name not in {"text", "json"}]
        if forms:
            render.note(f"it is also there as {', '.join(forms)}: --json prints it")
        for kind, size in each.omitted.items():
            render.note(f"{kind} was dropped: it has {size} bytes, which is too much")
