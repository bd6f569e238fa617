"""A full private disk is ENOSPC to the program that writes, and what is deleted comes back."""

from __future__ import annotations

import asyncio
import io
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.engine.control import Control
from forkd.engine.process import CONTROL_SOCKET
from forkd.model.sandbox import BranchOptions, ForkOptions
from tests.support.callers import CALLER
from tests.support.real_host import FORK_DEADLINE_S, REAL, shell, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.engine.replies import Metrics
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost
    from tests.support.soak import Soak

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

MIB = 1 << 20

LIMIT_MIB = 16

ROUNDS, SOAK_ROUNDS = 20, 500

TORTURE = (Path(__file__).parents[1] / "guest" / "full_disk.py").read_text()

WRITE = """
import errno, os, random

BLOCK = random.Random(0).randbytes(1 << 18)


def piece(number):
    return number.to_bytes(8, "little") + BLOCK[8:]


def free_bytes():
    space = os.statvfs("/")
    return space.f_bavail * space.f_frsize


def write(path, most):
    '''Write until the disk is full; return how much was written, and check that it is there.'''
    wrote = 0
    with open(path, "wb", buffering=0) as file:
        while wrote < most:
            number, within = divmod(wrote, len(BLOCK))
            try:
                wrote += file.write(piece(number)[within:within + most - wrote])
            except OSError as error:
                assert error.errno == errno.ENOSPC, error
                break
        os.fsync(file.fileno())
    with open("/proc/sys/vm/drop_caches", "w") as caches:
        caches.write("3")
    with open(path, "rb") as file:
        for start in range(0, wrote, len(BLOCK)):
            expected = piece(start // len(BLOCK))[:wrote - start]
            assert file.read(len(BLOCK)) == expected, f"wrong bytes at {start}"
    return wrote


def overwrite(most):
    '''Write over files of the image, which asks the file system for no room.'''
    wrote = 0
    for folder, _, names in os.walk("/usr/lib/python3"):
        for name in names:
            path = os.path.join(folder, name)
            if wrote < most and os.path.isfile(path) and not os.path.islink(path):
                with open(path, "r+b", buffering=0) as file:
                    data = file.read()
                    file.seek(0)
                    wrote += file.write(data)
                    os.fsync(file.fileno())
    return wrote
"""


async def test_a_full_disk_is_no_space_to_the_writer_and_what_is_deleted_comes_back(
    real_host: RealHost,
) -> None:
    async with real_host.forked(1, ForkOptions(disk_limit_mib=LIMIT_MIB)) as (sandbox,):
        await value(real_host, sandbox.id, WRITE)
        limit = LIMIT_MIB * MIB
        assert await value(real_host, sandbox.id, "free_bytes()") == limit

        wrote = await value(real_host, sandbox.id, f"write('/root/a', {2 * limit})")
        assert limit - MIB <= wrote <= limit
        assert await value(real_host, sandbox.id, "overwrite(4 << 20)") >= 4 * MIB
        stored = (await metrics(real_host, sandbox)).disk
        await shell(real_host, sandbox.id, "rm /root/a; sync -f /root")
        left = (await metrics(real_host, sandbox)).disk
        assert stored is not None
        assert left is not None
        assert left.top_bytes <= stored.top_bytes - wrote + MIB  # the folder, the bitmaps
        for _ in range(2):
            again = await value(real_host, sandbox.id, f"write('/root/a', {limit - 2 * MIB})")
            assert again >= limit - 2 * MIB
            await shell(real_host, sandbox.id, "rm /root/a")

        assert (await metrics(real_host, sandbox)).rejected["block"] == 0


async def test_a_branch_has_a_limit_of_its_own_and_its_source_gets_frozen_blocks_back(
    real_host: RealHost,
) -> None:
    limit = LIMIT_MIB * MIB
    fits = f"write('/root/{{}}', {limit - 4 * MIB}) >= {limit - 4 * MIB}"
    async with real_host.forked(1, ForkOptions(disk_limit_mib=LIMIT_MIB)) as (source,):
        await value(real_host, source.id, WRITE)
        assert await value(real_host, source.id, fits.format("a"))
        result = await real_host.service.branches.branch(CALLER, source.id, 1, BranchOptions())
        (sibling,) = result.fork.sandboxes
        try:
            # What it began with is frozen; deleting it makes room all the same.
            await shell(real_host, source.id, "rm /root/a; fstrim /")
            assert await value(real_host, source.id, fits.format("b"))
            assert await value(real_host, sibling.id, "os.path.getsize('/root/a')") > MIB
            assert await value(real_host, sibling.id, "free_bytes()") == limit
            assert await value(real_host, sibling.id, fits.format("b"))
            for each in (source, sibling):
                assert (await metrics(real_host, each)).rejected["block"] == 0
        finally:
            await real_host.service.sandboxes.delete(CALLER, sibling.id)

        await real_host.service.sandboxes.reset(CALLER, source.id, deadline_s=FORK_DEADLINE_S)
        assert await value(real_host, source.id, "__import__('os').path.exists('/root/b')") is False
        await value(real_host, source.id, WRITE)
        assert await value(real_host, source.id, "free_bytes()") == limit


@pytest.mark.soak
async def test_programs_survive_a_disk_that_is_full_again_and_again(
    real_host: RealHost, soak: Soak
) -> None:
    dice = soak.dice()
    async with real_host.forked(1, ForkOptions(disk_limit_mib=LIMIT_MIB)) as (sandbox,):
        guests = real_host.service.guests
        packed = await asyncio.to_thread(git_of_this_host)
        await guests.write_file(CALLER, sandbox.id, "/root/git.tar", chunks(packed))
        await shell(real_host, sandbox.id, "tar -C / -xf /root/git.tar && rm /root/git.tar")
        await value(real_host, sandbox.id, TORTURE)
        await value(real_host, sandbox.id, "prepare()")

        succeeded = [
            await value(real_host, sandbox.id, f"one_round({number}, {dice.getrandbits(32)})")
            for number in range(soak.count(ROUNDS, SOAK_ROUNDS))
        ]

        assert (await metrics(real_host, sandbox)).rejected["block"] == 0
        rows, commits, _ = (sum(column) for column in zip(*succeeded, strict=True))
        assert min(rows, commits) > 0, "one of the programs never had room for anything"


async def metrics(host: RealHost, sandbox: Sandbox) -> Metrics:
    """Return what a machine has counted."""
    path = host.settings.sandboxes_dir / sandbox.id / CONTROL_SOCKET
    async with await Control.connect(path) as control:
        return await control.metrics()


def git_of_this_host() -> bytes:
    """Pack git with its own libraries, whatever the guest has of them."""
    listed = subprocess.run(
        ["/usr/bin/ldd", "/usr/bin/git"], check=True, capture_output=True, text=True
    ).stdout
    libraries = {Path(word) for word in listed.split() if word.startswith("/")}
    loader = next(path for path in libraries if path.name.startswith("ld-linux"))
    script = f'#!/bin/sh\nexec /opt/git/{loader.name} --library-path /opt/git /opt/git/git "$@"\n'
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for path in (Path("/usr/bin/git"), *libraries):
            archive.add(path, f"opt/git/{path.name}")
        starter = tarfile.TarInfo("usr/local/bin/git")
        starter.mode, starter.size = 0o755, len(script)
        archive.addfile(starter, io.BytesIO(script.encode()))
    return packed.getvalue()


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    """Give bytes in pieces of a mebibyte."""
    for start in range(0, len(data), MIB):
        yield data[start : start + MIB]
