"""No body is read for a caller who lacks a scope, and only an upload may be of any length."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass, field
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.routing import APIRoute

import forkd.service
from forkd.daemon.app import create_app
from forkd.daemon.bodies import DECLARED, RequestBody, takes_body
from forkd.daemon.peers import CALLER, HELD
from forkd.daemon.reference.app import PREFIX, create_reference
from forkd.daemon.routes import router
from forkd.limits import BODY_BYTES_MAX
from forkd.model.caller import ALL_SCOPES, DEFAULT_TENANT, Caller, Scope
from forkd.service.use_case import DECLARED as USE_CASE
from tests.support.fake_service import FakeService

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Message

APP = create_app(FakeService())

PIECE = b" " * 65_536

READ_AHEAD = 2 * len(PIECE)
"""The last piece that is refused, and one more for a server that is ahead."""

ENDINGS = ("token", "files", "pack", "recipes")
"""What a client may have chosen as the last part of a path; uploads end like some of them."""

USE_CASES = {
    "diff": "compare",
    "exec": "start_exec",
    "create_snapshot": "bake",
    "compact_snapshot": "compact",
    "gc_snapshots": "tidy",
    "build_image": "build",
    "unpack_snapshot": "unpack",
}
"""Use cases that are not called as their operations are."""


def routes() -> Iterator[tuple[str, APIRoute]]:
    """Yield every route of both protocols, with its whole path."""
    for prefix, app in (("", APP), (PREFIX, create_reference(APP.state))):
        for included in app.routes:
            for route in getattr(getattr(included, "original_router", None), "routes", ()):
                if isinstance(route, APIRoute):
                    yield prefix + route.path, route


def method(route: APIRoute) -> str:
    return min(route.methods or {"GET"})


def declared(route: APIRoute) -> RequestBody | None:
    return getattr(route.endpoint, DECLARED, None)


WITH_BODY = [
    pytest.param(path, route, id=f"{method(route)} {path}")
    for path, route in routes()
    if method(route) in {"POST", "PUT", "PATCH"}
]


def scopes_of_use_cases() -> dict[str, tuple[Scope, ...]]:
    """Return which scopes each use case of the service asks for."""
    found = {}
    for module in walk_packages(forkd.service.__path__, "forkd.service."):
        loaded = __import__(module.name, fromlist=["_"])
        for _, kind in inspect.getmembers(loaded, inspect.isclass):
            for _, asked in inspect.getmembers(kind, lambda each: hasattr(each, USE_CASE)):
                case = getattr(asked, USE_CASE)
                found[case.name] = case.scopes
    return found


@dataclass
class Upload:
    """A request whose body never ends, and how much of it was read."""

    path: str
    method: str
    scopes: frozenset[Scope]
    bytes_read: int = 0
    answers: list[Message] = field(default_factory=list)

    async def receive(self) -> Message:
        self.bytes_read += len(PIECE)
        more = self.bytes_read < 4 * BODY_BYTES_MAX
        return {"type": "http.request", "body": PIECE, "more_body": more}

    async def send(self, message: Message) -> None:
        self.answers.append(message)

    async def status(self) -> int:
        """Return the status of the answer."""
        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope: dict[str, Any] = {
            "type": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            CALLER: Caller("tests", DEFAULT_TENANT, self.scopes, "test"),
        }
        with contextlib.ExitStack() as scope[HELD]:
            await APP(scope, self.receive, self.send)
        return int(self.answers[0]["status"])


def upload(path: str, route: APIRoute, scopes: frozenset[Scope], last: str = "token") -> Upload:
    """Return a request for a route, whose parameters are `last`."""
    parts = [last if each.startswith("{") else each for each in path.split("/")]
    return Upload("/".join(parts), method(route), scopes)


def test_every_route_with_a_body_says_so() -> None:
    assert len(WITH_BODY) > 25
    silent = [
        path for path, route in routes() if route.body_field is not None and not declared(route)
    ]
    assert not silent


def test_a_route_that_says_nothing_of_its_body_is_refused_at_the_start() -> None:
    made = router("tests")

    async def silent(body: dict[str, str]) -> None:
        del body

    with pytest.raises(TypeError, match="takes_body"):
        made.post("/silent")(silent)
    made.post("/declared")(takes_body(Scope.RUN)(silent))


@pytest.mark.parametrize(("path", "route"), WITH_BODY)
async def test_no_body_is_read_for_a_caller_without_the_scope(path: str, route: APIRoute) -> None:
    body = declared(route)
    for scope in () if body is None else body.scopes:
        request = upload(path, route, ALL_SCOPES - {scope, Scope.ADMIN})

        assert await request.status() == 403
        assert request.bytes_read == 0


@pytest.mark.parametrize(("path", "route"), WITH_BODY)
async def test_a_body_that_is_no_upload_is_cut_however_its_path_ends(
    path: str, route: APIRoute
) -> None:
    body = declared(route)
    if body is not None and body.is_upload:
        return
    for last in ENDINGS:
        request = upload(path, route, ALL_SCOPES, last)
        await request.status()

        assert request.bytes_read <= BODY_BYTES_MAX + READ_AHEAD, request.path
        assert APP.state.bodies.used_bytes == 0


def test_a_route_asks_for_the_scopes_that_its_use_case_asks_for() -> None:
    scopes, compared = scopes_of_use_cases(), 0
    for path, route in routes():
        if (body := declared(route)) is not None:
            name = USE_CASES.get(str(route.operation_id), str(route.operation_id))
            assert scopes[name] == body.scopes, path
            compared += 1
    assert compared > 25


def test_uploads_are_these() -> None:
    uploads = {path for path, route in routes() if (body := declared(route)) and body.is_upload}
    assert uploads == {
        "/v2/sandboxes/{id}/files",
        "/v2/sandboxes/{id}/files/archive",
        "/v2/snapshots/{tag}/pack",
        "/v2/recipes",
    }
