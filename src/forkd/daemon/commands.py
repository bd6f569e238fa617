"""What `forkd-daemon`'s commands do, once their flags are settings.

`serve --detach` forks after everything is imported, and the parent returns when the child says
that it listens: whoever starts a daemon this way neither polls nor guesses.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from typing import TYPE_CHECKING

from forkd import programs
from forkd.daemon.app import create_app
from forkd.daemon.logs import log_to
from forkd.daemon.server import listening, until_told_to_stop
from forkd.errors import ForkdError
from forkd.model.tree import TreeBudgets
from forkd.service import doctor as examination
from forkd.service.host_service import HostService
from forkd.service.settings import HostSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forkd.daemon.settings import Settings

log = logging.getLogger(__name__)

Say = "Callable[[dict[str, object]], None]"

LINE_BYTES_MAX = 64 * 1024
"""The longest first line of a detached daemon."""


def serve(settings: Settings, *, log_file: Path | None, detach: bool) -> int:
    """Serve until told to stop; return the exit status.

    Prints one line of JSON: `{"event": "listening", "urls", "pid"}`, or `{"event": "failed",
    "code", "message"}` and returns 1.
    """
    if detach:
        return _detached(settings, log_file)
    log_to(log_file)
    return asyncio.run(_serve(settings, _print))


def _detached(settings: Settings, log_file: Path | None) -> int:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid != 0:
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.readline(LINE_BYTES_MAX)
        sys.stdout.buffer.write(said or b'{"event": "failed", "code": "internal", "message": ""}\n')
        sys.stdout.flush()
        return 0 if json.loads(said or b"{}").get("event") == "listening" else 1
    os.close(reader)
    os.setsid()
    _let_go_of_streams(log_file)

    def say(event: dict[str, object]) -> None:
        os.write(writer, json.dumps(event).encode() + b"\n")
        os.close(writer)

    status = 1
    try:
        log_to(None)
        status = asyncio.run(_serve(settings, say))
    finally:
        logging.shutdown()
        os._exit(status)


def _let_go_of_streams(log_file: Path | None) -> None:
    """Point standard input at nothing, and both outputs at the log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    output = nothing
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _print(event: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def _serve(settings: Settings, say: Callable[[dict[str, object]], None]) -> int:
    try:
        async with contextlib.AsyncExitStack() as stack:
            service = HostService(host_settings(settings))
            await service.start()
            stack.push_async_callback(service.stop)
            urls = await stack.enter_async_context(listening(create_app(service), settings))
            log.info("listening on %s", ", ".join(urls))
            say({"event": "listening", "urls": urls, "pid": os.getpid()})
            await until_told_to_stop()
            log.info("told to stop")
    except ForkdError as error:
        log.error("%s (%s)", error, error.code)  # noqa: TRY400 - the message is the news
        with contextlib.suppress(OSError):
            say({"event": "failed", "code": error.code, "message": str(error)})
        return 1
    return 0


def host_settings(settings: Settings) -> HostSettings:
    """Return what the service needs to know.

    Raises:
        HostError: The VMM or the agent is nowhere to be found.
    """
    return HostSettings(
        vmm=settings.vmm or programs.find(programs.VMM),
        agent=settings.agent or programs.find(programs.AGENT),
        cache_dir=settings.cache_dir or settings.state_dir / "cache",
        state_dir=settings.state_dir,
        run_dir=settings.run_dir,
        budgets=TreeBudgets(
            live_max=settings.tree_live,
            depth_max=settings.tree_depth,
            private_mib_max=settings.tree_private_mib,
        ),
    )


def build(settings: Settings, recipe: Path) -> int:
    """Build an image here, showing each step; return the exit status."""
    from forkd.images.__main__ import main as images  # noqa: PLC0415 - a command of its own

    agent = settings.agent or programs.find(programs.AGENT)
    cache = settings.cache_dir or settings.state_dir / "cache"
    return images(["build", str(recipe), "--cache", str(cache), "--agent", str(agent)])


def doctor(settings: Settings, *, as_json: bool) -> int:
    """Examine the host and print what was found; return 1 if something is missing."""
    found = examination.examine(
        examination.Places(
            state_dir=settings.state_dir,
            cache_dir=settings.cache_dir or settings.state_dir / "cache",
        )
    )
    if as_json:
        sys.stdout.write(examination.as_json(found) + "\n")
    else:
        sys.stdout.write(examination.as_text(found) + "\n")
    return examination.exit_status(found)
