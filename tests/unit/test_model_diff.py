"""Two listings differ in exactly what was added, changed and removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forkd.model.diff import Change, FileState, compare
from forkd.model.limits import DIFF_CHANGES_MAX

FILE = FileState("f", 5, ("1.5", "2.5"), "644 0 0", "")
FOLDER = FileState("d", 4096, ("1.5", "2.5"), "755 0 0", "")


def test_what_is_the_same_is_not_named() -> None:
    assert compare({"/a": FILE}, {"/a": FILE}).changes == ()


@pytest.mark.parametrize(
    "other",
    [
        replace(FILE, kind="l", target="/b"),
        replace(FILE, size_bytes=6),
        replace(FILE, stamps=("1.5", "2.6")),
        replace(FILE, access="600 0 0"),
    ],
)
def test_a_file_that_differs_in_anything_has_changed(other: FileState) -> None:
    (change,) = compare({"/a": FILE}, {"/a": other}).changes

    assert (change.path, change.change, change.kind) == ("/a", Change.CHANGED, other.kind)


def test_a_folder_has_changed_if_its_access_has_but_not_if_its_entries_have() -> None:
    touched = replace(FOLDER, stamps=("9", "9"), size_bytes=8192)

    assert compare({"/d": FOLDER}, {"/d": touched}).changes == ()
    assert len(compare({"/d": FOLDER}, {"/d": replace(FOLDER, access="700 0 0")}).changes) == 1


def test_added_and_removed_files_are_named_in_order() -> None:
    found = compare({"/b": FILE, "/c": FILE}, {"/a": FILE, "/c": FILE}, pages_apart=7)

    assert [(each.path, each.change) for each in found.changes] == [
        ("/a", Change.ADDED),
        ("/b", Change.REMOVED),
    ]
    assert found.pages_apart == 7


def test_differences_past_the_limit_are_counted() -> None:
    after = {f"/{index:06}": FILE for index in range(DIFF_CHANGES_MAX + 3)}

    found = compare({}, after)

    assert (len(found.changes), found.more) == (DIFF_CHANGES_MAX, 3)
