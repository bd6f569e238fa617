"""`forkd key`: who signs packs, and whose signature is believed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.tables import Column

if TYPE_CHECKING:
    from forkd.packs.keys import Key, Keyring

commands = Commands(help="Manage the keys that sign and verify packs.")

DEFAULT = "default"
"""The key that signs if none is named."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a key.")]

COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    Column("NAME", lambda of: of["name"]),
    Column("SIGNS", lambda of: "yes" if of["signs"] else None),
    Column("TRUSTED", lambda of: "yes" if of["trusted"] else None),
    Column("KEY", lambda of: of["key"]),
)
"""What a list of keys shows."""


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="key")


def keyring(*, as_json: bool) -> Keyring:
    """Return the user's keys; remembers how to show errors."""
    from forkd.packs.keys import Keyring  # noqa: PLC0415 - other commands should not wait for it

    shared.as_json = as_json
    return Keyring()


@commands.command()
def new(name: Name = DEFAULT, *, json: Json = False) -> None:
    """Create a signing key, and trust it.

    Examples:
      forkd key new
    """
    made = keyring(as_json=json).new(name)
    _show(made, as_json=json)


@commands.command()
def show(name: Name = DEFAULT, *, json: Json = False) -> None:
    """Print a public key.

    Examples:
      forkd key show
    """
    _show(keyring(as_json=json).get(name), as_json=json)


@commands.command()
def trust(
    name: Name,
    key: Annotated[
        list[str],
        typer.Argument(metavar="KEY", help="What `forkd key show` prints; - reads standard input."),
    ],
    *,
    json: Json = False,
) -> None:
    """Trust another person's public key.

    Examples:
      forkd key trust alice forkd-ed25519 MCowBQYDK2VwAyEA...
    """
    from forkd.packs.keys import parse_public  # noqa: PLC0415 - as above

    ring = keyring(as_json=json)
    text = sys.stdin.readline() if key == ["-"] else " ".join(key)
    _show(ring.trust(name, parse_public(text)), as_json=json)


@commands.command("ls")
def list_(*, output: Output = None, json: Json = False) -> None:
    """List keys that are trusted and keys that can sign.

    Examples:
      forkd key ls
    """
    form = tables.chosen(output, as_json=json)
    found = keyring(as_json=json).list_all()
    tables.show([_plain(each) for each in found], COLUMNS, form)


@commands.command("rm")
def remove(name: Name, *, json: Json = False) -> None:
    """Delete a key and its secret half.

    Packs that the key has signed are no longer trusted.

    Examples:
      forkd key rm alice
    """
    keyring(as_json=json).remove(name)
    if json:
        render.document({"removed": name})
    else:
        typer.echo(name)


def _show(key: Key, *, as_json: bool) -> None:
    if as_json:
        render.document(_plain(key))
    else:
        typer.echo(_plain(key)["key"])


def _plain(key: Key) -> dict[str, Any]:
    from forkd.packs.keys import show as text_of  # noqa: PLC0415 - as above

    return {
        "name": key.name,
        "key": text_of(key.public),
        "signs": key.own,
        "trusted": key.trusted,
    }
