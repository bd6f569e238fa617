"""The OpenAPI document: what FastAPI derives from the routes, and the types of the streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema

from forkd.wire import v2, v2_events

if TYPE_CHECKING:
    from fastapi import FastAPI

REFERENCE = "#/components/schemas/{model}"

STREAMED = (v2.ProgressEvent, v2.SnapshotEvent, v2.ImageEvent, v2.ErrorEvent, v2_events.EventInfo)
"""Types that no route names, because they travel as lines of a stream."""

MESSAGES = (v2.ExecStart, v2.ExecControl, v2.ExecStarted, v2.ExecExit)
"""Types that no route names, because they travel as messages of the exec WebSocket."""


def install(app: FastAPI) -> None:
    """Make `app.openapi()` return `document(app)`, made once."""
    made: list[dict[str, Any]] = []

    def openapi() -> dict[str, Any]:
        if not made:
            made.append(document(app))
        return made[0]

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def document(app: FastAPI) -> dict[str, Any]:
    """Return the whole document of `app`."""
    found = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=app.description,
        routes=app.routes,
    )
    found["components"]["schemas"] |= _streamed_schemas()
    return found


def _streamed_schemas() -> dict[str, Any]:
    _, models = models_json_schema(
        [(each, "serialization") for each in STREAMED + MESSAGES], ref_template=REFERENCE
    )
    unions: dict[str, TypeAdapter[Any]] = {
        "SnapshotStreamEvent": TypeAdapter(v2.SnapshotStreamEvent),
        "ImageStreamEvent": TypeAdapter(v2.ImageStreamEvent),
    }
    schemas: dict[str, Any] = models["$defs"]
    for name, union in unions.items():
        schema = union.json_schema(mode="serialization", ref_template=REFERENCE)
        schemas[name] = {key: value for key, value in schema.items() if key != "$defs"}
    return schemas
