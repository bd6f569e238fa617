"""Commands whose errors are messages and exit statuses, not tracebacks."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from forkd.cli import render
from forkd.cli.context import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, exit_code, shared
from forkd.errors import ForkdError


class Group(TyperGroup):
    """Commands whose errors are messages, not tracebacks."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - click's own types
        """Run the command; an error of ours becomes a message and an exit status."""
        try:
            return super().invoke(ctx)
        except ForkdError as error:
            render.failure(error, as_json=shared.as_json)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
