"""A seccomp profile that hides `clone3` is found out in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from forkd.host.refusals import hides_clone3

UNDER_A_PROFILE = """
import ctypes, struct, sys
from forkd.host.refusals import hides_clone3

libc = ctypes.CDLL(None, use_errno=True)
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | int(sys.argv[1])
program = b"".join(
    struct.pack("<HBBI", *each)
    for each in ((LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, 1, 435), (RETURN, 0, 0, REFUSE),
                 (RETURN, 0, 0, ALLOW))
)
code = ctypes.create_string_buffer(program, len(program))
filter = struct.pack("<HxxxxxxQ", 4, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, filter, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
print(hides_clone3())
"""


def test_this_host_does_not_hide_it() -> None:
    assert not hides_clone3()


@pytest.mark.parametrize("errno", ["38", "1"], ids=["ENOSYS", "EPERM"])
def test_a_profile_that_hides_it_is_found_out(errno: str) -> None:
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", UNDER_A_PROFILE, errno], capture_output=True, text=True, check=True
    )

    assert done.stdout == "True\n"
