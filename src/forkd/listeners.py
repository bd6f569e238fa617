"""Find out which process listens on a port of this host, for errors that say so.

Both sides need it, the daemon for its address and the client for forwarded ports, so this imports
nothing of either.  Linux tells it in /proc; elsewhere, and of other users' processes, nobody knows.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path

_PROC = Path("/proc")

_LISTENING = "0A"
"""TCP_LISTEN, as /proc/net/tcp has it."""

_STATE, _INODE = 3, 9
"""Columns of a socket's line there."""


def in_use(host: str, port: int) -> str:
    """Return what to say of a port that another program has: `in use by process 7 (nginx)`.

    Args:
        host: The address on which it cannot be listened, or a name.
        port: The port.
    """
    inodes = _inodes(host, port)
    found = _process(inodes) if inodes else None
    return "in use" if found is None else f"in use by process {found[0]} ({found[1]})"


def _inodes(host: str, port: int) -> set[str]:
    """Return the sockets that keep others from listening at an address."""
    try:
        asked = _as_in_proc(host)
    except ValueError:
        asked = ""  # a name, which may have several addresses: the port alone decides
    found = set()
    for table in ("tcp", "tcp6"):
        for line in _lines(_PROC / "net" / table)[1:]:
            words = line.split()
            address, _, its_port = words[1].rpartition(":")
            is_there = address == asked or "" in {address.strip("0"), asked.strip("0")}
            if words[_STATE] == _LISTENING and int(its_port, 16) == port and is_there:
                found.add(words[_INODE])
    return found


def _as_in_proc(host: str) -> str:
    """Return an address as /proc/net has it: words of 32 bits in the order of the processor."""
    packed = ipaddress.ip_address(host).packed
    return b"".join(packed[at : at + 4][::-1] for at in range(0, len(packed), 4)).hex().upper()


def _process(inodes: set[str]) -> tuple[int, str] | None:
    """Return number and name of a process that has one of some sockets; None if nobody may know."""
    wanted = {f"socket:[{each}]" for each in inodes}
    for folder in sorted(_PROC.glob("[0-9]*/fd")):
        try:
            if any(str(each.readlink()) in wanted for each in folder.iterdir()):
                name = (folder.parent / "comm").read_text(errors="replace").strip()
                return int(folder.parent.name), name
        except OSError:
            continue  # it has ended, or is another user's
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
