"""`forkd token` and `forkd tenant`: who may use a daemon over the network, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render, tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.tables import Column
from forkd.cli.units import MIB, duration_of_days, quota, quota_mib, shown_size
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from forkd.wire.v2_rights import TenantInfo, TokenInfo

tokens = Commands(help="Manage the bearer tokens that may use a daemon.")
tenants = Commands(help="Show tenants and set their quotas.")

QUOTAS = ("sandboxes", "vcpus", "memory_mib", "disk_mib", "snapshot_mib", "forks_per_minute")

TokenName = Annotated[str, typer.Argument(metavar="NAME", help="The name of a token.")]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="The name of a tenant.")]


@tokens.command()
def create(
    name: TokenName,
    *,
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope",
            "-s",
            metavar="SCOPE",
            help="`read`, `run`, `snapshots`, `metrics` or `admin`.",
        ),
    ] = ["read", "run"],  # noqa: B006 - Typer copies it
    tenant: Annotated[
        str, typer.Option(metavar="TENANT", help="The tenant it acts for.")
    ] = "default",
    expires_in: Annotated[
        float | None,
        typer.Option(
            metavar="DURATION",
            parser=duration_of_days,
            help="Time until it expires, such as 90d (days without a unit; never unless set).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make a token and print it; it cannot be shown again.

    Examples:
      forkd token create ci --scope read --scope run --expires-in 90d
      forkd token create alice --tenant research
    """
    expires_in_s = None if expires_in is None else max(1, round(expires_in))
    with shared.client(as_json=json) as client:
        made = client.tokens.create(name, scope, tenant=tenant, expires_in_s=expires_in_s)
    if json:
        render.document(made)
    else:
        typer.echo(made.token)


@tokens.command("ls")
def list_tokens(*, output: Output = None, json: Json = False) -> None:
    """List tokens.

    Examples:
      forkd token ls
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.tokens.list()
    tables.show(found, TOKEN_COLUMNS, form)


@tokens.command("rm")
def remove_tokens(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The names of tokens.")],
    *,
    json: Json = False,
) -> None:
    """Remove tokens; the daemon refuses them from now on.

    Examples:
      forkd token rm ci
    """
    with shared.client(as_json=json) as client:
        for name in names:
            client.tokens.delete(name)
    render.removed(names, as_json=json)


@tenants.command("ls")
def list_tenants(*, output: Output = None, json: Json = False) -> None:
    """List tenants, with their usage and their quotas.

    Examples:
      forkd tenant ls
      forkd tenant ls -o wide
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.tenants.list()
    tables.show(found, COLUMNS, form)


@tenants.command("set")
def set_quotas(  # noqa: PLR0913 - one for each quota
    name: TenantName,
    *,
    sandboxes: Annotated[
        int | None,
        typer.Option("--sandboxes", metavar="N", parser=quota, help="Sandboxes at once."),
    ] = None,
    vcpus: Annotated[
        int | None,
        typer.Option(
            "--vcpus", metavar="N", parser=quota, help="Virtual CPUs of sandboxes and bakes."
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            "--memory",
            "--memory-mib",
            metavar="SIZE",
            parser=quota_mib,
            help="Memory of sandboxes, bakes and builds (MiB without a unit).",
        ),
    ] = None,
    disk: Annotated[
        int | None,
        typer.Option(
            "--disk",
            "--disk-mib",
            metavar="SIZE",
            parser=quota_mib,
            help="Private disks of sandboxes (MiB without a unit).",
        ),
    ] = None,
    snapshots: Annotated[
        int | None,
        typer.Option(
            "--snapshots",
            "--snapshot-mib",
            metavar="SIZE",
            parser=quota_mib,
            help="Stored snapshots (MiB without a unit).",
        ),
    ] = None,
    forks_per_minute: Annotated[
        int | None,
        typer.Option(
            "--forks-per-minute", metavar="N", parser=quota, help="Forks and branches per minute."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Change quotas of a tenant; those that you do not give stay as they are.

    `unlimited` lifts the limit of one quota; `forkd tenant rm` lifts all.

    Examples:
      forkd tenant set research --sandboxes 200 --memory 64g --snapshots 500g
      forkd tenant set research --memory unlimited
    """
    given = (sandboxes, vcpus, memory, disk, snapshots, forks_per_minute)
    if all(each is None for each in given):
        raise InvalidRequest(
            "there is nothing to change: give a quota, such as --sandboxes 200", field="sandboxes"
        )
    with shared.client(as_json=json) as client:
        made = client.tenants.change_quotas(name, **dict(zip(QUOTAS, given, strict=True)))
    if json:
        render.document(made)
    else:
        tables.show([made], COLUMNS, tables.Format())


@tenants.command("rm")
def remove_quotas(name: TenantName, *, json: Json = False) -> None:
    """Remove all quotas of a tenant.

    Examples:
      forkd tenant rm research
    """
    with shared.client(as_json=json) as client:
        client.tenants.remove_quotas(name)
    if json:
        render.document({"removed": name})
    else:
        typer.echo(name)


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(tokens, name="token")
    app.add_typer(tenants, name="tenant")


def _expiry(of: TokenInfo) -> str:
    return "never" if of.expires_at_unix is None else f"in {render.until(of.expires_at_unix)}"


TOKEN_COLUMNS: tuple[Column[TokenInfo], ...] = (
    Column("NAME", lambda of: of.name),
    Column("TENANT", lambda of: of.tenant),
    Column("SCOPES", lambda of: " ".join(of.scopes)),
    Column("AGE", lambda of: render.age(of.created_at_unix), minor=True),
    Column("EXPIRES", _expiry),
)
"""What a list of tokens shows."""


def _quota(title: str, name: str, *, wide: bool = False) -> Column[TenantInfo]:
    """Return a column with what a tenant uses, and what it may."""

    def cell(of: TenantInfo) -> str:
        used, limit = getattr(of.used, name), getattr(of.quotas, name)
        if not name.endswith("_mib"):
            return f"{used} / {'-' if limit is None else limit}"
        return f"{shown_size(used * MIB)} / {'-' if limit is None else shown_size(limit * MIB)}"

    return Column(title, cell, wide=wide)


COLUMNS: tuple[Column[TenantInfo], ...] = (
    Column("TENANT", lambda of: of.name),
    _quota("SANDBOXES", "sandboxes"),
    _quota("MEMORY", "memory_mib"),
    _quota("SNAPSHOTS", "snapshot_mib"),
    _quota("VCPUS", "vcpus", wide=True),
    _quota("DISK", "disk_mib", wide=True),
    _quota("FORKS/MIN", "forks_per_minute", wide=True),
)
"""What a list of tenants shows: what is used, and the quota."""
