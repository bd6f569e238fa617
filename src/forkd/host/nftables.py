"""Packet filtering, through libnftables: the library of the `nft` program, in this process.

A command is text in the language of nft(8), which is applied whole or not at all.  Starting `nft`
for each would cost a fork of the daemon per fork of a sandbox.

The library waits with select(2), which ends the process if its socket is descriptor 1,024 or above:
a daemon has so many with nine hundred sandboxes.  So commands run in a thread that has a table of
descriptors of its own, with hardly any in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from forkd.errors import HostError
from forkd.host.faults import host_error, kernel_call

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = "libnftables.so.1"
"""The library's name; Debian has it in `libnftables1`, on which `nftables` depends."""

_OUTPUT_JSON = 1 << 4
_LOCK = threading.Lock()
"""The library says nothing of threads."""
_SAID_CHARS_MAX = 300

_LIBC = ctypes.CDLL(None, use_errno=True)
_STANDARD = 3
"""Descriptors that every process has; those above are the daemon's."""
_DESCRIPTOR_MAX = 0xFFFF_FFFF
_CLOSE_RANGE_UNSHARE = 1 << 1
"""linux/close_range.h: for this thread alone, whose new table has no copies of what is closed."""


def is_available() -> bool:
    """Whether the library is here."""
    try:
        _library()
    except OSError:
        return False
    return True


def run(commands: str) -> None:
    """Apply commands in the network namespace of this thread: all of them, or none.

    Raises:
        HostError: The library is not here, or the kernel refused.
        CapacityError: The kernel has no thread, descriptor or memory for it.
    """
    _run(commands, json_output=False)


def read(command: str) -> list[dict[str, Any]]:
    """Return what a command of nft lists, as its JSON has it (libnftables-json(5)).

    Raises:
        HostError: As `run`; the object does not exist.
        CapacityError: As `run`.
    """
    found: list[dict[str, Any]] = json.loads(_run(command, json_output=True))["nftables"]
    return found


def tables() -> set[str]:
    """Return the names of all tables; none where there is no packet filter."""
    try:
        listed = read("list tables")
    except HostError:
        return set()
    return {each["table"]["name"] for each in listed if "table" in each}


def _run(commands: str, *, json_output: bool) -> bytes:
    with _LOCK, ThreadPoolExecutor(1, "nftables") as ours:  # is in the namespaces of this thread
        try:
            answer = ours.submit(_run_apart, commands, json_output=json_output)
        except RuntimeError as error:  # the kernel has no thread to give
            refused = OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            raise host_error("filter the network", refused) from error
        return answer.result()


def _run_apart(commands: str, *, json_output: bool) -> bytes:
    """Run commands, for which this thread loses its descriptors: it is to end then."""
    with kernel_call("filter the network from a thread of its own (close_range, Linux 5.9)"):
        if _LIBC.close_range(_STANDARD, ctypes.c_uint(_DESCRIPTOR_MAX), _CLOSE_RANGE_UNSHARE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with _context(json_output=json_output) as (library, context):
        if library.nft_run_cmd_from_buffer(context, commands.encode()) != 0:
            said: bytes = library.nft_ctx_get_error_buffer(context)
            first = said.decode(errors="replace").strip()[:_SAID_CHARS_MAX]
            raise HostError(f"cannot filter the network: nftables said: {first}")
        output: bytes = library.nft_ctx_get_output_buffer(context)
        return output


@contextlib.contextmanager
def _context(*, json_output: bool) -> Iterator[tuple[ctypes.CDLL, int]]:
    """Yield what commands run in: of this thread's network namespace."""
    with kernel_call("filter the network (libnftables1 is needed)"):
        library = _library()
        context = library.nft_ctx_new(0)
        if not context:
            raise OSError(errno.EPERM, "libnftables does not start")
    try:
        library.nft_ctx_buffer_output(context)
        library.nft_ctx_buffer_error(context)
        library.nft_ctx_output_set_flags(context, _OUTPUT_JSON if json_output else 0)
        yield library, context
    finally:
        library.nft_ctx_free(context)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    library.nft_ctx_new.argtypes = [ctypes.c_uint32]
    library.nft_ctx_new.restype = ctypes.c_void_p
    library.nft_ctx_free.argtypes = [ctypes.c_void_p]
    library.nft_ctx_free.restype = None
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    library.nft_ctx_output_set_flags.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.nft_ctx_output_set_flags.restype = None
    for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    return library
