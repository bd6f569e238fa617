"""The daemon's configuration file: found, read as TOML, and refused by its line.

It is `/etc/forkd/forkd.toml` for a daemon of root, `forkd/daemon.toml` in `XDG_CONFIG_HOME` for
another user's, or what `--config` or `FORKD_CONFIG` names.  Its keys are settings; there are no
tables.  Who can write to it can have the daemon start any program, so it must belong to root or to
the daemon's user, and other users may not write to it.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.daemon import settings
from forkd.daemon.settings import FileValues
from forkd.errors import ForkdError, InvalidRequest
from forkd.host import files, folders, ownership, proc, users

if TYPE_CHECKING:
    from collections.abc import Mapping

SYSTEM = Path("/etc/forkd/forkd.toml")
"""Where root's daemon looks."""

OF_USER = "forkd/daemon.toml"
"""Where another user's daemon looks, in `XDG_CONFIG_HOME`."""

FILE_BYTES_MAX = 64 * 1024
"""A configuration file longer than this is none."""

MODE = 0o7777
"""Bits of a mode that are permissions."""

WRITABLE = 0o022
"""Permission bits of those who may write besides a file's owner."""

READABLE = 0o044
"""Permission bits of those who may read besides a file's owner."""


def load(named: str | None) -> FileValues:
    """Return what the configuration file says; nothing if there is none where one is looked for.

    Args:
        named: What `--config` says; None to look where `FORKD_CONFIG` says, or else where a file
            is by default.  Empty: none.

    Raises:
        InvalidRequest: The file that was named is not there, or a file cannot be used; says which
            line or key is wrong, and what to do.
    """
    path, by = _chosen(named)
    if path is None:
        return FileValues()
    if not files.is_there(path):
        if by is None:
            return FileValues()
        raise InvalidRequest(f"{by} is {path}: there is no such file", field=by)
    text = _text(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path} is not TOML: {_lower(str(error))}", field=str(path)) from None
    places = {name: f"{path}:{_line(text, name)}" for name in found}
    for name, value in found.items():
        _check(places[name], name, value)
    _check_secrets(path, places, found)
    return FileValues(found, places, path)


def default_path() -> Path:
    """Return where this user's daemon looks for its file."""
    if users.user_id() == 0:
        return SYSTEM
    home = proc.environment().get("XDG_CONFIG_HOME", "")
    return (Path(home) if home.startswith("/") else proc.home() / ".config") / OF_USER


def _chosen(named: str | None) -> tuple[Path | None, str | None]:
    """Return which file to read, and what has named it; no file if that is to be."""
    by = "--config"
    if named is None:
        named, by = proc.environment().get(settings.CONFIG_VARIABLE), settings.CONFIG_VARIABLE
    if named is None:
        return default_path(), None
    return (Path(named).absolute() if named else None), by


def _text(path: Path) -> str:
    """Return what is in a file that only root or this user can have written."""
    try:
        data = files.read_regular(path, FILE_BYTES_MAX + 1)
        owner, mode = ownership.owner(path), folders.mode(path) & MODE
    except ForkdError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", field=str(path)) from error
    if owner not in {0, users.user_id()}:
        raise InvalidRequest(
            f"{path} belongs to {users.user_name(owner)}, who could change the daemon's settings; "
            f"run: chown {users.user_name(users.user_id())} {path}",
            field=str(path),
        )
    if mode & WRITABLE:
        raise InvalidRequest(
            f"{path} may be written by others (mode {mode:04o}); run: chmod go-w {path}",
            field=str(path),
        )
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(
            f"{path} is longer than {FILE_BYTES_MAX} bytes, so it is no configuration file",
            field=str(path),
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise InvalidRequest(f"{path}:{line} is not UTF-8", field=str(path)) from None


def _check(place: str, name: str, value: object) -> None:
    """Return if there is a setting of that name, and the value is written as it has to be."""
    if name not in settings.Settings.model_fields:
        near = settings.nearest(name)
        hint = f"did you mean {near}?" if near else "`forkd-daemon config show` lists all"
        if isinstance(value, dict):
            hint = "the file has no tables" if near is None else hint
        raise InvalidRequest(f"{place}: there is no setting {name}; {hint}", field=name)
    wanted = settings.kind(name)
    if not _is(wanted, value):
        example = 'such as "0660"' if name == "socket_mode" else ""
        raise InvalidRequest(
            f"{place}: {name} is {settings.shown(_toml(value))}: it must be {wanted} "
            f"{example}".rstrip(),
            field=name,
        )
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, str) and each and name in _paths() and not each.startswith("/"):
            raise InvalidRequest(
                f"{place}: {name} is {each[: settings.VALUE_CHARS_MAX]!r}: in a file it must be "
                "an absolute path",
                field=name,
            )


def _paths() -> frozenset[str]:
    """Return the settings that are paths."""
    fields = settings.Settings.model_fields.items()
    return frozenset(name for name, each in fields if "Path" in str(each.annotation))


def _is(wanted: settings.Kind, value: object) -> bool:
    match wanted:
        case "a string":
            return isinstance(value, str)
        case "an integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "a number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_secrets(path: Path, places: Mapping[str, str], found: Mapping[str, object]) -> None:
    """Return if no value has a password, or only the file's owner can read it."""
    mode = folders.mode(path) & MODE
    for name, value in found.items():
        if mode & READABLE and isinstance(value, str) and settings.USER.search(value):
            raise InvalidRequest(
                f"{places[name]}: {name} has a password, and others may read the file (mode "
                f"{mode:04o}); run: chmod 600 {path}",
                field=name,
            )


def _line(text: str, name: str) -> int:
    """Return in which line a key, or a table of that name, begins."""
    key = re.escape(name)
    begins = re.compile(rf"""^[ \t]*\[{{0,2}}[ \t]*["']?{key}["']?[ \t]*[=.\]]""", re.MULTILINE)
    found = begins.search(text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _toml(value: object) -> str:
    """Return a value as TOML has it, near enough."""
    if isinstance(value, bool):
        return str(value).lower()
    return "a table" if isinstance(value, dict) else repr(value)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
