"""`forkd exec` and `eval`: programs and code inside a sandbox."""

from __future__ import annotations

import sys
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
from forkd.cli.options import Cwd, Env, Id, Json, User
from forkd.cli.units import duration, shown_duration
from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.limits import EXEC_TIMEOUT_S_DEFAULT

if TYPE_CHECKING:
    from forkd import EvalResult, ExecResult
    from forkd.cli.help_text import Commands
    from forkd.sdk._requests import ExecOptions

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
    after_args = {"allow_interspersed_args": False}
    app.command("exec", context_settings=after_args)(exec_)
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
    program = args[1:] if args[0] == "--" else args
    options: ExecOptions = {"env": _environment(env or []), "cwd": cwd, "user": user}
    try:
        if json and tty:
            raise InvalidRequest("--json and --tty exclude each other", field="tty")
        with shared.client(as_json=json) as client:
            found = client.sandboxes.get(sandbox)
            if json:
                result = found.exec(program, timeout_s=timeout, check=False, **options)
                render.document(_program_as_json(result))
                raise typer.Exit(EXIT_TIMED_OUT if result.timed_out else result.exit_code)
            ended = attached(
                found, program, options, tty=tty, stdin=not no_stdin, timeout_s=timeout
            )
    except ForkdError as error:
        render.failure(error, as_json=json)
        raise typer.Exit(_not_started(error)) from None
    if ended.timed_out:
        render.note(f"timed out after {shown_duration(timeout or 0)}; --timeout sets the time")
        raise typer.Exit(EXIT_TIMED_OUT)
    code = ended.exit_code
    raise typer.Exit(SIGNAL_EXIT_BASE + (ended.signal or 0) if code is None else code)


def _not_started(error: ForkdError) -> int:
    """Return the exit status for a program that did not run, as a shell has it."""
    if isinstance(error, NotFound) and "program" in error.context:
        return EXIT_NO_PROGRAM
    if error.context.get("guest_code") in {"exec_failed", "permission_denied"}:
        return EXIT_NO_EXECUTABLE
    return EXIT_EXEC_FAILED


def _environment(settings: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in settings]
    wrong = [name for name, equals, _ in pairs if not equals or not name]
    if wrong:
        raise InvalidRequest(f"--env wants NAME=VALUE, not {wrong[0]!r}", field="env")
    return {name: value for name, _, value in pairs}


def eval_(
    sandbox: Id,
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="Python code; - reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the code from this file.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration,
            help=f"Interrupt the code after this time ({EXEC_TIMEOUT_S_DEFAULT:g}s unless set).",
        ),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Run Python in the sandbox's warm interpreter and print the result.

    Names that the code defines are there in the next evaluation.  The exit code is 0 if the code
    ended, 1 if it raised an exception, and 124 if it timed out.

    Examples:
      forkd eval sb-7q66th9abcde 'sum(range(10))'
      forkd eval sb-7q66th9abcde --file analysis.py --timeout 10m
      echo 'print("hi")' | forkd eval sb-7q66th9abcde -
    """
    text = _code(code, file)
    timeout_s = EXEC_TIMEOUT_S_DEFAULT if timeout is None else timeout
    with shared.client(as_json=json) as client:
        result = client.sandboxes.get(sandbox).eval(text, timeout_s=timeout_s, check=False)
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
    }


def _show(result: EvalResult) -> None:
    sys.stdout.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.write(result.stderr)
    if result.error is not None:
        sys.stderr.write(result.error.traceback.rstrip("\n") + "\n")
    elif result.timed_out:
        render.note("timed out; names that were defined are kept; --timeout sets the time")
    elif result.repr not in {None, "None"}:
        typer.echo(result.repr)
    if result.truncated:
        render.note("some output was dropped, because there was too much")
