"""`forkd host`: show the daemon's host, check how this host is set up, set it up, undo that."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import typer

from forkd.cli import tables
from forkd.cli.context import shared
from forkd.cli.help_text import Commands
from forkd.cli.options import Json, Output
from forkd.cli.units import MIB, counted, shown_duration, shown_size

if TYPE_CHECKING:
    from forkd.wire.v2 import HostInfo

commands = Commands(help="Check and set up this host, and show the daemon's host.")


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
def check(*, json: Json = False) -> None:
    """Check how this host is set up: settings of the kernel, swap, processor, security modules.

    Changes nothing, and needs no root.

    Examples:
      forkd host check
    """
    _on_this_host("check", {"--json": json})


def _on_this_host(command: str, flags: dict[str, bool], *values: str) -> None:
    """Run a command of `forkd-daemon host`, which may load what looks at hosts, and end as it did.

    Args:
        command: Its name.
        flags: Options without a value, and whether each was given.
        values: Other options, with their values.
    """
    given = [flag for flag, is_given in flags.items() if is_given]
    words = [sys.executable, "-m", "forkd.daemon", "host", command, *given, *values]
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
