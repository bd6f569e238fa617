"""What a kernel, or a seccomp profile, answers is found out: each in a process of its own."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from forkd.host.refusals import hides_clone3

CLONE3, PRCTL = 435, 157
"""Numbers of system calls."""

UNDER_A_PROFILE = """
import ctypes, struct, sys
from forkd.host import refusals

libc = ctypes.CDLL(None, use_errno=True)
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
asked, number, answer = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ALLOW, ANSWER = 0x7FFF0000, 0x00050000 | answer
program = b"".join(
    struct.pack("<HBBI", *each)
    for each in ((LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ANSWER),
                 (RETURN, 0, 0, ALLOW))
)
code = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
print(getattr(refusals, asked)())
"""


def test_this_host_does_not_hide_it() -> None:
    assert not hides_clone3()


def answered(asked: str, number: int, answer: int) -> str:
    """Return what is said of a call that the kernel answers so."""
    command = [sys.executable, "-c", UNDER_A_PROFILE, asked, str(number), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - our own program
    return done.stdout.strip()


@pytest.mark.parametrize("answer", [errno.ENOSYS, errno.EPERM])
def test_a_profile_that_hides_it_is_found_out(answer: int) -> None:
    assert answered("hides_clone3", CLONE3, answer) == "True"


@pytest.mark.parametrize(
    ("answer", "can"), [(0, "True"), (errno.ENODEV, "False"), (errno.EINVAL, "False")]
)
def test_whether_a_kernel_schedules_cores_is_found_out(answer: int, can: str) -> None:
    """ENODEV: no two threads share a core; EINVAL: the kernel is built without."""
    assert answered("schedules_cores", PRCTL, answer) == can
