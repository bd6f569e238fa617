"""A service over the fake VMM in a process of its own, which a test kills when it likes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.service_host import ROOT, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.service_host import FakeHost

DAEMON = """
import asyncio, os, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = [{root!r}]
from forkd.model.ids import Tag
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.snapshot import SnapshotRequest
from tests.support.callers import CALLER
from tests.support.service_host import make_host, TAG

async def main():
    host = make_host(Path({folder!r}), Path({run_dir!r}))
    host = replace(host, settings=replace(host.settings, network_slots={network_slots!r}))
    async with host.service() as service:
        {work}
        await asyncio.Event().wait()

asyncio.run(main())
"""


class KillableDaemon:
    """A service in a process of its own that can be killed."""

    def __init__(self, host: FakeHost, work: str) -> None:
        script = DAEMON.format(
            root=str(ROOT),
            folder=str(host.folder),
            run_dir=str(host.settings.run_dir),
            network_slots=host.settings.network_slots,
            work=work,
        )
        self._process = subprocess.Popen([sys.executable, "-c", script])  # noqa: S603 - our own

    async def kill_when(self, condition: Callable[[], bool]) -> None:
        """Kill the daemon as soon as `condition` holds."""
        try:
            await until(lambda: self._process.poll() is not None or condition())
            assert self._process.poll() is None, "the daemon ended by itself"
        finally:
            self._process.kill()
            self._process.wait()
