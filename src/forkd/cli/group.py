"""The root of the commands: its help in panels, and errors that are messages and exit statuses."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer

from forkd import installed
from forkd.cli.commands import PANELS, Lazy
from forkd.cli.context import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, exit_code, shared
from forkd.cli.help_text import CommandGroup, parameter_name, write_parameters
from forkd.errors import ForkdError, HostError, InvalidRequest

_BELOW_ZERO = re.compile(r"[Nn]o such option: (-\d)")
"""What the parser says of a number below zero."""


class Group(CommandGroup):
    """All commands; errors are messages, not tracebacks."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - typer's own types
        super().__init__(**attributes)
        self.commands = Lazy()

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - as above
        """Write the commands in panels, then the options in front of them."""
        names = [each.name for panel in PANELS.values() for each in panel if each.summary]
        width = max(map(len, names))
        for panel, listed in PANELS.items():
            with formatter.section(panel):
                formatter.write_dl(
                    [(each.name.ljust(width), each.summary) for each in listed if each.summary]
                )
        write_parameters(self.get_params(ctx), formatter)
        formatter.write_paragraph()
        formatter.write_text("`forkd COMMAND --help` shows a command's options and examples.")

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:  # noqa: ANN401 - as above
        """Complete a command's name without loading any command."""
        item = type_of_completions()
        found = [
            item(each.name, help=each.summary)
            for panel in PANELS.values()
            for each in panel
            if each.name.startswith(incomplete) and each.summary
        ]
        return [*found, *super(typer.core.TyperGroup, self).shell_complete(ctx, incomplete)]

    def make_context(self, *args: Any, **settings: Any) -> Any:  # noqa: ANN401 - as above
        """Parse the options in front of a command."""
        try:
            return super().make_context(*args, **settings)
        except typer.TyperException as error:
            raise _misused(error) from None

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - as above
        """Run the command; an error of ours becomes a message and an exit status."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            raise _misused(error) from None
        except ForkdError as error:
            raise _failed(error) from None
        except ModuleNotFoundError as error:
            said = installed.advice(error.name)
            if said is None:
                raise
            raise _failed(HostError(said)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None


def type_of_completions() -> Any:  # noqa: ANN401 - as above
    """Return the type of what a shell is offered; it is loaded for shells alone."""
    from typer._click.shell_completion import CompletionItem  # noqa: PLC0415 - no public name

    return CompletionItem


def _failed(error: ForkdError) -> typer.Exit:
    from forkd.cli import render  # noqa: PLC0415 - `forkd --help` should not wait for it

    render.failure(error, as_json=shared.as_json, typed=shared.typed)
    return typer.Exit(exit_code(error))


def _complaint(error: Any) -> str:  # noqa: ANN401 - as above
    """Return what is wrong with a value, and the value."""
    from forkd.cli import words  # noqa: PLC0415 - as above

    message = str(error.message).replace("\n", " ").rstrip(".")
    checked = getattr(error.__cause__, "errors", None)  # the library's that checks values
    plain = words.plain(message)
    if checked is None or plain == message:
        return message
    given = repr(checked()[0]["input"])
    return plain if plain.startswith(given) else f"{given} {plain}"


def _misused(error: Any) -> typer.Exit:  # noqa: ANN401 - as above
    """Say what is wrong with a command line."""
    from forkd.cli import render  # noqa: PLC0415 - as above

    parameter = getattr(error, "param", None)
    message = error.format_message().replace("\n", " ").rstrip(".")
    if isinstance(error, typer.BadParameter) and parameter is not None and error.message:
        message = f"{parameter_name(parameter)}: {_complaint(error)}"
    if below_zero := _BELOW_ZERO.fullmatch(message):
        message = f"{below_zero[1]}… is below zero, which no value may be"
    as_json = shared.as_json or "--json" in sys.argv
    if not message[:2].isupper():  # the name of an argument
        message = message[:1].lower() + message[1:]
    render.failure(InvalidRequest(message), as_json=as_json)
    if error.ctx is not None and not as_json:
        render.note(f"hint: `{error.ctx.command_path} --help` shows how it is used")
    return typer.Exit(error.exit_code)
