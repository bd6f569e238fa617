"""The connections of a client to one daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from forkd.sdk._async.http import AsyncHttp
from forkd.sdk._endpoint import discover
from forkd.sdk._retries import RETRIES_MAX

if TYPE_CHECKING:
    from types import TracebackType

    from forkd.sdk._endpoint import Endpoint


class AsyncConnection:
    """The connections of a client; `AsyncClient` adds what can be asked over them.

    Without arguments it talks to the daemon that `forkd up` started, or to the one that
    `FORKD_URL` and `FORKD_TOKEN` name.  Nothing is connected before the first call.

    Args:
        url: `http://host:port`, `https://host:port` or `unix:///path`.
        token: The bearer token; else `FORKD_TOKEN`.
        ca_file: Certificates of the CA that has signed the daemon's; else `FORKD_CA_FILE`, else
            those that this system trusts.
        client_cert: Our own certificate, for a daemon that asks for one; else `FORKD_CLIENT_CERT`.
        client_key: Its private key; else `FORKD_CLIENT_KEY`, else it is in the same file.
        retries_max: How often a call that failed for a passing reason is made again; 0 for never.
    """

    def __init__(  # noqa: PLR0913 - where a daemon can be
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
        retries_max: int = RETRIES_MAX,
    ) -> None:
        files = {"ca_file": ca_file, "client_cert": client_cert, "client_key": client_key}
        self._begin(AsyncHttp(discover(url, token, **files), retries_max))

    def _begin(self, http: AsyncHttp) -> None:
        """Ask over these connections from now on."""
        self._http = http

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.endpoint.url}>"

    @property
    def endpoint(self) -> Endpoint:
        """Where the daemon is."""
        return self._http.endpoint

    async def aclose(self) -> None:
        """Close every connection; sandboxes live on."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


async def http_of(client: AsyncConnection | None) -> AsyncHttp:
    """Return a client's connections; those that are there for everybody, if there is none."""
    return await AsyncHttp.default() if client is None else client._http  # noqa: SLF001 - ours
