"""System calls that a kernel, or a container's seccomp profile, may lack, tried without effect."""

from __future__ import annotations

import ctypes
import errno

_LIBC = ctypes.CDLL(None, use_errno=True)

_CLONE3 = 435
"""Its number, on x86_64 as on all others."""

_HIDDEN = (errno.ENOSYS, errno.EPERM)
"""What such profiles say: Docker's the first, older ones the second."""


_SCHED_CORE, _GET, _OF_THREAD = 62, 0, 0
"""`PR_SCHED_CORE` of prctl(2), and what it is asked for."""


def hides_clone3() -> bool:
    """Whether `clone3` is refused, before the kernel looks at what it is given.

    It is given nothing, which the kernel itself answers with EINVAL.
    """
    _LIBC.syscall(_CLONE3, None, 0)
    return ctypes.get_errno() in _HIDDEN


def schedules_cores() -> bool:
    """Whether two threads of a processor share a core here, and the kernel can keep them apart."""
    cookie = ctypes.c_uint64()
    return int(_LIBC.prctl(_SCHED_CORE, _GET, 0, _OF_THREAD, ctypes.byref(cookie))) == 0
