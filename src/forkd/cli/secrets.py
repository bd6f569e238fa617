"""`forkd secret`: what the daemon puts into requests of sandboxes, and tells nobody."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.prompts import hidden
from forkd.cli.tables import Column
from forkd.errors import InvalidRequest
from forkd.limits import SECRET_VALUE_BYTES_MAX

if TYPE_CHECKING:
    from forkd.wire.v2_secrets import SecretInfo

COLUMNS: tuple[Column[SecretInfo], ...] = (
    Column("NAME", lambda of: of.name),
    Column("HOSTS", lambda of: " ".join(of.hosts)),
    Column("AGE", lambda of: render.age(of.created_at_unix), minor=True),
    Column("TENANT", lambda of: of.tenant, wide=True),
    Column("HEADER", lambda of: of.header, wide=True),
    Column("ENV", lambda of: of.env),
    Column("PLACEHOLDER", lambda of: of.placeholder),
)
"""What a list of secrets shows."""

commands = Commands(help="Manage secrets that forkd injects into sandboxes' HTTPS requests.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of a secret.")]
TenantOption = Annotated[
    str | None,
    typer.Option(metavar="TENANT", help="The tenant it belongs to (your own unless set)."),
]


@commands.command("set")
def set_secret(  # noqa: PLR0913 - one for each option
    name: Name,
    *,
    host: Annotated[
        list[str],
        typer.Option(
            metavar="HOST",
            help="A host that gets the secret: api.example.com or *.example.com:8443.",
        ),
    ],
    header: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The header that has it (Authorization unless set)."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The environment variable that has its placeholder in sandboxes."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the value from this file instead of standard input."),
    ] = None,
    tenant: TenantOption = None,
    json: Json = False,
) -> None:
    """Set a secret and print its placeholder.

    The value comes from standard input.  A terminal asks for it twice and does not show it.

    Examples:
      forkd secret set openai --host api.openai.example --env OPENAI_API_KEY
      forkd secret set openai --host api.openai.example --file key.txt
    """
    value = _read(file)
    with shared.client(as_json=json) as client:
        made = client.secrets.set(name, value, host, header=header, env=env, tenant=tenant)
    if json:
        render.document(made)
    else:
        typer.echo(made.placeholder)


@commands.command("ls")
def list_secrets(*, output: Output = None, json: Json = False) -> None:
    """List secrets, without their values.

    Examples:
      forkd secret ls
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.secrets.list()
    tables.show(found, COLUMNS, form)


@commands.command("rm")
def remove_secrets(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The names of secrets.")],
    *,
    tenant: TenantOption = None,
    json: Json = False,
) -> None:
    """Remove secrets; forkd injects them into no request from now on.

    Examples:
      forkd secret rm openai
    """
    with shared.client(as_json=json) as client:
        for name in names:
            client.secrets.delete(name, tenant=tenant)
    render.removed(names, as_json=json)


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="secret")


def _read(file: Path | None) -> str:
    """Return a value without the line break that editors and `echo` put behind it.

    Raises:
        InvalidRequest: It cannot be read, or is no text.
    """
    bytes_max = SECRET_VALUE_BYTES_MAX + len("\r\n")
    try:
        if file is None and sys.stdin.isatty():
            return hidden("Value", field="value")
        if file is None:
            found = sys.stdin.buffer.read(bytes_max + 1)
        else:
            with file.open("rb") as opened:
                found = opened.read(bytes_max + 1)
        text = found.decode()
    except OSError as error:
        raise InvalidRequest(f"the value cannot be read: {error.strerror}", field="value") from None
    except UnicodeDecodeError:
        raise InvalidRequest("the value is no text", field="value") from None
    return text.removesuffix("\n").removesuffix("\r")
