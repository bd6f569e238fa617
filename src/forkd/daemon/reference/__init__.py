"""The reference's protocol, `/v1`: its routes, over the components that `/v2` asks, too.

One module per noun.  `wire.v1` has its types; `convert` knows what its words mean here; `errors`
has its statuses.  docs/adr/0025 says why it is apart.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path

from forkd.errors import InvalidRequest, NotFound
from forkd.model.ids import SandboxId, parse_sandbox_id


async def _sandbox_id(id: Annotated[str, Path(description="Id of a sandbox.")]) -> SandboxId:  # noqa: A002 - the path's own word
    """Return an id; one that none of ours can be, such as the reference's own, is not found."""
    try:
        return parse_sandbox_id(id)
    except InvalidRequest as error:
        raise NotFound(f"no sandbox {id[:80]!r}", sandbox=id[:80]) from error


ReferenceIdOf = Annotated[SandboxId, Depends(_sandbox_id)]
