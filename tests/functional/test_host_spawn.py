"""What a process logs that outlives us is kept up to a limit, and never makes it wait."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from forkd.engine.configs import MachineConfig
from forkd.engine.process import start_machine
from forkd.errors import EngineExited
from forkd.host import rlimits, spawn
from forkd.host.spawn import LOG_BYTES_MAX, LOG_FULL
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.service_host import FakeHost

FLOOD = """
import os, select
left = {bytes}
try:
    while left:
        select.select([], [2], [])
        left -= os.write(2, b"x" * min(left, 4096))
except BrokenPipeError:
    pass
os.write(1, b"\\n")
select.select([], [], [])
"""
"""Logs so much, as fast as it is read; what finds no room in the pipe would be lost."""


@pytest.mark.parametrize("more", [0, 1, 1 << 20])
async def test_a_log_is_kept_up_to_its_limit(tmp_path: Path, more: int) -> None:
    log = tmp_path / "log"
    script = FLOOD.format(bytes=LOG_BYTES_MAX - 1 + more)

    command = [sys.executable, "-c", script]
    process, output = spawn.start(command, log=log, limits=rlimits.VMM)
    with process:
        assert await output.line(100) == b"\n"
        process.drain_log()
        kept = log.read_bytes()
        process.kill()
        assert await process.wait(10)

    full = LOG_FULL if more else b""
    assert kept == b"x" * min(LOG_BYTES_MAX, LOG_BYTES_MAX - 1 + more) + full


async def test_who_logs_when_nobody_listens_goes_on(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    script = f"trap '' PIPE; echo before >&2; echo; cat {go}; echo after >&2; echo > {go}.done"

    process, output = spawn.start(
        ["/bin/sh", "-c", script], log=tmp_path / "log", limits=rlimits.VMM
    )
    assert await output.line(100) == b"\n"
    process.drain_log()
    process.close()
    go.write_text("")

    await until((tmp_path / "go.done").exists)
    assert (tmp_path / "log").read_text() == "before\n"


async def test_what_a_process_said_before_it_ended_is_in_the_error(tmp_path: Path) -> None:
    vmm = tmp_path / "vmm"
    vmm.write_text("#!/bin/sh\necho no luck today >&2\n")
    vmm.chmod(0o755)
    config = MachineConfig(
        directory=tmp_path,
        kernel=tmp_path,
        initramfs=None,
        cmdline=None,
        vcpus=1,
        memory_bytes=1 << 27,
        disk=None,
    )

    with pytest.raises(EngineExited, match="no luck today"):
        await start_machine(vmm, config)


async def test_the_zygotes_log_is_in_its_folder_and_children_outlive_it(
    fake_host: FakeHost,
) -> None:
    async with fake_host.service() as service:
        await fake_host.bake(service, fake_host.recipe())
        (sandbox,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
        (folder,) = fake_host.settings.zygotes_dir.iterdir()
        (pid,) = service.figures.zygotes.pids()
        stderr = os.readlink(f"/proc/{pid}/fd/2")  # noqa: PTH115 - the kernel's
        assert stderr.startswith("pipe:")
        assert (folder / "vmm.log").stat().st_mode & 0o777 == 0o600

        await service.figures.zygotes.stop(TAG)

        assert (await service.guests.eval(CALLER, sandbox.id, "answer")).value == 42
        await service.sandboxes.delete(CALLER, sandbox.id)
