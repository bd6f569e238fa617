"""The client: one daemon, its snapshots, images and sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import TypeAdapter

from forkd.errors import EngineError
from forkd.sdk import _requests
from forkd.sdk._async.collections import AsyncImages, AsyncSandboxes, AsyncSnapshots
from forkd.sdk._async.events import followed
from forkd.sdk._async.http import AsyncHttp
from forkd.sdk._async.recipes import AsyncRecipes
from forkd.sdk._async.rights import AsyncTenants, AsyncTokens
from forkd.sdk._async.secrets import AsyncSecrets
from forkd.sdk._endpoint import discover
from forkd.wire import v2, v2_events, v2_trees

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType
    from typing import Unpack

    from forkd.sdk._async.sandbox import AsyncSandbox
    from forkd.sdk._endpoint import Endpoint

_USAGE = TypeAdapter(list[v2_events.UsageInfo])

DIFF_TIMEOUT_S = 900.0
"""Time that a comparison may take: both guests look at all of their files."""


class AsyncClient:
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
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | None = None,
        client_cert: str | None = None,
        client_key: str | None = None,
    ) -> None:
        files = {"ca_file": ca_file, "client_cert": client_cert, "client_key": client_key}
        self._http = AsyncHttp(discover(url, token, **files))
        self.recipes = AsyncRecipes(self._http)
        self.snapshots = AsyncSnapshots(self._http, self.recipes)
        self.images = AsyncImages(self._http, self.recipes)
        self.sandboxes = AsyncSandboxes(self._http)
        self.tokens = AsyncTokens(self._http)
        self.tenants = AsyncTenants(self._http)
        self.secrets = AsyncSecrets(self._http)

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

    async def version(self) -> v2.Version:
        """Return which forkd the daemon is."""
        return await self._http.call(v2.Version, "GET", "/version")

    async def host(self) -> v2.HostInfo:
        """Return what the daemon's host is and how full it is."""
        return await self._http.call(v2.HostInfo, "GET", "/v2/host")

    async def fork(
        self, tag: str, n: int = 1, **options: Unpack[_requests.ForkOptions]
    ) -> list[AsyncSandbox]:
        """Fork `n` sandboxes from a snapshot: all of them, or an error and none.

        Raises:
            NotFound: There is no snapshot of that tag.
            CapacityError: The host has no room for so many.
            EngineError: At least one did not become ready.
        """
        request = _requests.fork(tag, n, options, all_or_nothing=True)
        ready, failed = await self.sandboxes.create(request)
        if failed:
            raise EngineError(f"{len(failed)} of {n} did not become ready: {failed[0].error}")
        return ready

    async def events(
        self, after: int | None = None, *, follow: bool = True, reconnect: bool = True
    ) -> AsyncIterator[v2_events.EventInfo]:
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

    async def usage(self) -> list[v2_events.UsageInfo]:
        """Return what running sandboxes use of the host, the oldest first."""
        return await self._http.call(_USAGE, "GET", "/v2/usage")

    async def tree(self, sandbox_id: str | None = None) -> v2_trees.TreeInfo:
        """Return who was branched from whom; only the tree that one sandbox is in, if given."""
        query = {"sandbox_id": sandbox_id}
        return await self._http.call(v2_trees.TreeInfo, "GET", "/v2/tree", query=query)

    async def diff(self, a: str, b: str) -> v2_trees.DiffInfo:
        """Return how `b` differs from `a`: which files, and how many pages of memory.

        Each is the id of a running sandbox or the name of a snapshot.

        Raises:
            Conflict: They have no common ancestor, or one does not run.
            GuestError: The file system of one cannot be compared.
        """
        request = _requests.build(v2_trees.DiffCreate, a=a, b=b)
        return await self._http.call(
            v2_trees.DiffInfo, "POST", "/v2/diff", body=request, timeout_s=DIFF_TIMEOUT_S
        )

    async def try_fork(
        self, tag: str, n: int = 1, **options: Unpack[_requests.ForkOptions]
    ) -> tuple[list[AsyncSandbox], list[v2.SandboxFailure]]:
        """Fork up to `n` sandboxes; returns the ready ones, and why the others are not.

        Raises:
            EngineError: Not one became ready.
        """
        request = _requests.fork(tag, n, options, all_or_nothing=False)
        return await self.sandboxes.create(request)
