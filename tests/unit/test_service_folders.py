"""Folders of machines, whose makers are cancelled."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import files
from forkd.service import folders

if TYPE_CHECKING:
    from pathlib import Path

DEADLINE_S = 60


async def test_who_is_cancelled_while_a_folder_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop, make_folder = asyncio.get_running_loop(), files.make_folder

    def slow(path: Path) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(DEADLINE_S)
        make_folder(path)

    monkeypatch.setattr(files, "make_folder", slow)
    directory = tmp_path / "machine"
    making = asyncio.ensure_future(folders.make(directory))
    await begun.wait()
    making.cancel()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await making
    assert not files.is_there(directory)


async def test_a_folder_that_is_there_is_refused_and_kept(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.touch()
    with pytest.raises(HostError):
        await folders.make(tmp_path)
    assert files.is_there(others)
