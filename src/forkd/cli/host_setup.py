"""`forkd host`: show the daemon's host, check how this host is set up, set it up, undo that."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.units import MIB, counted, shown_duration, shown_size

if TYPE_CHECKING:
    from forkd.wire.v2 import HostInfo

commands = Commands(help="Check and set up this host, and show the daemon's host.")

User = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who is to use forkd without being root; '' for nobody. Without it: who has called "
        "sudo, or calls this command.",
    ),
]
Dir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="PATH",
        help="Change files below this folder alone, such as the root of an image of a host.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes, and make none.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def register(app: Commands) -> None:
    """Add the commands of this file."""
    app.add_typer(commands, name="host")


@commands.command()
def show(*, output: Output = None, json: Json = False) -> None:
    """Show the daemon's host: version, processors, memory, disk.

    Examples:
      forkd host show
      forkd host show -o '{memory_available_mib}'
    """
    form = tables.chosen(output, as_json=json)
    with shared.client(as_json=json) as client:
        found = client.host()
    tables.detail(found, _labels(found), form)


@commands.command()
def check(*, user: User = None, json: Json = False) -> None:
    """Check how this host is set up: who may use forkd, the kernel, security modules.

    Changes nothing, and needs no root. The exit status is 1 if something keeps sandboxes from
    running, or if `forkd host setup` has something to do.

    Examples:
      forkd host check
      forkd host check --json
    """
    _on_this_host("check", {"--json": json}, {"--user": user})


@commands.command()
def setup(
    *,
    user: User = None,
    directory: Dir = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Set this host up: groups, /dev/kvm, settings of the kernel, cgroups, AppArmor.

    Shows each change, asks, makes them, and records what was there before: `forkd host undo`
    takes them back. Changes only what is wrong, and needs root.

    Examples:
      sudo forkd host setup
      forkd host setup --dry-run
      sudo forkd host setup --yes --user ada
      forkd host setup --yes --dir ./image-root
    """
    flags = {"--dry-run": dry_run, "--yes": yes, "--json": json}
    _on_this_host("setup", flags, {"--user": user, "--dir": directory})


@commands.command()
def undo(
    *, directory: Dir = None, dry_run: DryRun = False, yes: Yes = False, json: Json = False
) -> None:
    """Take back what `forkd host setup` has changed on this host.

    What was changed since by hand stays as it is, and is named.

    Examples:
      sudo forkd host undo
      forkd host undo --dry-run --dir ./image-root
    """
    _on_this_host(
        "undo", {"--dry-run": dry_run, "--yes": yes, "--json": json}, {"--dir": directory}
    )


_OwnDaemon = Annotated[bool, typer.Option("--user", help="A daemon of your own, without root.")]


@commands.command("install-service")
def install_service(*, user: _OwnDaemon = False, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Run the daemon of this installation under systemd, now and at each boot.

    Shows the two unit files, a service and its socket, and asks. Running it
    again changes nothing, or updates the units to this version.

    Examples:
      sudo forkd host install-service
      forkd host install-service --user
    """
    _on_this_host("install-service", {"--user": user, "--yes": yes, "--dry-run": dry_run}, {})


@commands.command("remove-service")
def remove_service(*, user: _OwnDaemon = False, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Stop the daemon's units and remove what install-service put in place.

    Sandboxes live on. A unit file that was changed since stays, and is named.

    Examples:
      sudo forkd host remove-service
      forkd host remove-service --user --dry-run
    """
    _on_this_host("remove-service", {"--user": user, "--yes": yes, "--dry-run": dry_run}, {})


def _on_this_host(command: str, flags: dict[str, bool], values: Mapping[str, object]) -> None:
    """Run a command of `forkd-daemon host`, which may load what looks at hosts, and end as it did.

    Args:
        command: Its name.
        flags: Options without a value, and whether each was given.
        values: Options with a value, which is None if it was not given.
    """
    given = [flag for flag, is_given in flags.items() if is_given]
    given += [f"{flag}={value}" for flag, value in values.items() if value is not None]
    from forkd.machine import host_setup  # noqa: PLC0415 - Unix's alone, unlike `host show`

    words = host_setup.command(command, *given)
    raise typer.Exit(subprocess.run(words, check=False).returncode)  # noqa: S603 - our own program


def _labels(of: HostInfo) -> list[tuple[str, object]]:
    """Return what there is to say of a host, with labels."""
    total, free = shown_size(of.memory_total_mib * MIB), shown_size(of.memory_available_mib * MIB)
    kvm = "not usable"
    if of.kvm:
        kvm = "emulated (guests are very slow)" if of.pvm else "usable"
    return [
        ("Host name", of.hostname),
        ("forkd", of.version),
        ("Running for", shown_duration(of.uptime_s)),
        ("Kernel", of.kernel),
        ("Processors", f"{counted(of.cpus, 'CPU')}, {of.cpu_model}"),
        ("KVM", kvm),
        ("Memory", f"{total}, {free} available"),
        ("Free disk", f"{shown_size(of.state_free_mib * MIB)} for snapshots"),
        ("Limits", "enforced by cgroups" if of.cgroups else "not enforced: no cgroups"),
        ("Network", "available" if of.network else "not available"),
        ("Jail", "on" if of.jail else "off"),
        ("Snapshots", of.snapshots),
        ("Sandboxes", of.sandboxes),
    ]
