"""`forkd-daemon host`: check how this host is set up, set it up, and undo that.

`setup` and `undo` show what they would change, ask, and change it.  They ask on the terminal; where
there is none, `--yes` has to say so.
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forkd import checks
from forkd.errors import HostError, InvalidRequest
from forkd.host import proc, tuning
from forkd.service.setup import examination, record, situation, work
from forkd.service.setup.plan import steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forkd.service.setup.plan import Step
    from forkd.service.setup.record import Entry
    from forkd.service.setup.work import Outcome

commands = typer.Typer(help="How this host is set up.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes, and make none.")]
Dir = Annotated[Path | None, typer.Option("--dir", help="Change files below this folder alone.")]
User = Annotated[
    str | None, typer.Option(help="Who is to use forkd without being root; '' for nobody.")
]

NOTHING = "nothing to change: this host is set up"
NOT_SET_UP = "nothing to undo: `forkd host setup` has changed nothing here"


@commands.command()
def check(*, user: User = None, json: Json = False) -> None:
    """Say how this host is set up; change nothing.  Status 1: something fails, or can be set up."""
    seen = situation.look(tuning.ROOT, _user(user))
    found, wanted = examination.examine(seen), steps(seen)
    if json:
        said = [each.as_members() for each in found]
        _document({"ready": not wanted, "checks": said, "changes": list(map(_members, wanted))})
    else:
        sys.stdout.write(checks.as_text(found) + "\n")
        if wanted:
            count = "1 change" if len(wanted) == 1 else f"{len(wanted)} changes"
            sys.stdout.write(f"`sudo forkd host setup` would make {count}\n")
    raise typer.Exit(checks.exit_status(found) or int(bool(wanted)))


@commands.command()
def setup(
    *,
    user: User = None,
    directory: Dir = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show what sets this host up, ask, do it, and record it.  Status 1: a change was refused."""
    root = tuning.ROOT if directory is None else directory
    _check_folder(directory)
    wanted = steps(situation.look(root, _user(user)))
    if not json:
        _show_steps(wanted)
    if not wanted or dry_run:
        _nothing(NOTHING if not wanted else "", wanted, as_json=json)
    _may_change(directory, f"Make {_these(len(wanted))}?", yes=yes, as_json=json)
    with record.held(root) as held:
        outcome = work.setup(wanted, held, root)
    _report(outcome, wanted, "set up; `forkd host undo` takes it back", as_json=json)


@commands.command()
def undo(
    *, directory: Dir = None, dry_run: DryRun = False, yes: Yes = False, json: Json = False
) -> None:
    """Show what set-up has changed here, ask, take it back.  Status 1: a change was refused."""
    root = tuning.ROOT if directory is None else directory
    _check_folder(directory)
    if directory is None and not proc.is_root():
        raise _needs_root("undo")
    entries = record.load(root)
    if not json:
        for entry in reversed(entries):
            sys.stdout.write(f"take back: {entry.part.title}\n")
    if not entries or dry_run:
        _nothing("" if entries else NOT_SET_UP, entries, as_json=json)
    _may_change(directory, f"Take back {_these(len(entries))}?", yes=yes, as_json=json)
    with record.held(root) as held:
        outcome = work.undo(held, root)
    _report(outcome, entries, "taken back", as_json=json)


def _user(given: str | None) -> str | None:
    """Return who is to use forkd; None for nobody."""
    return situation.default_user() if given is None else given or None


def _check_folder(directory: Path | None) -> None:
    if directory is not None and not situation.is_folder(directory):
        raise InvalidRequest(f"--dir: {directory} is no folder", field="dir")


def _needs_root(command: str) -> HostError:
    return HostError(f"`forkd host {command}` changes this host, which needs root: run it by sudo")


def _may_change(directory: Path | None, question: str, *, yes: bool, as_json: bool) -> None:
    """Return if the host may be changed; end the command if the answer is no.

    Raises:
        HostError: We are not root.
        InvalidRequest: There is nobody to ask.
    """
    if directory is None and not proc.is_root():
        raise _needs_root("setup")
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise InvalidRequest(
            "nobody to ask whether to change this host: give --yes, or --dry-run to look",
            field="yes",
        )
    if not typer.confirm(question):
        sys.stdout.write("nothing was changed\n")
        raise typer.Exit(0)


def _these(count: int) -> str:
    return "this change" if count == 1 else f"these {count} changes"


def _show_steps(wanted: Iterable[Step]) -> None:
    for step in wanted:
        sys.stdout.write(f"{step.title}: {step.why}\n")
        sys.stdout.writelines(f"  {line}\n" for line in (step.text or "").splitlines())
    sys.stdout.flush()  # in front of an error, also where both go into one file


def _nothing(said: str, changes: Iterable[Step | Entry], *, as_json: bool) -> None:
    """End a command that changes nothing."""
    if as_json:
        _document({"changes": list(map(_members, changes)), **_members_of(work.Outcome())})
    elif said:
        sys.stdout.write(f"{said}\n")
    raise typer.Exit(0)


def _report(outcome: Outcome, changes: Iterable[Step | Entry], done: str, *, as_json: bool) -> None:
    """Say what was done, and end with the status that says whether all was."""
    if as_json:
        _document({"changes": list(map(_members, changes)), **_members_of(outcome)})
    else:
        for name, reason in outcome.left.items():
            sys.stdout.write(f"left: {name}: {reason}\n")
        for name, reason in outcome.refused.items():
            sys.stderr.write(f"refused: {name}: {reason}\n")
        again = "; a restart may be needed, then run this again"
        sys.stdout.write(f"{'not all was ' if outcome.refused else ''}{done}")
        sys.stdout.write(f"{again if outcome.refused else ''}\n")
    raise typer.Exit(int(bool(outcome.refused)))


def _members(of: Step | Entry) -> dict[str, Any]:
    return {"part": of.part.title, "kind": str(of.part.kind), **of.as_members()}


def _members_of(outcome: Outcome) -> dict[str, Any]:
    done = [each.title for each in outcome.done]
    return {"done": done, "refused": outcome.refused, "left": outcome.left}


def _document(said: dict[str, Any]) -> None:
    sys.stdout.write(json_text.dumps(said, indent=2) + "\n")
