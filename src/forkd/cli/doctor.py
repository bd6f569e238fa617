"""`forkd doctor`: ask the daemon that the commands talk to, and examine this host."""

from __future__ import annotations

import json as json_text
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import typer

import forkd
from forkd import checks
from forkd.checks import Check, Status
from forkd.cli.context import shared
from forkd.cli.options import Json
from forkd.cli.units import counted
from forkd.errors import ForkdError, TransportError

if TYPE_CHECKING:
    from forkd.cli.help_text import Commands
    from forkd.wire.v2 import HostInfo

OF_THIS_HOST = "the daemon of this host"


def register(app: Commands) -> None:
    """Add the command of this file."""
    app.command()(doctor)


def doctor(*, json: Json = False) -> None:
    """Check what this host supports, and how to fix what it does not.

    Asks the daemon that other commands would talk to, and then examines this host, where another
    daemon may run. The exit status is 1 if a check fails. `forkd host setup` changes what is wrong
    with this host's settings.

    Examples:
      forkd doctor
      forkd --context ci doctor
    """
    shared.as_json = json
    found = [*_daemon(), *_this_host()]
    sys.stdout.write((checks.as_json(found) if json else checks.as_text(found)) + "\n")
    raise typer.Exit(checks.exit_status(found))


def _daemon() -> list[Check]:
    """Ask the daemon, and say which one that is."""
    which = OF_THIS_HOST
    try:
        which = _which()
        with shared.client() as client:
            where = f"{client.endpoint.url} ({which})"
            host = client.host()
    except TransportError as error:
        if which == OF_THIS_HOST:
            found = f"none answers at {client.endpoint.url}"
            return [Check("daemon", Status.WARN, found, "`forkd up` starts one")]
        return [Check("daemon", Status.FAIL, f"{which}: {error}")]
    except ForkdError as error:
        advice = "`forkd context` and FORKD_URL say which daemon is asked"
        return [Check("daemon", Status.FAIL, f"{which}: {error}", advice)]
    return [_answering(where, host), _hosting(host)]


def _which() -> str:
    """Return what says which daemon is asked."""
    from forkd.sdk import _contexts  # noqa: PLC0415 - a list of commands should not wait for it

    if shared.url is not None:
        return "--url"
    if shared.context is not None:
        return f"--context {shared.context}"
    if os.environ.get("FORKD_URL"):
        return "FORKD_URL"
    current = _contexts.load().current
    return OF_THIS_HOST if current is None else f"context {current}"


def _answering(where: str, host: HostInfo) -> Check:
    sandboxes = counted(host.sandboxes, "sandbox", "sandboxes")
    if host.version == forkd.__version__:
        found = f"forkd {host.version} answers at {where}, with {sandboxes}"
        return Check("daemon", Status.PASS, found)
    found = f"forkd {host.version} answers at {where}; this command is {forkd.__version__}"
    return Check("daemon", Status.WARN, found, "update the older one")


def _hosting(host: HostInfo) -> Check:
    name = "host of the daemon"
    has = {
        "a KVM that runs guests": host.kvm and not host.pvm,
        "limits of sandboxes": host.cgroups,
        "networks": host.network,
        "a jail": host.jail,
    }
    missing = [what for what, is_there in has.items() if not is_there]
    if not missing:
        return Check(name, Status.PASS, f"{host.hostname} has {', '.join(has)}")
    found = f"{host.hostname} has no {', no '.join(each.removeprefix('a ') for each in missing)}"
    advice = "a daemon that is root has all of these; `forkd doctor` there says what is missing"
    return Check(name, Status.WARN, found, advice)


def _this_host() -> list[Check]:
    """Examine this host by a program of its own, which may load what looks at hosts."""
    words = [sys.executable, "-m", "forkd.daemon", "doctor", "--json"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)  # noqa: S603 - our own program
    try:
        return [_check(each) for each in json_text.loads(done.stdout)]
    except (ValueError, LookupError, TypeError):
        reason = (done.stderr.strip().splitlines() or ["the examination says nothing"])[-1]
        return [Check("this host", Status.SKIP, f"not examined: {reason}")]


def _check(members: dict[str, str]) -> Check:
    status = Status(members["status"])
    return Check(members["name"], status, members["found"], members["advice"])
