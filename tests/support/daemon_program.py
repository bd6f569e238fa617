"""`forkd-daemon` as it is installed, over the fake VMM, and `forkd` to talk to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.service_host import FakeHost

PROGRAMS = Path(sys.executable).parent

END_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ServedHost:
    """A fake host that a daemon serves.

    Attributes:
        url: Where it answers.
        environment: That of `forkd`, as which it talks to this daemon and keeps nothing.
    """

    host: FakeHost
    url: str
    environment: dict[str, str]

    def forkd(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run `forkd` to its end."""
        return subprocess.run(  # noqa: S603 - our own
            [PROGRAMS / "forkd", *args],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def bare_environment() -> dict[str, str]:
    """Return what any program needs: where programs are, and where temporary files go.

    Without the latter they would be in the usual folder, where another suite looks for what its
    tests have left.
    """
    return {"PATH": os.defpath, "TMPDIR": tempfile.gettempdir()}


def environment_of(host: FakeHost) -> dict[str, str]:
    """Return the environment of a daemon of this host, and of `forkd` to talk to it."""
    settings, socket = host.settings, host.settings.run_dir / "forkd.sock"
    return {
        **bare_environment(),
        "HOME": str(host.folder),
        "FORKD_HOME": str(host.folder / "home"),
        "FORKD_URL": f"unix://{socket}",
        "FORKD_SOCKET": str(socket),
        "FORKD_STATE_DIR": str(settings.state_dir),
        "FORKD_RUN_DIR": str(settings.run_dir),
        "FORKD_CACHE_DIR": str(settings.cache_dir),
        "FORKD_RECIPE_DIRS": ":".join(map(str, settings.recipe_dirs)),
        "FORKD_VMM": str(settings.vmm),
        "FORKD_AGENT": str(settings.agent),
        "FORKD_CGROUPS": "on" if settings.cgroups else "off",
        "FORKD_CONFIG": "",
    }


def own_settings(home: Path) -> dict[str, str]:
    """Return the settings with which installed programs keep to a home, and need no root."""
    socket = home / "run/forkd.sock"
    return {
        "HOME": str(home),
        "FORKD_STATE_DIR": str(home / "state"),
        "FORKD_RUN_DIR": str(home / "run"),
        "FORKD_CACHE_DIR": str(home / "cache"),
        "FORKD_SOCKET": str(socket),
        "FORKD_URL": f"unix://{socket}",
        "FORKD_CGROUPS": "off",
        "FORKD_JAIL": "off",
        "FORKD_NETWORK_SLOTS": "0",
    }


@contextlib.contextmanager
def served(host: FakeHost) -> Iterator[ServedHost]:
    """Serve a host for as long as the block lasts; sandboxes are the caller's to end."""
    environment = environment_of(host)
    log = host.folder / "daemon.log"
    command = [str(PROGRAMS / "forkd-daemon"), "serve", "--log", str(log)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as daemon:  # noqa: S603 - our own
        try:
            assert daemon.stdout is not None
            said = json.loads(daemon.stdout.readline() or "{}")
            assert said.get("event") == "listening", log.read_text()
            yield ServedHost(host, environment["FORKD_URL"], environment)
            assert "crashed" not in log.read_text(), log.read_text()
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(END_TIMEOUT_S)
