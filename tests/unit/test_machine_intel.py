"""What the Intel machine is told at its start, and what is read of its end."""

from __future__ import annotations

import io
import os
import pty
import shlex
import tarfile
import time
from pathlib import Path

import pytest

from forkd.errors import HostError
from forkd.machine import Kernel
from forkd.machine.qemu import CMDLINE
from tests.intel import machine

JOB = machine.Job("true\n", Path("/check out"))
KERNEL = Kernel(Path("/k/vmlinuz"), Path("/k/modules"), "6.1.0-56-amd64")


def archive(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def test_the_kernels_line_is_the_helper_machines_and_has_the_counters_rate() -> None:
    line = machine.boot_settings().splitlines()[0]

    rest = CMDLINE.removeprefix("console=ttyS0 ")
    assert line.endswith(f"console=ttyS0,115200 {rest} tsc_early_khz=1000000")


def test_the_settings_are_words_of_a_shell_and_leave_kvm_to_the_script() -> None:
    values = dict(word.split("=", 1) for word in shlex.split(machine.settings(JOB, KERNEL)))

    assert values["WORKING_FOLDER"] == "/check out"
    assert values["RELEASE"] == "6.1.0-56-amd64"
    assert "tun" in values["MODULES"].split()
    assert "kvm" not in values["MODULES"]


def test_what_a_job_left_is_read_by_name(tmp_path: Path) -> None:
    path = tmp_path / "results.img"
    path.write_bytes(archive({"./status": b"1\n", "./junit.xml": b"<xml/>"}) + bytes(1 << 20))

    assert machine.read_results(path) == {"status": b"1\n", "junit.xml": b"<xml/>"}


def test_a_machine_that_crashed_has_left_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.img"
    for data in (bytes(1 << 20), b"started \n" + bytes(1 << 20), archive({"./junit.xml": b""})):
        path.write_bytes(data)
        assert machine.read_results(path) is None


def test_all_that_a_job_printed_is_passed_on_before_its_machine_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 1000)
    output, writer = os.pipe2(os.O_NONBLOCK)
    display, terminal = pty.openpty()
    os.write(terminal, b"what the display shows")
    os.write(writer, b"x" * 60_000)
    os.close(terminal)
    os.close(writer)

    printed = b"".join(machine.follow(output, display, time.monotonic() + 60.0))

    os.close(output)
    os.close(display)
    assert printed == b"x" * 60_000


def test_a_machine_that_takes_too_long_is_given_up() -> None:
    output, writer = os.pipe2(os.O_NONBLOCK)
    display, terminal = pty.openpty()

    with pytest.raises(HostError, match="took too long; --deadline"):
        list(machine.follow(output, display, time.monotonic()))

    for descriptor in (output, writer, display, terminal):
        os.close(descriptor)
