"""`forkd recipe`: what there is to bake, and a new recipe to begin with."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkd import programs
from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.known_recipes import known
from forkd.cli.options import Json, Output, Recipe
from forkd.cli.tables import Column
from forkd.errors import Conflict, HostError, InvalidRequest, NotFound
from forkd.limits import RECIPE_NAME_PATTERN

if TYPE_CHECKING:
    from forkd.wire.v2_images import HostRecipe

commands = Commands(help="List, show and begin recipes.")

RECIPE_FILE = "recipe.toml"
FOLDERS = (programs.RECIPES, Path("/etc/forkd/recipes"))
"""Where a daemon of this host finds recipes by name, unless it is told otherwise."""

SHOWN_BYTES_MAX = 1024 * 1024
"""Longest recipe that is shown."""

TEMPLATE = '''\
# What a recipe may say: docs/reference/recipe.md. Bake it with
#     forkd snapshot create {name} --recipe {folder}

name = "{name}"
description = "Debian 12 with Python"

[image.debian]
suite = "bookworm"
packages = ["ca-certificates", "python3", "python3-pip"]

# [pip]
# requirements = ["requests==2.32.3"]

[machine]
vcpus = 1
memory_mib = 512
disk_mib = 2048

# Every sandbox inherits what this code has done: imports, caches, open files.
[warmup]
runtime = "python"
code = """
import json
"""
'''
"""A recipe to begin with."""

COLUMNS: tuple[Column[HostRecipe], ...] = (
    Column("NAME", lambda of: of.name),
    Column("BASE", lambda of: of.base),
    Column("DESCRIPTION", lambda of: of.description or None),
)
"""What a list of recipes shows."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="recipe")


@commands.command("ls")
def list_(*, output: Output = None, json: Json = False) -> None:
    """List recipes that can be given by name.

    The list has the daemon's recipes.  If the daemon runs in a helper VM, it also has those that
    come with forkd, whose images are built on this host.

    Examples:
      forkd recipe ls
      forkd recipe ls -o '{name}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = known(client)
    tables.show(found, COLUMNS, form)
    for each in found:
        if each.error is not None and form.is_table:
            render.note(f"{each.name} cannot be used: {each.error}")


@commands.command()
def show(recipe: Recipe) -> None:
    """Print a recipe of this host.

    Examples:
      forkd recipe show python-numpy
      forkd recipe show ./my-recipe
    """
    path = _file(recipe)
    try:
        with path.open("rb") as file:
            sys.stdout.write(file.read(SHOWN_BYTES_MAX).decode(errors="replace"))
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error


@commands.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder for the recipe; it may be new.")
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The recipe's name (the folder's unless set)."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a recipe to begin with, and print its path.

    Examples:
      forkd recipe init ./my-recipe
    """
    shared.as_json = json
    named = name if name is not None else folder.absolute().name
    if re.fullmatch(RECIPE_NAME_PATTERN, named) is None:
        raise InvalidRequest(
            f"{named!r} is not the name of a recipe: up to 64 lower-case letters, digits, '.', '_' "
            "and '-'; --name gives it another one than the folder's",
            field="name",
        )
    path = folder / RECIPE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(name=named, folder=folder))
    except FileExistsError as error:
        raise Conflict(f"{error.filename or path} exists already; nothing was changed") from None
    except OSError as error:
        raise HostError(f"cannot write {path}: {error.strerror}") from error
    if json:
        render.document({"file": str(path), "name": named})
    else:
        typer.echo(str(path))


def _file(recipe: str) -> Path:
    """Return the TOML file of a recipe of this host.

    Raises:
        NotFound: There is none.
    """
    from forkd.sdk._recipes import find_local  # noqa: PLC0415 - few commands need it

    found = find_local(recipe)
    named = (folder / recipe / RECIPE_FILE for folder in FOLDERS)
    found = found or next((each for each in named if "/" not in recipe and each.is_file()), None)
    if found is None:
        raise NotFound(f"no recipe {recipe!r} on this host; `forkd recipe ls` lists the daemon's")
    return found
