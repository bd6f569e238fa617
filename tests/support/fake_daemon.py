"""A daemon in a process of its own over the fake VMM, which may crash or be started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import TYPE_CHECKING, Self

import httpx

from forkd.daemon import commands, server
from forkd.daemon.settings import Bind, Settings
from forkd.service.host import open_host
from forkd.service.supervision import TaskKind
from tests.support import crashing, warm
from tests.support.service_host import FakeHost, make_host, until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from types import TracebackType

    from forkd.service.host import Host
    from forkd.service.settings import HostSettings

TASKS = "tasks"
"""The file in which a daemon that was sent `SIGUSR1` names its tasks, one a line."""

END_TIMEOUT_S = 60.0

warm.wanted.append(__name__)


class FakeDaemon:
    """The daemon of a `FakeHost`; it runs within its `with` block.

    Attributes:
        socket: Where it listens.
        http: A client of it.
        status: How it ended.
        tcp_url: Where it answers with a token, if it was to serve TCP; empty otherwise.
    """

    def __init__(
        self,
        host: FakeHost,
        crash: Sequence[str] | None = None,
        *,
        tcp: bool = False,
        tls: tuple[Path, Path] | None = None,
        told_early: bool = False,
    ) -> None:
        self.host = host
        self._told_early = told_early
        self._crash = None if crash is None else tuple(map(str, crash))
        self._tcp = tcp
        self._tls = tls
        self.tcp_url = ""
        self.status: int | None = None
        self.socket = host.settings.run_dir / "forkd.sock"
        self.url = f"unix://{self.socket}"
        transport = httpx.HTTPTransport(uds=str(self.socket), verify=False)
        self.http = httpx.Client(
            transport=transport, base_url="http://forkd", timeout=END_TIMEOUT_S
        )

    @property
    def log(self) -> Path:
        """Where it writes its log."""
        return self.host.folder / "log"

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    async def tasks(self) -> list[str]:
        """Return the names of all tasks in its event loop, its service's and its server's."""
        told = self.host.folder / TASKS
        told.unlink(missing_ok=True)
        os.kill(self.pid, signal.SIGUSR1)
        await until(told.exists)
        return told.read_text().splitlines()

    def __enter__(self) -> Self:
        self._process = warm.start(
            serve,
            folder=self.host.folder,
            run_dir=self.host.settings.run_dir,
            crash=self._crash,
            tcp=self._tcp,
            tls=self._tls,
            told_early=self._told_early,
        )
        said = json.loads(self._process.stdout.readline())
        assert said["event"] == "listening", said
        self.tcp_url = said["urls"][1] if self._tcp else ""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        if self._process.poll() is None:
            self._process.terminate()
        self.until_ended()
        self._process.stdout.close()

    def until_ended(self) -> int:
        """Return its exit status, once it has ended."""
        self.status = self._process.wait(END_TIMEOUT_S)
        return self.status


def serve(  # noqa: PLR0913 - what a test chooses
    *,
    folder: Path,
    run_dir: Path,
    crash: tuple[str, ...] | None,
    tcp: bool,
    tls: tuple[Path, Path] | None,
    told_early: bool,
) -> int:
    """Be the daemon; return its exit status."""
    if crash is not None:
        crashing.install(TaskKind(crash[0]), crash[1], folder)
    tell_tasks(folder)
    if told_early:
        tell_to_stop_early()
    host = make_host(folder, run_dir)
    server.DRAIN_TIMEOUT_S = 1  # clients that are not answered by then wait for ever
    vars(commands)["host_settings"] = lambda _: host.settings
    cert, key = tls or (None, None)
    settings = Settings(
        socket=run_dir / "forkd.sock",
        state_dir=host.settings.state_dir,
        bind=Bind("127.0.0.1", 0) if tcp else None,
        tls_cert=cert,
        tls_key=key,
    )
    return commands.serve(settings, log_file=folder / "log", detach=False)


def tell_to_stop_early() -> None:
    """Have this process be told to stop while it opens its host."""

    def open_late(settings: HostSettings) -> AbstractAsyncContextManager[Host]:
        os.kill(os.getpid(), signal.SIGTERM)
        return open_host(settings)

    vars(commands)["open_host"] = open_late


def tell_tasks(folder: Path) -> None:
    """Have this process say what tasks it has whenever it is asked to."""

    def tell(*_: object) -> None:
        names = sorted(task.get_name() for task in asyncio.all_tasks())
        new = folder / f"{TASKS}.new"
        new.write_text("\n".join(names))
        new.replace(folder / TASKS)

    signal.signal(signal.SIGUSR1, tell)
