"""Run a program from which KVM hides one of its extensions: `python withheld.py NUMBER PROGRAM…`.

What an extension is worth can then be measured with one build on one kernel.  A filter of system
calls answers `KVM_CHECK_EXTENSION` for that number with 0, "not there".  A program that is to have
the extension is run with a number that KVM does not know, so that both have such a filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

PRE_FAULT_MEMORY = 236
"""`KVM_CAP_PRE_FAULT_MEMORY`."""

NOTHING = 0xFFFF
"""The number of no extension."""

KVM_CHECK_EXTENSION = 0xAE03

_SYS_IOCTL = 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS = 38
_ALLOW, _ANSWER_0 = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARGUMENT_1, _ARGUMENT_2 = 0, 24, 32
"""Where `seccomp_data` has the number of the call, and the lower halves of its arguments."""


def instructions(extension: int) -> bytes:
    """Return the filter, as `sock_filter` structures."""
    program = (
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 5, _SYS_IOCTL),
        (_LOAD, 0, 0, _ARGUMENT_1),
        (_EQUAL, 0, 3, KVM_CHECK_EXTENSION),
        (_LOAD, 0, 0, _ARGUMENT_2),
        (_EQUAL, 0, 1, extension),
        (_RETURN, 0, 0, _ANSWER_0),
        (_RETURN, 0, 0, _ALLOW),
    )
    return b"".join(struct.pack("=HBBI", *each) for each in program)


def withhold(extension: int) -> None:
    """Have KVM hide an extension from this process and its children.

    Raises:
        OSError: The kernel refused.
    """
    code = ctypes.create_string_buffer(instructions(extension))
    program = ctypes.create_string_buffer(
        struct.pack("@HP", len(code.raw) // 8, ctypes.addressof(code))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0),
    ):
        if libc.prctl(*call) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def main() -> int:
    """Run the program; return the exit status if it cannot be run."""
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal():  # noqa: PLR2004 - itself, number, program
        sys.stderr.write("usage: withheld.py NUMBER PROGRAM [ARGUMENT…]\n")
        return errno.EINVAL
    withhold(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - what it is for
    return 0


if __name__ == "__main__":
    sys.exit(main())
