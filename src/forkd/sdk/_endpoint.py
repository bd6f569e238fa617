"""Where the daemon is, and what to show it to be let in.

The first of these that says something wins:

1.  what the caller passes to `Client(...)`;
2.  `FORKD_URL` and `FORKD_TOKEN`;
3.  the context that `FORKD_CONTEXT` or `forkd context use` names, unless that is `local`;
4.  `endpoint.json`, which `forkd up` leaves in its state folder: `{"url", "token_file"}`;
5.  the daemon's own socket, `/run/forkd/forkd.sock`, if it is there;
6.  `http://127.0.0.1:8889`.

Whom to trust at an `https://` address is said beside it: `FORKD_CA_FILE` is for a CA that this
system does not know, `FORKD_CLIENT_CERT` and `FORKD_CLIENT_KEY` for a daemon that wants to see a
certificate.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from forkd.errors import InvalidRequest
from forkd.sdk import _contexts

SOCKET_DEFAULT = Path("/run/forkd/forkd.sock")
URL_DEFAULT = "http://127.0.0.1:8889"

FILE_BYTES_MAX = 64 * 1024
"""An endpoint or token file longer than this is not one of ours."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon's address.

    Attributes:
        url: `http://host:port`, `https://host:port` or `unix:///path`.
        token: The bearer token; None if none is needed.
        ca_file: Certificates, in PEM, one of which must have signed the daemon's; None for those
            that this system trusts.
        client_cert: Our own certificate, in PEM; None if none is asked for.
        client_key: Its private key; None if it is in the same file.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    client_cert: str | None = None
    client_key: str | None = None

    def __post_init__(self) -> None:
        if self.client_key is not None and self.client_cert is None:
            raise InvalidRequest("client_key is given, and client_cert is not", field="client_cert")
        parts = urlsplit(self.url)
        named = parts.path if parts.scheme == "unix" else parts.hostname
        if parts.scheme not in {"unix", "http", "https"} or not named:
            raise InvalidRequest(
                f"url must be http://host:port, https://host:port or unix:///path, not {self.url}",
                field="url",
            )

    @property
    def socket(self) -> str | None:
        """Path of the Unix socket; None over TCP."""
        parts = urlsplit(self.url)
        return parts.path if parts.scheme == "unix" else None

    @property
    def http_url(self) -> str:
        """Base of the URLs of requests."""
        return "http://forkd" if self.socket is not None else self.url.rstrip("/")

    @property
    def websocket_url(self) -> str:
        """Base of the URLs of WebSockets."""
        return "ws" + self.http_url.removeprefix("http")

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.token is None else {"Authorization": f"Bearer {self.token}"}


def discover(  # noqa: PLR0913 - what a caller may say of a daemon
    url: str | None = None,
    token: str | None = None,
    *,
    ca_file: str | None = None,
    client_cert: str | None = None,
    client_key: str | None = None,
    context: str | None = None,
) -> Endpoint:
    """Return the daemon to talk to; see the top of this file for the order.

    Args:
        url: Its address.
        token: The bearer token.
        ca_file: As of `Endpoint`.
        client_cert: As of `Endpoint`.
        client_key: As of `Endpoint`.
        context: The name of a context, which comes before `FORKD_URL`.

    Raises:
        InvalidRequest: An address cannot be understood, or a file that names one is damaged.
        NotFound: There is no such context, or no longer.
    """
    if url is None and context is None:
        url = os.environ.get("FORKD_URL") or None
    found = None if url is not None else _contexts.chosen(context)
    if found is not None:
        return Endpoint(
            found.url,
            token or found.token or os.environ.get("FORKD_TOKEN") or None,
            ca_file or found.ca_file or os.environ.get("FORKD_CA_FILE") or None,
            client_cert or found.client_cert or os.environ.get("FORKD_CLIENT_CERT") or None,
            client_key or found.client_key or os.environ.get("FORKD_CLIENT_KEY") or None,
        )
    token = token or os.environ.get("FORKD_TOKEN") or None
    if url is not None:
        return Endpoint(
            url,
            token,
            ca_file or os.environ.get("FORKD_CA_FILE") or None,
            client_cert or os.environ.get("FORKD_CLIENT_CERT") or None,
            client_key or os.environ.get("FORKD_CLIENT_KEY") or None,
        )
    path = state_dir() / "endpoint.json"
    if path.exists():
        return _read(path, token)
    return Endpoint(f"unix://{SOCKET_DEFAULT}" if SOCKET_DEFAULT.exists() else URL_DEFAULT, token)


def state_dir() -> Path:
    """Return the folder where `forkd up` keeps its state: `FORKD_HOME`, or the user's own."""
    if home := os.environ.get("FORKD_HOME"):
        return Path(home)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "forkd"


def _read(path: Path, token: str | None) -> Endpoint:
    try:
        said = json.loads(_text(path))
        token_file = said.get("token_file")
        if token is None and token_file is not None:
            token = _text(Path(token_file)).strip()
        return Endpoint(str(said["url"]), token)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(
            f"{path} does not name a daemon ({error}); `forkd up` writes it anew"
        ) from error


def _text(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(FILE_BYTES_MAX)
