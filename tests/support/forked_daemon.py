"""A daemon over the fake VMM with one snapshot: what a program needs that forks."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import Client
from tests.support.fake_daemon import FakeDaemon
from tests.support.service_host import TAG, make_host

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def with_snapshot(folder: Path, tag: str = TAG) -> Iterator[FakeDaemon]:
    """Run a daemon on a folder with a snapshot that has been forked; no machine is left of it."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as run_dir:
        host = make_host(folder, Path(run_dir))
        with FakeDaemon(host) as made:
            with Client(made.url) as client:
                client.snapshots.create(tag, host.recipe())
                client.fork(tag, 1).kill()
            made.http.get("/v2/sandboxes")  # whose connection stays, and is no test's
            yield made
        assert host.left_over() == []
