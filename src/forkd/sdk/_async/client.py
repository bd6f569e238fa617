"""The client: one daemon, its snapshots, images and sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from forkd.sdk import _requests
from forkd.sdk._async.builds import AsyncBuilds
from forkd.sdk._async.collections import AsyncImages, AsyncSandboxCollection, AsyncSnapshots
from forkd.sdk._async.events import followed
from forkd.sdk._async.forks import AsyncForks
from forkd.sdk._async.recipes import AsyncRecipes
from forkd.sdk._async.rights import AsyncTenants, AsyncTokens
from forkd.sdk._async.secrets import AsyncSecrets
from forkd.sdk._requests import explicit
from forkd.sdk._results import DiffInfo, TreeInfo
from forkd.sdk._retries import RETRIES_MAX
from forkd.wire.v2 import HostInfo, Version
from forkd.wire.v2_events import UsageInfo
from forkd.wire.v2_trees import DiffCreate

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.sdk._async.http import AsyncHttp
    from forkd.wire.v2_events import EventInfo

_USAGE = TypeAdapter(list[UsageInfo])

DIFF_TIMEOUT_S = 900.0
"""Time that a comparison may take: both guests look at all of their files."""


class AsyncClient(AsyncForks):
    """A forkd daemon.

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

    Attributes:
        sandboxes: Its sandboxes.
        snapshots: Its snapshots.
        images: Its images.
        builds: Builds of Dockerfiles.
        recipes: Its recipes.
        secrets: Its secrets.
        tokens: Its tokens, for an admin.
        tenants: Who shares it.
    """

    @explicit
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
        super().__init__(
            url,
            token=token,
            ca_file=ca_file,
            client_cert=client_cert,
            client_key=client_key,
            retries_max=retries_max,
        )

    def _begin(self, http: AsyncHttp) -> None:
        super()._begin(http)
        self.recipes = AsyncRecipes(self._http)
        self.snapshots = AsyncSnapshots(self._http, self.recipes)
        self.images = AsyncImages(self._http, self.recipes)
        self.builds = AsyncBuilds(self._http, self.recipes)
        self.sandboxes = AsyncSandboxCollection(self._http)
        self.tokens = AsyncTokens(self._http)
        self.tenants = AsyncTenants(self._http)
        self.secrets = AsyncSecrets(self._http)

    async def version(self) -> Version:
        """Return which forkd the daemon is."""
        return await self._http.call(Version, "GET", "/version")

    async def host(self) -> HostInfo:
        """Return what the daemon's host is and how full it is."""
        return await self._http.call(HostInfo, "GET", "/v2/host")

    async def events(
        self, after: int | None = None, *, follow: bool = True, reconnect: bool = True
    ) -> AsyncIterator[EventInfo]:
        """Yield what happens to sandboxes and snapshots, as it happens.

        A connection that breaks is made again, and what happened meanwhile comes first.  Where
        events are missing, because they are no longer kept, there is one whose `event` is `gap`.

        Args:
            after: Id of the last event that you know; 0 for all that are kept, None for what
                happens from now on.
            follow: Go on for ever; or end after what there is.
            reconnect: Whether to do so after a connection that was made once breaks.

        Raises:
            TransportError: The daemon cannot be reached, or the connection broke.
        """
        async for event in followed(self._http, after, follow=follow, reconnect=reconnect):
            yield event

    async def usage(self) -> list[UsageInfo]:
        """Return what running sandboxes use of the host, the oldest first."""
        return await self._http.call(_USAGE, "GET", "/v2/usage")

    async def tree(self, sandbox_id: str | None = None) -> TreeInfo:
        """Return who was branched from whom; only the tree that one sandbox is in, if given."""
        query = {"sandbox_id": sandbox_id}
        return await self._http.call(TreeInfo, "GET", "/v2/tree", query=query)

    async def diff(self, a: str, b: str) -> DiffInfo:
        """Return how `b` differs from `a`: which files, and how many pages of memory.

        Each is the id of a running sandbox or the name of a snapshot.

        Raises:
            Conflict: They have no common ancestor, or one does not run.
            GuestError: The file system of one cannot be compared.
        """
        request = _requests.build(DiffCreate, a=a, b=b)
        return await self._http.call(
            DiffInfo, "POST", "/v2/diff", body=request, timeout_s=DIFF_TIMEOUT_S
        )
