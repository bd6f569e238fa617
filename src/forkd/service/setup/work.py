"""Set a host up, step by step, and take it back.

Nothing is undone that is not as set-up has left it: what somebody has changed since is theirs, is
named, and stays.  Both can be repeated: behind a crash, a refusal, or for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import Conflict, ForkdError
from forkd.host import files, parts, tuning
from forkd.host.parts import Kind, Part
from forkd.service.setup import texts
from forkd.service.setup.plan import FOLDER_MODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from forkd.service.setup.plan import Step
    from forkd.service.setup.record import Record

RELOADS = {
    texts.UDEV_FILE.parent: ("udevadm", "control", "--reload"),
    texts.UNITS: ("systemctl", "daemon-reload"),
}
"""What has files read again, by the folder that they are in or below."""


@dataclass(slots=True)
class Outcome:
    """What became of a set-up, or of undoing it.

    Attributes:
        done: Parts that were changed.
        refused: Parts that could not be changed, and why.
        left: Parts that were left as they are, and why.
    """

    done: list[Part] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def setup(steps: Sequence[Step], record: Record, root: Path) -> Outcome:
    """Take the steps that are not taken yet; each is in the record first.

    A step that is refused stops no other one.

    Raises:
        HostError: The record cannot be written; then nothing more is changed.
    """
    outcome = Outcome()
    for step in steps:
        try:
            for folder in _missing_folders(step.part, root):
                _change(Part(Kind.FOLDER, str(folder)), {"mode": FOLDER_MODE}, record, root)
            if _change(step.part, step.wanted, record, root):
                outcome.done.append(step.part)
        except ForkdError as error:
            outcome.refused[step.part.title] = str(error)
    _reload(outcome, root)
    return outcome


def _change(part: Part, wanted: parts.State, record: Record, root: Path) -> bool:
    """Make a part like that, unless it is; return whether it was changed."""
    before = parts.read(part, root)
    if before == wanted:
        return False
    record.note(part, before, wanted)
    try:
        parts.write(part, wanted, root)
    except ForkdError:
        _settle(part, record, root)
        raise
    record.settle(part, parts.read(part, root))
    return True


def _settle(part: Part, record: Record, root: Path) -> None:
    """Note what a part is like behind a change that failed, if it can be looked at."""
    try:
        now = parts.read(part, root)
    except ForkdError:
        return
    record.settle(part, now)


def _missing_folders(part: Part, root: Path) -> list[Path]:
    """Return the folders that a file needs and that are not there, the outermost first."""
    if part.kind not in {Kind.FILE, Kind.LINK}:
        return []
    above = list(Path(part.name).parents)[:-1]
    return [each for each in reversed(above) if not files.is_folder(root / each)]


def undo(record: Record, root: Path) -> Outcome:
    """Take back what the record has, the last change first.

    What cannot be taken back stays in the record, to be tried again.

    Raises:
        HostError: The record cannot be written.
    """
    outcome = Outcome()
    for entry in reversed(record.entries):
        part, name = entry.part, entry.part.title
        try:
            now = parts.read(part, root)
            if now == entry.before:
                record.drop(part)
            elif now != entry.after:
                outcome.left[name] = "it was changed since"
                record.drop(part)
            else:
                parts.write(part, entry.before, root)
                record.drop(part)
                outcome.done.append(part)
        except Conflict as error:
            outcome.left[name] = str(error)
            record.drop(part)
        except ForkdError as error:
            outcome.refused[name] = str(error)
    _reload(outcome, root)
    return outcome


def _reload(outcome: Outcome, root: Path) -> None:
    """Have what was changed read again by what has read it before."""
    if root != tuning.ROOT:
        return
    for words in dict.fromkeys(_reloading(outcome.done)):
        try:
            parts.run_if_there(words)
        except ForkdError as error:
            outcome.refused[" ".join(words)] = str(error)


def _reloading(changed: Sequence[Part]) -> Iterator[tuple[str, ...]]:
    for part in changed:
        if part.kind not in {Kind.FILE, Kind.LINK}:
            continue
        for folder, words in RELOADS.items():
            if Path(part.name).is_relative_to(folder):
                yield words
