"""Values of settings: what is written, as text or as a list, made what the daemon takes.

Each function takes what is written, and returns anything else as it is: it was made before.  It
raises `ValueError` for what makes no sense, in words that follow the value.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from pathlib import Path

from forkd.errors import InvalidRequest
from forkd.host import users
from forkd.network.upstream import Via
from forkd.service import build_network as networks
from forkd.service.jail import UidRange

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: `sun_path` with its final NUL."""

SOCKET_MODE_MAX = 0o777

SOCKET_GROUP = "forkd"
"""Group whose users may talk to root's daemon, on hosts that have it."""

HOST = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}|[0-9a-f:.]*:[0-9a-f:.]*")
"""A name or an address of IPv4, or an address of IPv6."""

REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]{0,252}(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")
"""A host, perhaps with a port."""

_DNS_PORT = 53

ENDPOINT = re.compile(r"https?://[^/?#\s@]+(/[^?#\s]*)?")
"""Where something listens: no user, no query."""


def path(value: object) -> object:
    """Take the path of a file; empty is none."""
    if isinstance(value, str):
        return Path(value).absolute() if value else None
    return value


def folder(value: object) -> object:
    """Take the path of a folder, which there must be."""
    if value == "":
        raise ValueError("must name a folder")
    return path(value)


def socket(value: object) -> object:
    """Take the path of a Unix socket."""
    found = path(value)
    if isinstance(found, Path) and len(bytes(found)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"must be at most {SOCKET_PATH_BYTES_MAX} bytes long")
    return found


def mode(value: object) -> object:
    """Take the permissions of a file, in octal."""
    try:
        found = int(value, 8) if isinstance(value, str) else value
    except ValueError:
        found = -1
    if not isinstance(found, int) or not 0 <= found <= SOCKET_MODE_MAX:
        raise ValueError("must be an octal mode, such as 0660")
    return found


def group(value: object) -> object:
    """Take a group, by name or number; empty is none."""
    if not isinstance(value, str):
        return value
    if not value:
        return None
    if (found := users.group_id(value)) is None:
        raise ValueError(
            f"must be a group of this host; `groupadd --system {SOCKET_GROUP}` adds one"
        )
    return found


def folders(value: object) -> object:
    """Take paths, as text with colons between."""
    parts = _parts(value, ":")
    return value if parts is None else tuple(Path(each).absolute() for each in parts)


def hosts(value: object) -> object:
    """Take names and addresses, as text with commas between."""
    parts = _parts(value)
    if parts is None:
        return value
    names = [each.strip("[]").lower() for each in parts]
    if not all(HOST.fullmatch(each) for each in names):
        raise ValueError("must be names or addresses separated by commas, without ports")
    return tuple(names)


def registries(value: object) -> object:
    """Take registries, as text with commas between."""
    parts = _parts(value)
    if parts is None:
        return value
    found = [each.lower() for each in parts]
    if not all(REGISTRY.fullmatch(each) for each in found):
        raise ValueError("must be HOST or HOST:PORT, separated by commas, without a scheme")
    return tuple(found)


def endpoint(value: object) -> object:
    """Take a URL of something that is told what happens; empty is none."""
    if not isinstance(value, str) or not value:
        return value or None
    if not ENDPOINT.fullmatch(value):
        raise ValueError("must be http://host:port or https://host:port")
    return value


def uids(value: object) -> object:
    """Take a range of users."""
    return UidRange.parse(value) if isinstance(value, str) else value


def build_network(value: object) -> object:
    """Take what builds may reach."""
    if not isinstance(value, str):
        return value
    try:
        return networks.parse(value)
    except InvalidRequest as error:
        raise ValueError(str(error).removeprefix("build_network: ")) from None


def servers(value: object) -> object:
    """Take name servers, as text with commas between; return each with its port."""
    parts = _parts(value)
    if parts is None:
        return value
    found = []
    for each in parts:
        address, colon, port = each.partition(":")
        try:
            found.append((str(IPv4Address(address)), int(port) if colon else _DNS_PORT))
        except ValueError:
            raise ValueError("must be IPv4 addresses, such as 192.0.2.1,192.0.2.2:5353") from None
    return tuple(found)


def via(value: object) -> object:
    """Take a proxy; empty is none."""
    if not isinstance(value, str) or not value:
        return value or None
    try:
        return Via.parse(value)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None


def _parts(value: object, separator: str = ",") -> list[str] | None:
    """Return what there is of a list, as text with separators or as a list; None if it is neither.

    A text's parts are without the white space around them, and none is empty.
    """
    if isinstance(value, str):
        return [each.strip() for each in value.split(separator) if each.strip()]
    if isinstance(value, list):
        return [str(each) for each in value]
    return None
