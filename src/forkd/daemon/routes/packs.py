"""Packs: a snapshot's whole chain out of the store, or into it, as one stream of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request, Response

from forkd.daemon import convert
from forkd.daemon.bodies import takes_upload
from forkd.daemon.routes import CallerOf, PacksOf, TagOf, bytes_as, router
from forkd.daemon.routes.files import BYTES
from forkd.daemon.streaming import Stream
from forkd.model.caller import Scope
from forkd.wire import v2_packs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

routes = router("packs")

_BODY = bytes_as(BYTES)


@routes.get(
    "/v2/snapshots/{tag}/pack",
    operation_id="pack_snapshot",
    response_class=Response,
    responses={200: _BODY},
)
async def pack_snapshot(tag: TagOf, caller: CallerOf, packs: PacksOf) -> Response:
    """Return a snapshot and all that it depends on as an unsigned pack."""
    source = packs.pack(caller, tag)
    first = await anext(source)
    return Stream(_joined(first, source), owned=source, media_type=BYTES)


@routes.put(
    "/v2/snapshots/{tag}/pack",
    operation_id="unpack_snapshot",
    status_code=201,
    openapi_extra={"requestBody": {**_BODY, "required": True}},
)
@takes_upload(Scope.SNAPSHOTS)
async def unpack_snapshot(
    tag: TagOf,
    terms: Annotated[v2_packs.Unpack, Query()],
    request: Request,
    caller: CallerOf,
    packs: PacksOf,
) -> v2_packs.Unpacked:
    """Take the pack in the request's body; nothing of it is kept unless all of it is good."""
    wanted = convert.unpack_request(tag, terms)
    return convert.unpacked(await packs.unpack(caller, wanted, request.stream()))


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece
