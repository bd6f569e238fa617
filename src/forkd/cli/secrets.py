"""`forkd secret`: what the daemon puts into requests of sandboxes, and tells nobody."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared
from forkd.errors import InvalidRequest
from forkd.limits import SECRET_VALUE_BYTES_MAX

commands = typer.Typer(help="Set secrets that sandboxes use and never have.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of a secret.", show_default=False)]
TenantOption = Annotated[
    str | None,
    typer.Option(help="Tenant that it belongs to (default: one's own).", show_default=False),
]


@commands.command("set")
def set_secret(  # noqa: PLR0913 - one for each option
    name: Name,
    *,
    host: Annotated[
        list[str],
        typer.Option(
            help="Host that it is for: api.example.com, *.example.com:8443; may be repeated."
        ),
    ],
    header: Annotated[
        str | None,
        typer.Option(help="Header that it is put into (default: Authorization)."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help="Environment variable that holds its placeholder in sandboxes."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Read the value from this file, not from standard input."),
    ] = None,
    tenant: TenantOption = None,
    json: Json = False,
) -> None:
    """Set a secret, whose value comes from standard input; its placeholder is printed."""
    value = _read(file)
    with shared.client(as_json=json) as client:
        made = client.secrets.set(name, value, host, header=header, env=env, tenant=tenant)
    if json:
        render.document(made)
    else:
        typer.echo(made.placeholder)


@commands.command("ls")
def list_secrets(*, json: Json = False) -> None:
    """List secrets, without their values."""
    with shared.client(as_json=json) as client:
        found = client.secrets.list()
    if json:
        render.document(found)
        return
    rows = [
        (
            each.name,
            each.tenant,
            " ".join(each.hosts),
            each.header,
            each.env,
            each.placeholder,
            render.age(each.created_at_unix),
        )
        for each in found
    ]
    render.table(("name", "tenant", "hosts", "header", "env", "placeholder", "age"), rows)


@commands.command("rm")
def remove_secrets(
    names: Annotated[list[str], typer.Argument(help="Names of secrets.")],
    *,
    tenant: TenantOption = None,
    json: Json = False,
) -> None:
    """Remove secrets; they are put into no request from now on."""
    with shared.client(as_json=json) as client:
        for name in names:
            client.secrets.delete(name, tenant=tenant)
    if json:
        render.document({"removed": names})


def _read(file: Path | None) -> str:
    """Return a value without the line break that editors and `echo` put behind it.

    Raises:
        InvalidRequest: It cannot be read, or is no text.
    """
    bytes_max = SECRET_VALUE_BYTES_MAX + len("\r\n")
    try:
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
