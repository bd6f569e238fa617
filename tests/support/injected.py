"""Have a thread of another process make a system call, as somebody would who has taken it over.

The thread is stopped where it waits in the kernel, which is just behind an instruction that makes a
system call; it goes back to that one with other registers (ptrace(2)), and is let go.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SEIZE, INTERRUPT, DETACH, GETREGS, SETREGS = 0x4206, 0x4207, 17, 12, 13

WAIT_FOR_THREADS = 0x40000000
"""`__WALL`: also for threads that are not children."""

SYSCALL = b"\x0f\x05"

ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")

NONE = (1 << 64) - 1


_NAMES = """
r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi
orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs
"""


class _Registers(ctypes.Structure):
    """`struct user_regs_struct` of x86-64."""

    _fields_ = [(name, ctypes.c_uint64) for name in _NAMES.split()]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def call(thread: int, number: int, *arguments: int) -> None:
    """Have a thread make system call `number`, and go on with whatever that gives.

    Args:
        thread: Its number, of a thread that waits in the kernel.
        number: Of x86-64.
        arguments: At most six; others are 0.
    """
    _ptrace(SEIZE, thread)
    try:
        _ptrace(INTERRUPT, thread)
        os.waitpid(thread, WAIT_FOR_THREADS)
        registers = _Registers()
        _ptrace(GETREGS, thread, ctypes.addressof(registers))
        assert _code_before(thread, registers.rip) == SYSCALL
        registers.rip -= len(SYSCALL)
        registers.rax = number
        registers.orig_rax = NONE  # or the kernel would make the call again that was interrupted
        values = arguments + (0,) * (len(ARGUMENTS) - len(arguments))
        for name, value in zip(ARGUMENTS, values, strict=True):
            setattr(registers, name, value & NONE)
        _ptrace(SETREGS, thread, ctypes.addressof(registers))
    finally:
        _ptrace(DETACH, thread)


def threads(pid: int) -> dict[str, int]:
    """Return the threads of a process by name."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "comm").read_text().strip(): int(task.name) for task in tasks}


def _code_before(thread: int, address: int) -> bytes:
    with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
        memory.seek(address - len(SYSCALL))
        return memory.read(len(SYSCALL))


def _ptrace(request: int, thread: int, data: int = 0) -> None:
    if _libc.ptrace(request, thread, None, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request}) of {thread}: {os.strerror(number)}")
