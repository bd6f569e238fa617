"""`forkd-daemon host install-service` and `remove-service`: the daemon as a unit of systemd."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forkd.errors import InvalidRequest
from forkd.service import unit_files
from forkd.service.unit_files import Target

_User = Annotated[bool, typer.Option("--user", help="A daemon of your own, without root.")]
_Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes, and make none.")]


def register(group: typer.Typer) -> None:
    """Add the commands of this file to `forkd-daemon host`."""
    group.command("install-service")(install_service)
    group.command("remove-service")(remove_service)


def install_service(*, user: _User = False, yes: _Yes = False, dry_run: _DryRun = False) -> None:
    """Put units of systemd in place for this installation, and start them now and at each boot."""
    target = _target(user=user)
    planned = unit_files.plan(target)
    for each in planned:
        _say(f"{each.path}: {_DOES[each.state]}")
        if each.state != "same":
            sys.stdout.writelines(f"  {line}\n" for line in each.text.splitlines())
    if not user and not unit_files.has_group():
        _say("The socket is root's: there is no group forkd, which `forkd host setup` adds.")
    _say(f"Then: systemctl {'--user ' * user}enable --now {' '.join(unit_files.UNITS)}")
    if dry_run or not _agreed(yes=yes):
        _say("nothing was changed")
        return
    unit_files.install(target, planned)
    _say("the daemon runs, and starts with this host")
    if any(each.state == "older" for each in planned):
        _say(f"a unit has changed; run: systemctl {'--user ' * user}restart forkd")
    if user:
        _say("`loginctl enable-linger` has it run while you are not logged in, too")


def remove_service(*, user: _User = False, yes: _Yes = False, dry_run: _DryRun = False) -> None:
    """Stop the units and take back what install-service put in place; sandboxes live on."""
    target = _target(user=user)
    found = unit_files.installed(target)
    if not found:
        _say("nothing to remove: install-service has put nothing in place")
        return
    for each in found:
        left = "stays: it was changed since, or made by someone else"
        _say(f"{each.path}: {left if each.state == 'changed' else 'to remove'}")
    if dry_run or not _agreed(yes=yes):
        _say("nothing was changed")
        return
    left_over = unit_files.remove(target, found)
    _say("the units are gone; sandboxes live on until `forkd-daemon uninstall`")
    raise typer.Exit(1 if left_over else 0)


_DOES = {"missing": "to write", "older": "to write again", "same": "there already"}


def _target(*, user: bool) -> Target:
    return Target.of_this_user() if user else Target.of_system()


def _agreed(*, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidRequest("nobody to ask: give --yes", field="yes")
    return typer.confirm("Do that?")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
