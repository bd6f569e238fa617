"""Counting what nameless files of a process take."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import nameless

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def test_a_descriptor_that_is_closed_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterdir = Path.iterdir

    def with_one_that_has_gone(folder: Path) -> Iterator[Path]:
        yield folder / "999999"
        yield from iterdir(folder)

    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(bytes(8192))
        file.flush()
        os.fsync(file.fileno())
        monkeypatch.setattr(Path, "iterdir", with_one_that_has_gone)
        found = nameless.stored_bytes(os.getpid(), tmp_path)

    assert found == 8192
