"""`forkd key`: who signs packs, and whose signature is believed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared

if TYPE_CHECKING:
    from forkd.packs.keys import Key, Keyring

commands = typer.Typer(help="Make keys, and trust those of others.", no_args_is_help=True)

DEFAULT = "default"
"""The key that signs if none is named."""

Name = Annotated[str, typer.Argument(help="Name of a key.")]


def keyring(*, as_json: bool) -> Keyring:
    """Return the user's keys; remembers how to show errors."""
    from forkd.packs.keys import Keyring  # noqa: PLC0415 - other commands should not wait for it

    shared.as_json = as_json
    return Keyring()


@commands.command()
def new(name: Name = DEFAULT, *, json: Json = False) -> None:
    """Create a signing key, and trust it."""
    made = keyring(as_json=json).new(name)
    _show(made, as_json=json)


@commands.command()
def show(name: Name = DEFAULT, *, json: Json = False) -> None:
    """Print a public key."""
    _show(keyring(as_json=json).get(name), as_json=json)


@commands.command()
def trust(
    name: Name,
    key: Annotated[list[str], typer.Argument(help="As `forkd key show` prints it; - reads stdin.")],
    *,
    json: Json = False,
) -> None:
    """Trust somebody's public key."""
    from forkd.packs.keys import parse_public  # noqa: PLC0415 - as above

    ring = keyring(as_json=json)
    text = sys.stdin.readline() if key == ["-"] else " ".join(key)
    _show(ring.trust(name, parse_public(text)), as_json=json)


@commands.command("ls")
def list_(*, json: Json = False) -> None:
    """List keys: trusted ones, and those that can sign."""
    found = keyring(as_json=json).list_all()
    if json:
        render.document([_plain(each) for each in found])
        return
    rows = [
        (each.name, "yes" if each.own else None, "yes" if each.trusted else None, shown["key"])
        for each in found
        for shown in [_plain(each)]
    ]
    render.table(("name", "signs", "trusted", "key"), rows)


@commands.command("rm")
def remove(name: Name, *, json: Json = False) -> None:
    """Delete a key and its secret; packs that it has signed are no longer trusted."""
    keyring(as_json=json).remove(name)
    if json:
        render.document({"removed": name})


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
