"""Another user of the host reaches nothing of the daemon's and of its machines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd.daemon.app import create_app
from forkd.daemon.server import listening
from forkd.daemon.settings import Settings
from forkd.host import users
from forkd.model.sandbox import ForkOptions
from tests.support.audited import audited
from tests.support.callers import CALLER
from tests.support.fake_service import FakeService
from tests.support.no_records import no_tokens
from tests.support.service_host import TAG, FakeHost, fake_host

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["fake_host"]

pytestmark = pytest.mark.needs("root")

GROUP = 2_142_900_008
"""A group without users on this host."""

AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")

CONNECT = """
import socket, sys
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.connect(path)
            print("in")
        except OSError as error:
            print(type(error).__name__)
"""


def as_nobody(code: str, *arguments: Path | str) -> list[str]:
    """Run Python as a user who owns nothing; return the lines that it prints."""
    done = subprocess.run(  # noqa: S603 - our own code
        [*AS_NOBODY, sys.executable, "-I", "-c", code, *map(str, arguments)],
        check=True, capture_output=True, text=True, timeout=60, cwd="/",
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may look into."""
    with tempfile.TemporaryDirectory(prefix="fk", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.parametrize(("mode", "outcome"), [(None, "PermissionError"), (0o666, "in")])
async def test_the_daemons_socket_is_its_users_and_groups_unless_told_otherwise(
    open_folder: Path, mode: int | None, outcome: str
) -> None:
    path = open_folder / "forkd.sock"
    settings = Settings(socket=path) if mode is None else Settings(socket=path, socket_mode=mode)
    async with listening(create_app(FakeService()), settings, no_tokens()):
        assert as_nobody(CONNECT, path) == [outcome]
        assert path.stat().st_mode & 0o777 == (mode or 0o660)


async def test_users_of_the_sockets_group_may_talk_to_the_daemon_and_others_may_not(
    open_folder: Path,
) -> None:
    path = open_folder / "below" / "forkd.sock"
    settings = Settings(socket=path, socket_group=GROUP)
    member = ["/usr/bin/setpriv", "--reuid=65534", "--regid=65534", f"--groups={GROUP}", "--"]
    async with listening(create_app(FakeService()), settings, no_tokens()):
        done = subprocess.run(  # noqa: S603, ASYNC221 - our own code
            [*member, sys.executable, "-I", "-c", CONNECT, path],
            check=True, capture_output=True, text=True, timeout=60, cwd="/",
        )  # fmt: skip
        assert done.stdout.splitlines() == ["in"]
        assert as_nobody(CONNECT, path) == ["PermissionError"]
        assert path.stat().st_gid == GROUP


async def test_sockets_logs_and_disks_of_machines_and_what_is_stored_are_closed_to_others(
    fake_host: FakeHost,
) -> None:
    settings = fake_host.settings
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        with _passable(settings.run_dir, settings.state_dir):
            folder = settings.sandboxes_dir / sandbox.id
            sockets = [*folder.glob("*.sock"), *settings.zygotes_dir.glob("*/*.sock")]
            assert len(sockets) == 3
            assert as_nobody(CONNECT, *sockets) == ["PermissionError"] * 3
            files = [*folder.iterdir(), settings.state_dir / "forkd.db"]
            files += (settings.state_dir / "snapshots" / TAG).iterdir()
            look = "import os, sys\nprint(*(os.access(p, os.R_OK) for p in sys.argv[1:]))"
            assert as_nobody(look, *files) == [" ".join(["False"] * len(files))]
        await service.sandboxes.delete(CALLER, sandbox.id)


@contextlib.contextmanager
def _passable(*folders: Path) -> Iterator[None]:
    """Open what is around our folders, so that these alone are in the way."""
    above = {parent for folder in folders for parent in folder.parents}
    modes = {path: path.stat().st_mode & 0o7777 for path in above}
    for path, mode in modes.items():
        path.chmod(mode | 0o755)
    try:
        yield
    finally:
        for path, mode in modes.items():
            path.chmod(mode)


ASK = """
import socket, sys
for request in sys.argv[2:]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(sys.argv[1])
        sock.sendall(request.encode())
        print(b"".join(iter(lambda: sock.recv(65536), b"")).split()[1].decode())
"""

READ, ADMINISTER = (
    f"GET {path} HTTP/1.1\r\nHost: forkd\r\nConnection: close\r\n\r\n"
    for path in ("/v2/sandboxes", "/v2/tokens")
)


@pytest.mark.parametrize(
    ("daemons_user", "tokens_status"),
    [(0, "403"), (65534, "200")],
    ids=["a stranger", "the daemon's own user"],
)
async def test_over_the_unix_socket_a_user_is_who_the_kernel_names(
    tmp_path: Path,
    open_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemons_user: int,
    tokens_status: str,
) -> None:
    monkeypatch.setattr(users, "user_id", lambda: daemons_user)
    async with audited(tmp_path, socket_mode=0o666) as daemon:
        sock = open_folder / "forkd.sock"
        os.rename(daemon.unix_url.removeprefix("unix://"), sock)  # noqa: PTH104 - within this loop
        said = await asyncio.to_thread(as_nobody, ASK, sock, READ, ADMINISTER)
        assert said == ["200", tokens_status]
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(sock), verify=False),
            base_url="http://forkd",
        ) as root:
            assert (await root.get("/v2/tokens")).status_code == 200

        read, administer, roots = await daemon.lines(3)
    assert read["principal"] == administer["principal"] == "user:nobody"
    assert read["remote"].startswith("unix:uid=65534,pid=")
    assert (roots["principal"], roots["remote"]) == (
        "user:root", f"unix:uid=0,pid={os.getpid()}",
    )  # fmt: skip
