"""What an operator can set, all of it by environment; flags of `forkd-daemon` go before.

| variable | meaning | default |
|---|---|---|
| `FORKD_SOCKET` | path of the Unix socket; empty: none | `/run/forkd/forkd.sock` |
| `FORKD_SOCKET_MODE` | its mode, octal | `0660` |
| `FORKD_BIND` | `host:port` to serve on TCP too; empty: none | empty |
| `FORKD_TOKEN_FILE` | file with the bearer token of TCP | none |
| `FORKD_STATE_DIR` | snapshots and the database | `/var/lib/forkd` |
| `FORKD_RUN_DIR` | sockets and live sandboxes | `/run/forkd` |
| `FORKD_CACHE_DIR` | built images and kernels | `<state>/cache` |
| `FORKD_VMM` | the `forkd-vmm` program | found beside us or on `PATH` |
| `FORKD_AGENT` | the guest agent | found beside `forkd-vmm` |
| `FORKD_TREE_LIVE` | live descendants that a sandbox may have | 1000 |
| `FORKD_TREE_DEPTH` | branches between a sandbox and its oldest ancestor | 32 |
| `FORKD_TREE_PRIVATE_MIB` | private memory of a sandbox and its descendants, in MiB | 16384 |
| `FORKD_PACK_KEYS` | folder of the keys whose packs are taken | each request's own |
| `FORKD_PACK_UNSIGNED` | `allow` or `refuse` packs that are unsigned or not trusted | `refuse` |
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd import limits
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SOCKET_PATH_BYTES_MAX = 107
"""Longest path of a Unix socket: `sun_path` with its final NUL."""

PORT_MAX = 65_535

SOCKET_MODE_DEFAULT = 0o660
"""The owner and its group may talk to the daemon, and so are root on this host."""

SOCKET_MODE_MAX = 0o777


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen on TCP; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class Settings:
    """The daemon's settings, already checked against each other.

    Raises:
        InvalidRequest: They contradict each other; the setting is named.
    """

    socket: Path | None = Path("/run/forkd/forkd.sock")
    socket_mode: int = SOCKET_MODE_DEFAULT
    bind: Bind | None = None
    token_file: Path | None = None
    state_dir: Path = Path("/var/lib/forkd")
    run_dir: Path = Path("/run/forkd")
    cache_dir: Path | None = None
    vmm: Path | None = None
    agent: Path | None = None
    tree_live: int = limits.TREE_LIVE_DEFAULT
    tree_depth: int = limits.TREE_DEPTH_DEFAULT
    tree_private_mib: int = limits.TREE_PRIVATE_MIB_DEFAULT
    pack_keys: Path | None = None
    pack_unsigned: bool = False

    def __post_init__(self) -> None:
        if self.socket is None and self.bind is None:
            raise InvalidRequest("neither a socket nor an address to listen on", field="socket")
        if self.socket is not None and len(bytes(self.socket)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidRequest(
                f"socket is longer than {SOCKET_PATH_BYTES_MAX} bytes: {self.socket}",
                field="socket",
            )
        if self.bind is not None and self.token_file is None and not self.bind.is_loopback:
            raise InvalidRequest(
                f"refusing to listen on {self.bind.host}, which others can reach, without a token "
                "file",
                field="bind",
            )


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Return the settings in `environ`; a variable that is not set leaves its default.

    Raises:
        InvalidRequest: A value cannot be read; the variable is named.
    """
    return Settings(
        **{
            field: parse(variable, environ[variable])
            for field, (variable, parse) in _VARIABLES.items()
            if variable in environ
        }
    )


def _path(variable: str, text: str) -> Path | None:
    del variable
    return Path(text).absolute() if text else None


def _folder(variable: str, text: str) -> Path:
    if not text:
        raise InvalidRequest(f"{variable} must name a folder", field=variable)
    return Path(text).absolute()


def _mode(variable: str, text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= SOCKET_MODE_MAX:
        raise InvalidRequest(f"{variable} must be an octal mode, not {text!r}", field=variable)
    return mode


def _bind(variable: str, text: str) -> Bind | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise InvalidRequest(f"{variable} must be host:port, not {text!r}", field=variable)
    return Bind(host, int(port))


def _count(variable: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InvalidRequest(f"{variable} must be a number from 1, not {text!r}", field=variable)
    return int(text)


def _allowed(variable: str, text: str) -> bool:
    if text not in {"allow", "refuse"}:
        raise InvalidRequest(f"{variable} must be allow or refuse, not {text!r}", field=variable)
    return text == "allow"


_VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "socket": ("FORKD_SOCKET", _path),
    "socket_mode": ("FORKD_SOCKET_MODE", _mode),
    "bind": ("FORKD_BIND", _bind),
    "token_file": ("FORKD_TOKEN_FILE", _path),
    "state_dir": ("FORKD_STATE_DIR", _folder),
    "run_dir": ("FORKD_RUN_DIR", _folder),
    "cache_dir": ("FORKD_CACHE_DIR", _path),
    "vmm": ("FORKD_VMM", _path),
    "agent": ("FORKD_AGENT", _path),
    "tree_live": ("FORKD_TREE_LIVE", _count),
    "tree_depth": ("FORKD_TREE_DEPTH", _count),
    "tree_private_mib": ("FORKD_TREE_PRIVATE_MIB", _count),
    "pack_keys": ("FORKD_PACK_KEYS", _path),
    "pack_unsigned": ("FORKD_PACK_UNSIGNED", _allowed),
}
