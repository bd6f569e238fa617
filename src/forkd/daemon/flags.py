"""Flags of a command, made from the declarations of the settings, and the file besides them."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.daemon import config_file, settings

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY = tuple(settings.Settings.model_fields)

CONFIG = "config"
"""The flag that names the configuration file."""


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each of these settings; it takes all settings, read, as `given`.

    The command has `--config`, too.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: object) -> None:
            flags = {name: arguments.pop(name) for name in names}
            given = {name: str(value) for name, value in flags.items() if value is not None}
            named = arguments.pop(CONFIG)
            assert named is None or isinstance(named, str)  # noqa: S101 - as it is declared
            command(settings.read(given, partial(config_file.load, named)), **arguments)

        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        flags = [*map(_parameter, names), _config()]
        run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]  # functions have it
        run.__annotations__ = {each.name: each.annotation for each in own} | {
            each.name: each.annotation for each in flags
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


def _config() -> inspect.Parameter:
    option = typer.Option(
        f"--{CONFIG}",
        help="The configuration file, in TOML. Empty: none.",
        show_default=f"${settings.CONFIG_VARIABLE}, else {config_file.SYSTEM} for root and "
        f"~/.config/{config_file.OF_USER} for others",
        metavar="FILE",
    )
    return inspect.Parameter(
        CONFIG,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )
