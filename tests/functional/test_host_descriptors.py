"""What a daemon does of the host while it has more descriptors than select(2) can wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from forkd.errors import CapacityError
from forkd.host import nftables

MANY = """
import os, resource
from pathlib import Path
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4_096), hard))
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1_100)]
"""

FILTER = """
from forkd.host import nftables
before = os.listdir("/proc/self/fd")
nftables.run("add table inet ours")
assert os.listdir("/proc/self/fd") == before
print(nftables.tables())
"""

END_CELL = """
import subprocess
from forkd.host.cells import Cell
with subprocess.Popen(["/bin/sleep", "60"], user=1_999_999, group=1_999_999) as inmate:
    Cell(Path("/nonexistent"), 1_999_999).end(10.0)
    print(inmate.wait())
"""


def said(script: str, *command: str) -> str:
    """Return what a process says that has a thousand descriptors; it must end by itself, with 0."""
    args = [*command, sys.executable, "-c", MANY + script]
    ended = subprocess.run(args, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="has a network namespace of its own")
def test_the_packet_filter_is_spoken_to_with_more_descriptors_than_select_takes() -> None:
    assert said(FILTER, "unshare", "--net") == "{'ours'}"


def test_a_kernel_without_a_thread_for_it_is_out_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    with pytest.raises(CapacityError, match=r"cannot filter the network: .*TasksMax"):
        nftables.tables()


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_a_cell_is_ended_with_more_descriptors_than_select_takes() -> None:
    assert said(END_CELL) == "-9"
