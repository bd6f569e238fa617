"""Secrets: what the daemon puts into requests of sandboxes, and tells nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from forkd.sdk._requests import build
from forkd.wire.v2_secrets import SecretInfo, SecretSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forkd.sdk._async.http import AsyncHttp

_SECRETS = TypeAdapter(list[SecretInfo])


class AsyncSecrets:
    """The secrets of a tenant.

    A sandbox that was forked with one writes its placeholder where the value belongs; the value
    takes its place on the host, on the way to the hosts that the secret is for.
    """

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def set(  # noqa: PLR0913 - what a secret consists of
        self,
        name: str,
        value: str,
        hosts: Sequence[str],
        *,
        header: str | None = None,
        env: str | None = None,
        tenant: str | None = None,
    ) -> SecretInfo:
        """Set a secret, in the place of one of its name.

        Args:
            name: What it is called.
            value: Printable ASCII; nobody can look it up later.
            hosts: What it is for, such as `["api.example.com", "*.example.com:8443"]`.
            header: In which header it is put; `Authorization` if None.
            env: The variable that has its placeholder in sandboxes.
            tenant: Whose, if not one's own.
        """
        request = build(SecretSet, value=value, hosts=list(hosts), header=header, env=env)
        return await self._http.call(
            SecretInfo,
            "PUT",
            self._path(name),
            body=request,
            query={"tenant": tenant},
        )

    async def list(self) -> list[SecretInfo]:
        """Return every secret without its value; without `admin`, those of your own tenant."""
        return await self._http.call(_SECRETS, "GET", "/v2/secrets")

    async def delete(self, name: str, *, tenant: str | None = None) -> None:
        """Remove a secret; it is put into no request from now on.

        Args:
            name: What it is called.
            tenant: Whose, if not one's own.

        Raises:
            NotFound: There is none of that name.
        """
        await self._http.send("DELETE", self._path(name), query={"tenant": tenant})

    def _path(self, name: str) -> str:
        return f"/v2/secrets/{self._http.quoted(name)}"
