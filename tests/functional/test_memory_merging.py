"""A VMM takes no part in the merging of pages, whatever whoever started it has asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forkd import programs

MERGING = """
import ctypes, os, sys
PR_SET_MEMORY_MERGE = 67
assert ctypes.CDLL(None).prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""


def merges(pid: int) -> bool:
    """Whether all pages of a process may be merged."""
    lines = Path(f"/proc/{pid}/ksm_stat").read_text(encoding="ascii").splitlines()
    said = dict(line.split(": ") for line in lines if ": " in line)
    return said["ksm_merge_any"] == "yes"


def can_tell() -> bool:
    try:
        merges(os.getpid())
    except (OSError, LookupError):
        return False
    return True


@pytest.mark.parametrize(("program", "takes_part"), [("cat", True), (programs.VMM, False)])
def test_merging_that_was_inherited_ends_with_the_vmm(
    tmp_path: Path, program: str, *, takes_part: bool
) -> None:
    """Each program waits for its file, so that it can be looked at; `cat` keeps what it has."""
    if not can_tell():
        pytest.skip("this kernel does not say whose pages it merges (Linux 6.14 does)")
    waited_for = tmp_path / "state"
    os.mkfifo(waited_for)
    command = [str(programs.find(program)), "inspect"] if program == programs.VMM else ["/bin/cat"]

    with (
        subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", MERGING, *command, waited_for], stderr=subprocess.DEVNULL
        ) as process,
        waited_for.open("wb"),  # the program has begun when this returns
    ):
        found = merges(process.pid)

    assert found is takes_part
