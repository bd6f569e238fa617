"""The network of a sandbox: what it may reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.sdk._requests import build
from forkd.wire.v2_network import NetworkChange, NetworkInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.sdk._async.http import AsyncHttp


class AsyncNetwork:
    """What one sandbox may reach, and what it was refused.

    Every method raises `Conflict` if the sandbox was forked without a network.
    """

    def __init__(self, http: AsyncHttp, sandbox: str) -> None:
        self._http = http
        self._path = f"{sandbox}/network"

    async def status(self) -> NetworkInfo:
        """Return what it may reach, and what it was refused."""
        return await self._http.call(NetworkInfo, "GET", self._path)

    async def change(
        self,
        network: bool | str | list[str] | None = None,  # noqa: FBT001 - as of a fork
        *,
        allow: Sequence[str] = (),
        hold_egress: bool | None = None,
    ) -> NetworkInfo:
        """Change what it may reach; connections that it may not have any more end.

        Args:
            network: What it may reach from now on, as of a fork; None to leave that.
            allow: Rules that are added to it.
            hold_egress: Whether it may reach nothing at the moment; None to leave that.

        Raises:
            Conflict: It does not run.
            InvalidRequest: A rule is malformed.
        """
        body = build(NetworkChange, network=network, allow=list(allow), hold_egress=hold_egress)
        return await self._http.call(NetworkInfo, "PATCH", self._path, body=body)
