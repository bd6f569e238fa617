"""Which of a service manager's sockets the daemon serves, in the place of those of its settings.

Such a socket stays while one daemon ends and the next begins: the kernel keeps clients waiting.
Its path, mode and group are the manager's, and the daemon does not remove it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.daemon.settings import Bind, replaced
from forkd.errors import InvalidRequest
from forkd.host import activation

if TYPE_CHECKING:
    from forkd.daemon.settings import Settings
    from forkd.host.sockets import Socket

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandedSockets:
    """What the manager has opened: nothing, by default."""

    unix: Socket | None = None
    tcp: Socket | None = None


def take(settings: Settings) -> tuple[Settings, HandedSockets]:
    """Return settings that name the addresses of the manager's sockets, and these sockets.

    Raises:
        InvalidRequest: The manager has handed over what the daemon cannot serve.
    """
    unix: activation.Handed | None = None
    tcp: activation.Handed | None = None
    for each in activation.take():
        before = tcp if each.path is None else unix
        if before is not None:
            raise InvalidRequest(
                f"the service manager has handed over two sockets of one kind, {before.name} and "
                f"{each.name}: the daemon serves one of a path and one of TCP",
                field=each.name,
            )
        if each.path is None:
            tcp = each
        else:
            unix = each
    changed: dict[str, Any] = {}
    if unix is not None and unix.path is not None:
        changed["socket"] = Path(unix.path)
    if tcp is not None:
        changed["bind"] = Bind(*tcp.sock.getsockname()[:2])
    for name, value in changed.items():
        if name in settings.model_fields_set and getattr(settings, name) != value:
            fields = {"setting": name, "served": str(value)}
            log.warning(
                "the service manager's socket is served, not that of a setting", extra=fields
            )
    sockets = HandedSockets(None if unix is None else unix.sock, None if tcp is None else tcp.sock)
    return replaced(settings, changed), sockets
