"""Ask a daemon whether it lives, as any client would, without the SDK."""

from __future__ import annotations

import http.client
import json
import socket
from urllib.parse import urlsplit

ANSWER_DEADLINE_S = 30.0
"""How long a daemon may take to say that it lives; an emulated and busy one takes seconds."""

PATH = "/healthz"
BODY_BYTES_MAX = 1 << 16


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("forkd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def why_unwell(url: str, *, timeout_s: float = ANSWER_DEADLINE_S) -> str | None:
    """Return why the daemon at `url` does not serve, in a phrase; None if it does.

    Args:
        url: `http://host:port` or `unix:///path`.
        timeout_s: How long it may take.
    """
    parts = urlsplit(url)
    connection = (
        _UnixConnection(parts.path, timeout_s)
        if parts.scheme == "unix"
        else http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    )
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        body = answer.read(BODY_BYTES_MAX)
    except TimeoutError:
        return f"no answer within {timeout_s:.0f} s"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    finally:
        connection.close()
    if answer.status == http.client.OK:
        return None
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP status {answer.status}"
