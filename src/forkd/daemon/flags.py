"""Flags of a command, made from the declarations of the settings."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.daemon import settings

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY = tuple(settings.Settings.model_fields)


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings; it takes all settings, read, as `given`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: object) -> None:
            flags = {name: arguments.pop(name) for name in names}
            given = {name: str(value) for name, value in flags.items() if value is not None}
            command(settings.read(given), **arguments)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        run.__signature__ = inspect.Signature([*own, *map(_parameter, names)])  # type: ignore[attr-defined]  # functions have it
        run.__annotations__ = {each.name: each.annotation for each in own} | {
            name: _parameter(name).annotation for name in names
        }
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    shown = f"${settings.variable(name)}, else {settings.default(name)}"
    option = typer.Option(
        settings.flag(name), help=settings.meaning(name), show_default=shown, metavar="VALUE"
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
