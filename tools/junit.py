"""Read the JUnit files that pytest writes."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def counts(path: Path) -> tuple[int, int, int] | None:
    """Return how many tests passed, failed and were skipped; None without a whole file."""
    if not _is_whole(path):
        return None
    total = failed = skipped = 0
    for suite in _elements(path, "testsuite"):
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def failed(path: Path) -> list[str]:
    """Return each test that failed: its id and, after a colon, the first line of the reason."""
    if not _is_whole(path):
        return []
    return [
        f"{_id_of(case)}: {(said.get('message') or 'no reason given').splitlines()[0]}"
        for case in _elements(path, "testcase")
        for said in case
        if said.tag in ("failure", "error")
    ]


def taken_s(path: Path) -> dict[str, float]:
    """Return what each test took with its fixtures, in seconds; nothing without a whole file."""
    if not _is_whole(path):
        return {}
    return {_id_of(case): float(case.get("time", 0)) for case in _elements(path, "testcase")}


def _id_of(case: ET.Element) -> str:
    """Return pytest's own id of a test; a class of tests is the last part of `classname`."""
    *folders, last = case.get("classname", "").split(".")
    inside = [last] if last[:1].isupper() else []
    module = "/".join(folders if inside else [*folders, last])
    return "::".join([f"{module}.py", *inside, case.get("name", "")])


def _is_whole(path: Path) -> bool:
    """Tell whether there is a file; that of a run that was cut short is empty."""
    return path.exists() and path.stat().st_size > 0


def _elements(path: Path, name: str) -> Iterator[ET.Element]:
    return ET.parse(path).getroot().iter(name)  # noqa: S314 - pytest wrote it
