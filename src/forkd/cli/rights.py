"""`forkd token` and `forkd tenant`: who may use a daemon over the network, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import Json, shared

if TYPE_CHECKING:
    from forkd.wire.v2_rights import Amounts, Quotas, TenantInfo

tokens = typer.Typer(help="Make and remove bearer tokens.", no_args_is_help=True)
tenants = typer.Typer(help="Set what each tenant may have.", no_args_is_help=True)

QUOTAS = ("sandboxes", "vcpus", "memory_mib", "disk_mib", "snapshot_mib", "forks_per_minute")

TokenName = Annotated[str, typer.Argument(help="Name of a token.")]
TenantName = Annotated[str, typer.Argument(help="Name of a tenant.")]


@tokens.command()
def create(
    name: TokenName,
    *,
    scope: Annotated[
        list[str],
        typer.Option(
            "--scope",
            "-s",
            help="`read`, `run`, `snapshots`, `metrics` or `admin`; may be repeated.",
        ),
    ] = ["read", "run"],  # noqa: B006 - Typer copies it
    tenant: Annotated[str, typer.Option(help="Tenant that it acts for.")] = "default",
    expires_in: Annotated[
        float | None, typer.Option(help="Days until it expires (default: never).")
    ] = None,
    json: Json = False,
) -> None:
    """Make a token and print it; it cannot be shown again."""
    expires_in_s = None if expires_in is None else round(expires_in * 24 * 3_600)
    with shared.client(as_json=json) as client:
        made = client.tokens.create(name, scope, tenant=tenant, expires_in_s=expires_in_s)
    if json:
        render.document(made)
    else:
        typer.echo(made.token)


@tokens.command("ls")
def list_tokens(*, json: Json = False) -> None:
    """List tokens."""
    with shared.client(as_json=json) as client:
        found = client.tokens.list()
    if json:
        render.document(found)
        return
    rows = [
        (
            each.name,
            each.tenant,
            " ".join(each.scopes),
            render.age(each.created_at_unix),
            None if each.expires_at_unix is None else f"in {render.until(each.expires_at_unix)}",
        )
        for each in found
    ]
    render.table(("name", "tenant", "scopes", "age", "expires"), rows)


@tokens.command("rm")
def remove_tokens(
    names: Annotated[list[str], typer.Argument(help="Names of tokens.")], *, json: Json = False
) -> None:
    """Remove tokens; they are refused from now on."""
    with shared.client(as_json=json) as client:
        for name in names:
            client.tokens.delete(name)
    if json:
        render.document({"removed": names})


@tenants.command("ls")
def list_tenants(*, json: Json = False) -> None:
    """List tenants, with their usage and their quotas."""
    with shared.client(as_json=json) as client:
        found = client.tenants.list()
    if json:
        render.document(found)
    else:
        _show(found)


@tenants.command("set")
def set_quotas(  # noqa: PLR0913 - one for each quota
    name: TenantName,
    *,
    sandboxes: Annotated[int | None, typer.Option(help="Sandboxes at once.")] = None,
    vcpus: Annotated[int | None, typer.Option(help="Virtual CPUs of sandboxes and bakes.")] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(help="Memory of these and builds, in MiB."),
    ] = None,
    disk_mib: Annotated[int | None, typer.Option(help="Their private disks, in MiB.")] = None,
    snapshot_mib: Annotated[int | None, typer.Option(help="Stored snapshots, in MiB.")] = None,
    forks_per_minute: Annotated[int | None, typer.Option(help="Forks and siblings.")] = None,
    json: Json = False,
) -> None:
    """Set all quotas of a tenant; those not given are removed."""
    given = (sandboxes, vcpus, memory_mib, disk_mib, snapshot_mib, forks_per_minute)
    with shared.client(as_json=json) as client:
        made = client.tenants.set_quotas(name, **dict(zip(QUOTAS, given, strict=True)))
    if json:
        render.document(made)
    else:
        _show([made])


@tenants.command("rm")
def remove_quotas(name: TenantName, *, json: Json = False) -> None:
    """Remove all quotas of a tenant."""
    with shared.client(as_json=json) as client:
        client.tenants.remove_quotas(name)
    if json:
        render.document({"removed": name})


def _show(found: list[TenantInfo]) -> None:
    columns = ("tenant", *(name.replace("_", " ") for name in QUOTAS))
    rows = [(each.name, *_cells(each.used, each.quotas)) for each in found]
    render.table(columns, rows)


def _cells(used: Amounts, quotas: Quotas) -> list[str]:
    cells = []
    for name in QUOTAS:
        limit = getattr(quotas, name)
        cells.append(f"{getattr(used, name)} / {'-' if limit is None else limit}")
    return cells
