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
    Json,
    shared,
)
from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.limits import EXEC_TIMEOUT_S_DEFAULT

if TYPE_CHECKING:
    from forkd import EvalResult, ExecResult
    from forkd.sdk._requests import ExecOptions

Id = Annotated[str, typer.Argument(help="Id of a sandbox.", show_default=False)]

SIGNAL_EXIT_BASE = 128


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    after_args = {"allow_interspersed_args": False}
    app.command("exec", context_settings=after_args)(exec_)
    app.command("eval")(eval_)


def exec_(  # noqa: PLR0913 - one for each option
    sandbox: Id,
    args: Annotated[list[str], typer.Argument(help="The program and its arguments.")],
    *,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", "-w", help="Working directory.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="User to run as.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Kill the program after this many seconds.")
    ] = None,
    tty: Annotated[
        bool, typer.Option("--tty", "-t", help="Run the program in this terminal.")
    ] = False,
    no_stdin: Annotated[
        bool, typer.Option("--no-stdin", "-n", help="Do not attach stdin.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a program in a sandbox with stdin, stdout and stderr attached; exit as it does."""
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
        render.note(f"timed out after {timeout} s")
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
        str | None, typer.Argument(help="Python code; - reads it from stdin.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the code from this file.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Interrupt the code after this many seconds.")] = (
        EXEC_TIMEOUT_S_DEFAULT
    ),
    *,
    json: Json = False,
) -> None:
    """Run code in a sandbox's warm runtime and print its value."""
    text = _code(code, file)
    with shared.client(as_json=json) as client:
        result = client.sandboxes.get(sandbox).eval(text, timeout_s=timeout, check=False)
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
        raise InvalidRequest("nothing to run: give code, or --file FILE", field="code")
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
        render.note("timed out; variables that were defined are kept")
    elif result.repr not in {None, "None"}:
        typer.echo(result.repr)
    if result.truncated:
        render.note("some output was dropped, because there was too much")
