"""A daemon over the real VMM: in a process and on folders of its own, or in front of a host."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.daemon import commands
from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Bind, Settings
from forkd.service.settings import DiskPolicy
from tests.support import processes, warm
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in
from tests.support.real_host import STATE_PARENT, fresh_folders, names_of

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from forkd.service.names import Names
    from tests.support.bakes import Bake
    from tests.support.real_host import RealHost

DISKS = DiskPolicy()
"""What private disk layers may take if a test does not say."""

END_TIMEOUT_S = 60.0

warm.wanted.append(__name__)


@contextlib.asynccontextmanager
async def daemon_of(host: RealHost) -> AsyncIterator[str]:
    """Serve a host at a socket of its own, and delete what was forked meanwhile; gives its URL."""
    settings = Settings(socket=host.settings.run_dir / "forkd.sock")
    try:
        async with listening(create_app(host.service), settings, host.service.tokens) as (url,):
            yield url
    finally:
        for sandbox in await host.service.sandboxes.list(CALLER):
            await host.service.sandboxes.delete(CALLER, sandbox.id)


@contextlib.contextmanager
def running_daemon(
    bake: Bake | None = None,
    state_parent: Path = STATE_PARENT,
    disks: DiskPolicy = DISKS,
    *,
    tcp: bool = False,
) -> Iterator[Daemon]:
    """A daemon with a bake, or nothing; it and its folders are gone afterwards, even if killed."""
    made = Daemon(state_parent, disks, tcp=tcp)
    try:
        if bake is not None:
            bake.copy_to(made.state)
        made.start()
        yield made
    finally:
        made.remove()


def serve(*, state: Path, run_dir: Path, disks: DiskPolicy, bind: Bind | None) -> int:
    """Be the daemon as it is, except that it shares neither cgroups nor addresses with another."""
    host = settings_in(state, run_dir)
    vars(commands)["host_settings"] = lambda _: replace(host, disks=disks)
    settings = Settings(socket=run_dir / "forkd.sock", state_dir=state, bind=bind)
    return commands.serve(settings, log_file=run_dir / "log", detach=False)


class Daemon:
    """A daemon on folders of its own, which may be killed and started again.

    Attributes:
        url: Its Unix socket.
        tcp_url: Where it answers with a token, if it was to serve TCP; empty otherwise.
    """

    def __init__(
        self, state_parent: Path = STATE_PARENT, disks: DiskPolicy = DISKS, *, tcp: bool = False
    ) -> None:
        self.state, self.run_dir = fresh_folders(state_parent)
        self._disks = disks
        self._bind = Bind("127.0.0.1", 0) if tcp else None
        self.tcp_url = ""
        self.settings = settings_in(self.state, self.run_dir)
        self.url = f"unix://{self.run_dir / 'forkd.sock'}"
        self._process: warm.Process | subprocess.Popen[bytes] | None = None

    @property
    def names(self) -> Names:
        """What its sandboxes' cgroups and taps are called."""
        return names_of(self.settings)

    def start(self) -> None:
        """Start it; it listens when this returns."""
        self._process = warm.start(
            serve, state=self.state, run_dir=self.run_dir, disks=self._disks, bind=self._bind
        )
        said = json.loads(self._process.stdout.readline())
        assert said["event"] == "listening"
        _, self.tcp_url = (*said["urls"], "")[:2]

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def end(self, number: signal.Signals) -> None:
        """End it with a signal, if it runs."""
        if self._process is not None:
            process, self._process = self._process, None
            process.send_signal(number)
            process.wait(END_TIMEOUT_S)
            assert process.stdout is not None
            process.stdout.close()

    def remove(self) -> None:
        """End it and remove its folders."""
        self.end(signal.SIGTERM)
        for folder in (self.state, self.run_dir):
            shutil.rmtree(folder)

    def left(self) -> list[str]:
        """Return what a daemon without sandboxes and bakes should not have, zygotes aside."""
        folders = (self.settings.sandboxes_dir, self.settings.bakes_dir, self.state / "staging")
        return [str(entry) for folder in folders for entry in folder.iterdir()]

    def vmm_processes(self) -> set[int]:
        """Return the processes of its machines and zygotes."""
        return processes.of(self.run_dir)
