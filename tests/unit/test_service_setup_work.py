"""What set-up changes is taken back exactly: behind a crash, behind a second one, and no more."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, HostError
from forkd.host import parts
from forkd.host.parts import FILE_BYTES_MAX, Kind, Part
from forkd.service.setup import record, work
from forkd.service.setup.plan import Step
from forkd.service.setup.record import FOLDER, RECORD_BYTES_MAX, Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.host.parts import State
    from forkd.service.setup.work import Outcome

ONE, OTHER = "etc/one.d/one.conf", "etc/other.conf"
STORED = FOLDER / record.FILE


def state(text: str, mode: int = 0o644) -> dict[str, str | int]:
    return {"text": text, "mode": mode, "uid": os.geteuid(), "gid": os.getegid()}


def step(name: str, text: str) -> Step:
    return Step(Part(Kind.FILE, name), state(text), f"write {name}", "a test wants it")


STEPS = (step(ONE, "ours\n"), step(OTHER, "ours, too\n"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with a file that set-up changes, and the folders that every host has."""
    for name in ("etc", "var/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / OTHER).write_text("theirs: \u00e4\r\n", encoding="utf-8", newline="")
    (tmp_path / OTHER).chmod(0o600)
    return tmp_path


def tree(root: Path) -> dict[str, object]:
    """Return everything below a root: modes, and what is in files."""
    return {
        str(path.relative_to(root)): (
            oct(path.lstat().st_mode),
            path.read_bytes() if path.is_file() else "",
        )
        for path in sorted(root.rglob("*"))
    }


def set_up(root: Path, *steps: Step) -> Outcome:
    with record.held(root) as held:
        return work.setup(steps or STEPS, held, root)


def undo(root: Path) -> Outcome:
    with record.held(root) as held:
        return work.undo(held, root)


def test_everything_is_as_it_was(root: Path) -> None:
    before = tree(root)

    assert [each.name for each in set_up(root).done] == [ONE, OTHER]
    assert (root / OTHER).read_text(encoding="utf-8") == "ours, too\n"
    assert undo(root) == work.Outcome(
        done=[Part(Kind.FILE, OTHER), Part(Kind.FILE, ONE), Part(Kind.FOLDER, "etc/one.d")]
    )

    assert tree(root) == before


def test_a_second_set_up_keeps_what_was_there_before_the_first(root: Path) -> None:
    before = tree(root)
    set_up(root)

    assert set_up(root).done == []
    assert [each.name for each in set_up(root, step(OTHER, "newer\n")).done] == [OTHER]
    undo(root)

    assert tree(root) == before


def test_what_somebody_changes_between_two_set_ups_is_what_comes_back(root: Path) -> None:
    set_up(root)
    (root / OTHER).write_text("theirs again\n", encoding="utf-8")
    set_up(root)

    assert undo(root).left == {}

    assert (root / OTHER).read_text(encoding="utf-8") == "theirs again\n"


def test_what_was_changed_since_is_named_and_stays(root: Path) -> None:
    set_up(root)
    (root / OTHER).chmod(0o640)
    (root / ONE).with_name("theirs.conf").touch()

    outcome = undo(root)

    assert outcome.left == {
        f"/{OTHER}": "it was changed since",
        "/etc/one.d": f"{root}/etc/one.d has other files in it",
    }
    assert (root / OTHER).read_text(encoding="utf-8") == "ours, too\n"
    assert not (root / ONE).exists()
    assert not (root / FOLDER).exists()
    assert undo(root) == work.Outcome()


def test_what_somebody_has_removed_since_does_not_come_back(root: Path) -> None:
    set_up(root)
    (root / OTHER).unlink()
    (root / ONE).unlink()

    assert undo(root).left == {f"/{OTHER}": "it was changed since"}
    assert not (root / "etc/one.d").exists()


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


@dataclass
class Crashing:
    """Writes parts, and ends the process in front of a change or behind it.

    Attributes:
        nth: Which change, from 0.
        is_behind: Whether that change is made first.
    """

    nth: int
    is_behind: bool
    write: Callable[[Part, State, Path], None]

    def __call__(self, part: Part, wanted: State, root: Path) -> None:
        self.nth -= 1
        if self.nth >= 0 or self.is_behind:
            self.write(part, wanted, root)
        if self.nth < 0:
            raise Crash


MOMENTS = [Crashing(nth, behind, parts.write) for nth in range(3) for behind in (False, True)]


def named(at: Crashing) -> str:
    return f"{'behind' if at.is_behind else 'before'}-{at.nth}"


@pytest.mark.parametrize("moment", MOMENTS, ids=named)
def test_a_crash_at_any_change_is_undone(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: Crashing
) -> None:
    before = tree(root)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "write", replace(moment))
        with pytest.raises(Crash):
            set_up(root)

    assert tree(root) != before
    assert undo(root).left == {}
    assert tree(root) == before


@pytest.mark.parametrize("moment", MOMENTS, ids=named)
def test_a_crash_while_it_is_undone_is_made_good_by_undoing_it_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, moment: Crashing
) -> None:
    before = tree(root)
    set_up(root)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "write", replace(moment))
        with pytest.raises(Crash):
            undo(root)

    assert tree(root) != before
    assert undo(root).left == {}
    assert tree(root) == before


def test_a_step_that_is_refused_stops_no_other_and_leaves_no_entry(root: Path) -> None:
    (root / "etc/one.d").write_text("a file where a folder should be", encoding="utf-8")

    outcome = set_up(root)

    assert list(outcome.refused) == [f"/{ONE}"]
    assert outcome.done == [Part(Kind.FILE, OTHER)]
    assert [each.name for each in record.load(root)] == [OTHER]


def test_what_cannot_be_taken_back_stays_in_the_record(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(root)
    set_up(root)

    def refuse(*_: object) -> None:
        raise HostError("no")

    with monkeypatch.context() as patched:
        patched.setattr(parts, "write", refuse)
        assert set(undo(root).refused) == {f"/{ONE}", f"/{OTHER}", "/etc/one.d"}

    assert undo(root).refused == {}
    assert tree(root) == before


def test_one_process_at_a_time_changes_a_host(root: Path) -> None:
    with (
        record.held(root),
        pytest.raises(Conflict, match="another `forkd host setup` or `undo` runs"),
        record.held(root),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "version: Field required"),
        ('{"version": 2, "entries": []}', "version: Input should be 1"),
        ('{"version": 1, "entries": [{"kind": "moon", "name": "m"}]}', r"entries\.0\.kind"),
        ("\x00", "its text: Invalid JSON"),
        (" " * (RECORD_BYTES_MAX + 1), "is no record of ours"),
    ],
)
def test_a_record_that_cannot_be_read_stops_everything(root: Path, text: str, said: str) -> None:
    set_up(root)
    (root / STORED).write_text(text, encoding="utf-8")
    before = tree(root)

    for command in (set_up, undo):
        with pytest.raises(HostError, match=said):
            command(root)

    assert tree(root) == before


def test_a_record_is_read_as_it_was_written(root: Path) -> None:
    set_up(root)

    stored = json.loads((root / STORED).read_text(encoding="utf-8"))
    first, *_ = record.load(root)

    assert stored["version"] == 1
    assert first == Entry(kind=Kind.FOLDER, name="etc/one.d", before=None, after={"mode": 0o755})


def test_files_that_are_too_long_binary_or_elsewhere_are_not_changed(root: Path) -> None:
    part = Part(Kind.FILE, OTHER)
    (root / OTHER).write_bytes(b"#" * FILE_BYTES_MAX)
    assert parts.read(part, root) is not None
    (root / OTHER).write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(HostError, match=f"more than {FILE_BYTES_MAX} bytes"):
        parts.read(part, root)

    (root / OTHER).write_bytes(b"\xff")
    with pytest.raises(HostError, match="is no text in UTF-8"):
        parts.read(part, root)

    (root / OTHER).unlink()
    (root / OTHER).symlink_to(root / "elsewhere")
    with pytest.raises(HostError, match="is a symbolic link"):
        parts.read(part, root)


def test_a_link_is_made_and_taken_back(root: Path) -> None:
    before = tree(root)
    link = Step(Part(Kind.LINK, "etc/wants/unit"), {"target": "../unit"}, "link", "a test")

    assert set_up(root, link).refused == {}
    assert os.readlink(root / "etc/wants/unit") == "../unit"  # noqa: PTH115 - the text itself
    undo(root)

    assert tree(root) == before
