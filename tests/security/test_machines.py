"""Real machines: who may command them, and what a guest can reach and fill."""

from __future__ import annotations

import errno
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd.engine.frames import HEADER_BYTES, Kind, encode_json
from forkd.errors import GuestError
from forkd.model.sandbox import ForkOptions
from tests.support import nameless
from tests.support.callers import CALLER
from tests.support.real_host import REAL, TAG, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ASK = """
import os, socket, sys
os.setgroups([]); os.setresgid(*[int(sys.argv[1])] * 3); os.setresuid(*[int(sys.argv[1])] * 3)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[2])
    try:
        sock.sendall(bytes.fromhex(sys.argv[3]))
        print(sock.recv(4096).hex())
    except (BrokenPipeError, ConnectionResetError):
        print()
"""

MIB = 1 << 20

LIMIT_MIB = 16
"""Of each sandbox's disk."""

PORTS = (1, 22, 80, 1024, 1025, 5000, 65536, 4_000_000_000)


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(real_host: RealHost) -> AsyncIterator[Sandbox]:
    async with real_host.forked(1, ForkOptions(disk_limit_mib=LIMIT_MIB)) as (forked,):
        yield forked


async def test_a_control_socket_answers_no_user_of_another_sandbox(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    """Even if its folders let one in.

    Users outside of the machine's namespace all look like one to it, root among them: the folders'
    modes alone keep those out.
    """
    owner = real_host.service.sandboxes.roster.find(sandbox.id)
    assert owner is not None
    assert owner.lease.uid is not None
    other = owner.lease.uid + 1
    folder = real_host.settings.sandboxes_dir / sandbox.id
    path = folder / "control.sock"
    opened = {each: each.stat().st_mode for each in (path, *path.parents)}
    try:
        for each, mode in opened.items():
            each.chmod(stat.S_IMODE(mode) | (0o666 if each == path else 0o755))
        request = encode_json(Kind.REQUEST, {"op": "status"}).hex()

        def ask(user: int) -> bytes:
            args = [sys.executable, "-I", "-c", ASK, str(user), str(path), request]
            done = subprocess.run(args, check=True, capture_output=True, timeout=60)  # noqa: S603 - ours
            return bytes.fromhex(done.stdout.decode().strip())

        assert ask(other) == b""
        assert b'"running"' in ask(0)[HEADER_BYTES:]
    finally:
        for each, mode in opened.items():
            each.chmod(stat.S_IMODE(mode))
    assert await value(real_host, sandbox.id, "1 + 1") == 2


async def test_a_guest_reaches_no_port_of_the_host_over_vsock(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    code = """
import socket
def reached(cid, port):
    with socket.socket(socket.AF_VSOCK) as sock:
        sock.settimeout(20 if cid == 2 else 1)
        try:
            sock.connect((cid, port))
            return True
        except OSError as error:
            # The host refuses; what is for nobody is dropped.
            assert cid != 2 or not isinstance(error, TimeoutError), port
            return False
"""
    await value(real_host, sandbox.id, code)
    asked = f"[p for p in {PORTS} if reached(2, p)] + [c for c in (0, 4, 5) if reached(c, 1024)]"
    assert await value(real_host, sandbox.id, asked) == []


@pytest.mark.soak(only=True)
async def test_a_guest_that_writes_over_its_disk_harms_nobody(
    real_host: RealHost, sandbox: Sandbox
) -> None:
    service = real_host.service
    overwrite = """
import os
disk = os.open("/dev/vda", os.O_WRONLY)
piece = os.urandom(1 << 20) * 32

def overwrite(start, end):
    try:
        for offset in range(start, end, len(piece)):
            os.pwrite(disk, piece[:end - offset], offset)
            os.fsync(disk)
    except OSError as error:
        return error.errno

overwrite(0, 8 << 20)
"""
    assert await value(real_host, sandbox.id, overwrite) is None
    with pytest.raises(GuestError):
        await service.comparisons.compare(CALLER, TAG, sandbox.id)

    rest = "overwrite(8 << 20, os.lseek(disk, 0, os.SEEK_END))"
    assert await value(real_host, sandbox.id, rest) == errno.EIO, "its disk has a limit"
    (image,) = real_host.settings.state_dir.glob("images/*/rootfs.ext4")
    layers = (image.stat(), (real_host.snapshot.directory / "disk.layer").stat())
    base = sum(each.st_blocks * 512 for each in layers)
    most = LIMIT_MIB * MIB + base + layers[0].st_size // 16 + 17 * MIB
    assert sandbox.pid is not None
    assert LIMIT_MIB * MIB < nameless.stored_bytes(sandbox.pid) <= most
    async with real_host.forked(1, ForkOptions()) as (sibling,):
        assert await value(real_host, sibling.id, "len(open('/etc/passwd').read()) > 0") is True
