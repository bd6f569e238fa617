"""`forkd cp` is the SDK's upload and download, and refuses in their words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import ForkdError
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]


@pytest.fixture
def sandbox(daemon: RunningDaemon, forkd: Forkd) -> str:
    daemon.service.stored = some_snapshots("warm")
    return forkd("fork", "warm").out.strip()


def test_a_copy_is_refused_in_the_words_of_the_sdk(
    forkd: Forkd, daemon: RunningDaemon, sandbox: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe\n")
    (tmp_path / "file").write_bytes(b"x")
    with Client(daemon.url) as client:
        files = client.sandboxes.get(sandbox).files
        for name, code in (("nothing\n", 3), ("pipe\n", 2), ("file/x", 1)):
            with pytest.raises(ForkdError) as refused:
                files.upload(tmp_path / name, "/tmp/x")
            ended = forkd("cp", str(tmp_path / name), f"{sandbox}:/tmp/x")
            assert (ended.code, ended.err.splitlines()[0]) == (code, said(refused.value))

        files.make_dir("/tmp/d", parents=True)
        files.write("/tmp/d/f", b"x")
        for source in ("/tmp/d", "/tmp/d/f"):
            with pytest.raises(ForkdError) as refused:
                files.download(source, tmp_path / "no/such/folder")
            ended = forkd("cp", f"{sandbox}:{source}", str(tmp_path / "no/such/folder"))
            assert (ended.code, ended.err.splitlines()[0]) == (1, said(refused.value))


def said(error: ForkdError) -> str:
    return f"error: {error} ({error.code})"
