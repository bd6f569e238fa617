"""Users of this host."""

from __future__ import annotations

import os
import pwd


def user_id() -> int:
    """Return the user that this process acts as."""
    return os.geteuid()


def user_name(uid: int) -> str:
    """Return what a user is called; the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
