"""A program that we run ends when it should, with all it started, and says why it failed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from forkd.errors import HostError
from forkd.host import process
from forkd.host.process import Cancel, Watch, run

if TYPE_CHECKING:
    from pathlib import Path


def ended(pid: int) -> bool:
    """Tell whether a process is gone, waiting for its end by event."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return process_ends(pidfd)
    finally:
        os.close(pidfd)


def process_ends(pidfd: int) -> bool:

    ready, _, _ = select.select([pidfd], [], [], 10)
    return bool(ready)


def test_output_is_kept_and_lines_are_told_as_they_come() -> None:
    lines: list[str] = []

    finished = run(
        ["sh", "-c", "echo one; printf 'two\\rthree' >&2"],
        timeout_s=10,
        watch=Watch(on_line=lines.append),
    )

    assert finished.stdout == b"one\n"
    assert sorted(lines) == ["one", "three", "two"]


def test_a_failure_ends_with_the_programs_own_words() -> None:
    with pytest.raises(HostError, match=r"sh ended with status 3:\nno luck$") as caught:
        run(["sh", "-c", "echo no luck >&2; exit 3"], timeout_s=10)

    assert caught.value.context == {"program": "sh", "status": 3}


def test_death_by_a_signal_is_told_from_a_failure() -> None:
    with pytest.raises(HostError, match="killed by signal 9") as caught:
        run(["sh", "-c", "kill -9 $$"], timeout_s=10)

    assert caught.value.context == {"program": "sh", "signal": 9}


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(HostError, match="forkd-no-such-program is not installed"):
        run(["forkd-no-such-program"], timeout_s=10)


def test_at_the_deadline_everything_it_started_is_killed(tmp_path: Path) -> None:
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"

    with pytest.raises(HostError, match=r"did not end within 0\.5 seconds"):
        run(["sh", "-c", script], timeout_s=0.5)

    assert ended(int((tmp_path / "pid").read_text()))


def test_cancelling_ends_it_at_once() -> None:
    with Cancel() as cancel:
        watch = Watch(on_line=lambda _: cancel.set(), cancel=cancel)

        with pytest.raises(HostError, match="was cancelled"):
            run(["sh", "-c", "echo started; sleep 600"], timeout_s=30, watch=watch)


def test_a_cancelled_flag_ends_what_starts_later() -> None:
    with Cancel() as cancel:
        threading.Thread(target=cancel.set).run()

        with pytest.raises(HostError, match="was cancelled"):
            run(["sleep", "600"], timeout_s=30, watch=Watch(cancel=cancel))


def test_what_it_leaves_in_the_background_does_not_outlive_it() -> None:
    finished = run(["sh", "-c", "sleep 600 & echo $!"], timeout_s=30)

    assert ended(int(finished.stdout))


def test_endless_output_is_ended_and_only_its_tail_kept() -> None:
    with pytest.raises(HostError, match="wrote more than") as caught:
        run(["yes"], timeout_s=60)

    assert len(str(caught.value)) <= process.TAIL_BYTES_MAX + 100


def test_output_up_to_the_limit_is_kept_whole() -> None:
    count = process.STDOUT_BYTES_MAX

    finished = run(["head", "-c", str(count), "/dev/zero"], timeout_s=60)

    assert len(finished.stdout) == count


def test_secrets_in_our_environment_and_our_input_are_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORKD_TOKEN", "secret")
    monkeypatch.setenv("https_proxy", "http://proxy:3128")

    seen = run(["sh", "-c", "env; cat"], timeout_s=10).stdout.decode()

    assert "secret" not in seen
    assert "https_proxy=http://proxy:3128" in seen


def test_it_dies_with_us(tmp_path: Path) -> None:
    """Killing the builder outright leaves no program behind."""
    script = (
        "from forkd.host.process import run\n"
        f"run(['sh', '-c', 'echo $$ > {tmp_path}/pid; echo up > {tmp_path}/fifo; exec sleep 600'],"
        " timeout_s=900)\n"
    )
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen([sys.executable, "-c", script]) as builder:  # noqa: S603 - our own script
        assert (tmp_path / "fifo").read_text() == "up\n"
        builder.kill()

    assert ended(int((tmp_path / "pid").read_text()))
