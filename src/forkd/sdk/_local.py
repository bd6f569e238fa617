"""Files of this host that are copied, and the errors for what it refuses."""

from __future__ import annotations

import contextlib
import stat
from typing import TYPE_CHECKING

from forkd.errors import HostError, InvalidRequest, NotFound

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from os import PathLike
    from pathlib import Path


def shown(text: str) -> str:
    """Return a name as it can be printed, whatever is in it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def status_of(source: Path) -> os.stat_result:
    """Return what is known of a file or a folder; a link to one is followed.

    Raises:
        NotFound: There is no `source`.
        InvalidRequest: It is neither a file nor a folder.
        HostError: It cannot be read.
    """
    with reading(source):
        found = source.stat()
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        raise neither(source)
    return found


def neither(source: object) -> InvalidRequest:
    """Return the error for what is neither a file nor a folder."""
    return InvalidRequest(f"{shown(str(source))}: neither a file nor a folder", field="source")


@contextlib.contextmanager
def writing(target: str | PathLike[str]) -> Iterator[None]:
    """Raise `HostError` for what this host refuses while `target` is made."""
    try:
        yield
    except OSError as error:
        raise HostError(f"{shown(str(target))}: {error.strerror}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise `NotFound` or `HostError` for what this host refuses while `path` is read."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{shown(str(path))}: no such file or folder", field="source") from error
    except OSError as error:
        raise HostError(f"{shown(str(path))}: {error.strerror}") from error
