"""Users and groups of this host."""

from __future__ import annotations

import grp
import os
import pwd

ID_MAX = (1 << 32) - 2
"""Largest number of a group: the one above means "no change" (chown(2))."""


def user_id() -> int:
    """Return the user that this process acts as."""
    return os.geteuid()


def primary_group_id() -> int:
    """Return the group that this process acts as."""
    return os.getegid()


def user_name(uid: int) -> str:
    """Return what a user is called; the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_id(name: str) -> int | None:
    """Return the number of a group, given by its name or as a number; None if there is none."""
    if name.isascii() and name.isdecimal():
        number = int(name)
        return number if number <= ID_MAX else None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
