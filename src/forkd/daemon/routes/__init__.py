"""One module per noun; each holds a router.  A route parses, calls the service, renders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Path
from fastapi.requests import HTTPConnection

from forkd.model.ids import SandboxId, Tag, parse_sandbox_id, parse_tag
from forkd.service.api import Service
from forkd.wire.v1 import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Mapping

ERRORS: Mapping[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request, or the guest, is at fault"},
    "5XX": {"model": ErrorBody, "description": "The host, the store or the machine is at fault"},
}


async def _service(connection: HTTPConnection) -> Service:
    service: Service = connection.app.state.service
    return service


async def _sandbox_id(id: Annotated[str, Path(description="Id of a sandbox.")]) -> SandboxId:  # noqa: A002 - the path's own word
    return parse_sandbox_id(id)


async def _tag(tag: Annotated[str, Path(description="Name of a snapshot.")]) -> Tag:
    return parse_tag(tag)


ServiceOf = Annotated[Service, Depends(_service)]
IdOf = Annotated[SandboxId, Depends(_sandbox_id)]
TagOf = Annotated[Tag, Depends(_tag)]


def router(noun: str) -> APIRouter:
    """Return an empty router for the routes of one noun."""
    return APIRouter(tags=[noun], responses=dict(ERRORS))
