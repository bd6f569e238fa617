"""Who may do what: every route, for every scope, for own things and for another tenant's.

`DECISIONS` says of each route what it takes; a route that is not in it fails the tests.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Mount

from forkd.daemon.app import create_app
from forkd.daemon.clients import UNIX
from forkd.daemon.requests import Requests
from forkd.model.caller import Caller, Scope, Tenant
from forkd.model.recipe import UPLOADED
from tests.support.service_host import TAG

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Scope as Asgi

    from forkd.service.host import Host
    from tests.support.service_host import FakeHost

READ, RUN, SNAPSHOTS, ADMIN = Scope.READ, Scope.RUN, Scope.SNAPSHOTS, Scope.ADMIN
METRICS = Scope.METRICS
OURS, THEIRS = Tenant("ours"), Tenant("theirs")


@dataclass(frozen=True)
class Decision:
    """What a route takes.

    Attributes:
        scopes: Each of which the caller needs; none: it is open to everybody.
        body: A valid one; `{id}` and `{tag}` in it stand for a sandbox and a snapshot.
        query: A valid one.
        own: Whether it is about a sandbox or a snapshot, which must be the caller's.
    """

    scopes: tuple[Scope, ...]
    body: Any = None
    query: dict[str, str] = field(default_factory=dict)
    own: bool = False


def about(*scopes: Scope, body: Any = None, **query: str) -> Decision:  # noqa: ANN401 - JSON
    """Return the decision of a route about one sandbox or snapshot."""
    return Decision(scopes, body, query, own=True)


OPEN = Decision(())

DECISIONS = {
    "health": OPEN,
    "ready": OPEN,
    "version": OPEN,
    "metrics": Decision((METRICS,)),
    "v1 list_sandboxes": Decision((READ,)),
    "v1 fork": about(RUN, body={"snapshot_tag": "{tag}"}),
    "v1 delete_sandbox": about(RUN),
    "v1 get_sandbox": about(READ),
    "v1 branch": about(RUN, SNAPSHOTS, READ, body={"tag": "made"}),
    "v1 eval": about(RUN, body={"code": "answer"}),
    "v1 exec": about(RUN, body={"args": ["true"]}),
    "v1 ping": about(READ),
    "v1 list_snapshots": Decision((READ,)),
    "v1 create_snapshot": Decision(
        (SNAPSHOTS,), {"tag": "made", "kernel": "any", "rootfs": "none-such"}
    ),
    "v1 delete_snapshot": about(SNAPSHOTS),
    "v1 compact_snapshot": about(SNAPSHOTS, body={"to": "made"}),
    "v1 get_snapshot": about(READ),
    "v2 diff": about(RUN, body={"a": "{id}", "b": "{id}"}),
    "v2 follow_events": Decision((READ,), query={"follow": "false"}),
    "v2 get_host": Decision((READ,)),
    "v2 build_image": Decision((SNAPSHOTS,), {"recipe": "none-such"}),
    "v2 list_images": Decision((READ,)),
    "v2 remove_image": Decision((SNAPSHOTS,)),
    "v2 snapshot_image": Decision((SNAPSHOTS,), {"image": "none-such"}),
    "v2 build_link": Decision((SNAPSHOTS, RUN), {"key": "0" * 64}),
    "v2 list_recipes": Decision((SNAPSHOTS,)),
    "v2 upload_recipe": Decision((SNAPSHOTS,), b""),
    "v2 get_recipe": Decision((SNAPSHOTS,)),
    "v2 list_sandboxes": Decision((READ,)),
    "v2 fork": about(RUN, body={"snapshot_tag": "{tag}"}),
    "v2 delete_sandbox": about(RUN),
    "v2 get_sandbox": about(READ),
    "v2 branch": about(RUN, READ, body={"n": 1}),
    "v2 eval": about(RUN, body={"code": "answer"}),
    "v2 exec": about(RUN, body={"args": ["true"]}),
    "v2 remove_file": about(RUN, path="/file"),
    "v2 read_file": about(RUN, path="/file"),
    "v2 read_archive": about(RUN, path="/tmp"),
    "v2 write_file": about(RUN, body=b"data", path="/file"),
    "v2 write_archive": about(RUN, body=bytes(1024), path="/folder"),
    "v2 list_files": about(RUN, path="/"),
    "v2 make_dir": about(RUN, body={"path": "/folder"}),
    "v2 move_file": about(RUN, body={"source": "/file", "target": "/other"}),
    "v2 stat_file": about(RUN, path="/file"),
    "v2 read_logs": about(READ),
    "v2 ping": about(READ),
    "v2 change_sandbox": about(RUN, body={"labels": {}}),
    "v2 pause": about(RUN),
    "v2 resume": about(RUN),
    "v2 promote": about(RUN),
    "v2 reset": about(RUN, body={}),
    "v2 set_limits": about(RUN, body={"cpu_limit": 1}),
    "v2 get_usage": about(READ),
    "v2 get_network": about(READ),
    "v2 change_network": about(RUN, body={"network": "deny-all"}),
    "v2 list_snapshots": Decision((READ,)),
    "v2 create_snapshot": Decision((SNAPSHOTS,), {"tag": "made", "recipe": "none-such"}),
    "v2 delete_snapshot": about(SNAPSHOTS),
    "v2 compact_snapshot": about(SNAPSHOTS, body={}),
    "v2 get_snapshot": about(READ),
    "v2 pack_snapshot": about(SNAPSHOTS),
    "v2 unpack_snapshot": Decision((SNAPSHOTS,), b""),
    "v2 share_snapshot": about(SNAPSHOTS, body={"shared": True}),
    "v2 gc_snapshots": Decision((ADMIN,), {}),
    "v2 list_tenants": Decision((READ,)),
    "v2 remove_quotas": Decision((ADMIN,)),
    "v2 set_quotas": Decision((ADMIN,), {}),
    "v2 change_quotas": Decision((ADMIN,), {"sandboxes": None}),
    "v2 list_tokens": Decision((ADMIN,)),
    "v2 create_token": Decision((ADMIN,), {"name": "made", "scopes": ["read"]}),
    "v2 delete_token": Decision((ADMIN,)),
    "v2 list_secrets": Decision((READ,)),
    "v2 set_secret": Decision((RUN,), {"value": "some value", "hosts": ["api.example.com"]}),
    "v2 delete_secret": Decision((RUN,)),
    "v2 tree": Decision((READ,)),
    "v2 list_usage": Decision((READ,)),
}


@dataclass
class Scene:
    """Two tenants on one host; each has a snapshot, and a sandbox of it."""

    host: Host
    app: FastAPI
    http: httpx.AsyncClient
    things: dict[Tenant, dict[str, str]]

    async def ask(self, operation: str, caller: Caller, whose: Tenant = OURS) -> httpx.Response:
        method, path = routes(self.app)[operation]
        decision, things = DECISIONS[operation], self.things[whose]
        names = {**things, "name": "some", "key": "0" * 32, "recipe": f"{UPLOADED}{'0' * 64}"}
        body = filled(decision.body, things)
        self.app.state.asking = caller
        kinds = {"v2 upload_recipe": "application/x-tar"}
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {"Content-Type": kinds[operation]} if operation in kinds else None
        return await self.http.request(
            method,
            path.format(**names),
            params=decision.query,
            headers=headers,
            **(content if body is not None else {}),
        )


def filled(body: Any, things: dict[str, str]) -> Any:  # noqa: ANN401 - JSON
    """Return a body with what its placeholders stand for."""
    if not isinstance(body, dict):
        return body
    return {
        name: value.format(**things) if isinstance(value, str) else value
        for name, value in body.items()
    }


def routes(app: FastAPI) -> dict[str, tuple[str, str]]:
    """Return each operation's method and path, by its version and name."""
    found = {}
    (mounted,) = [each.app for each in app.routes if isinstance(each, Mount)]
    assert isinstance(mounted, FastAPI)
    for prefix, one in (("", app), ("/v1", mounted)):
        for path, methods in one.openapi()["paths"].items():
            for method, said in methods.items():
                whole = prefix + path
                version = whole.split("/")[1] if whole.startswith(("/v1/", "/v2/")) else ""
                name = f"{version} {said['operationId']}".strip()
                found[name] = (method.upper(), whole)
    return found


@pytest.fixture
async def scene(fake_host: FakeHost) -> AsyncIterator[Scene]:
    async with fake_host.service() as host:
        app = create_app(host, lambda: host.tasks.failure)

        async def who(_: Asgi, __: str) -> Caller:
            caller: Caller = app.state.asking
            return caller

        requests = Requests(app, who, UNIX, host.telemetry)
        transport = httpx.ASGITransport(requests, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://forkd") as http:
            scene = Scene(host, app, http, {})
            for number, tenant in enumerate((OURS, THEIRS)):
                tag = f"{TAG}-{number}"
                app.state.asking = may(*Scope, tenant=tenant)
                recipe = str(fake_host.recipe())
                made = await http.post("/v2/snapshots", json={"tag": tag, "recipe": recipe})
                assert made.status_code == 201, made.text
                forked = await http.post("/v2/sandboxes", json={"snapshot_tag": tag})
                assert forked.status_code == 201, forked.text
                scene.things[tenant] = {"tag": tag, "id": forked.json()[0]["id"]}
            yield scene
            app.state.asking = may(*Scope)
            for each in (await http.get("/v2/sandboxes")).json():
                await http.delete(f"/v2/sandboxes/{each['id']}")


def may(*scopes: Scope, tenant: Tenant = OURS) -> Caller:
    """Return a caller with these scopes."""
    return Caller("token:test", tenant, frozenset(scopes), "test")


def test_every_route_has_a_decision() -> None:
    app = create_app(None)  # type: ignore[arg-type]  # its routes are the same over any host
    assert set(routes(app)) == set(DECISIONS)


async def test_each_scope_opens_the_routes_that_need_it_and_no_other(scene: Scene) -> None:
    wrong = []
    for operation, decision in DECISIONS.items():
        for scope in Scope:
            allowed = scope is ADMIN or set(decision.scopes) <= {scope}
            if allowed:
                continue
            answer = await scene.ask(operation, may(scope))
            if answer.status_code != 403:
                wrong.append((operation, scope, answer.status_code, answer.text[:100]))
    assert wrong == []


@pytest.mark.parametrize("admin", [False, True])
async def test_whoever_has_the_scopes_may(scene: Scene, *, admin: bool) -> None:
    wrong = []
    for operation, decision in sorted(DECISIONS.items(), key=lambda each: "delete" in each[0]):
        with contextlib.suppress(httpx.HTTPError):
            answer = await scene.ask(operation, may(ADMIN) if admin else may(*decision.scopes))
            if answer.status_code in {401, 403} or answer.status_code == 500:
                wrong.append((operation, answer.status_code, answer.text[:100]))
    assert wrong == []


async def test_nothing_of_another_tenant_is_there(scene: Scene) -> None:
    wrong = []
    for operation, decision in DECISIONS.items():
        if decision.own:
            answer = await scene.ask(operation, may(READ, RUN, SNAPSHOTS), whose=THEIRS)
            if answer.status_code != 404:
                wrong.append((operation, answer.status_code, answer.text[:100]))
    assert wrong == []
    theirs = scene.things[THEIRS]
    for operation in ("v1 list_sandboxes", "v2 list_sandboxes", "v2 list_snapshots", "v2 tree",
                      "v1 list_snapshots", "v2 list_usage", "v2 list_tenants"):  # fmt: skip
        said = (await scene.ask(operation, may(READ))).text
        assert theirs["id"] not in said, operation
        assert theirs["tag"] not in said, operation


async def test_an_admin_sees_and_touches_what_belongs_to_any_tenant(scene: Scene) -> None:
    for operation in ("v2 get_sandbox", "v2 get_snapshot", "v2 ping", "v2 eval", "v1 exec"):
        answer = await scene.ask(operation, may(ADMIN), whose=THEIRS)
        assert answer.status_code == 200, (operation, answer.text)


async def test_a_shared_snapshot_is_forked_by_all_and_changed_by_its_tenant(scene: Scene) -> None:
    tag = scene.things[THEIRS]["tag"]
    for shared in (True, False):
        scene.app.state.asking = may(SNAPSHOTS, tenant=THEIRS)
        said = await scene.http.put(f"/v2/snapshots/{tag}/shared", json={"shared": shared})
        assert (said.status_code, said.json()["shared"]) == (200, shared)
        forked = await scene.ask("v2 fork", may(RUN), whose=THEIRS)
        assert forked.status_code == (201 if shared else 404), forked.text
        for operation in ("v2 delete_snapshot", "v2 share_snapshot"):
            refused = await scene.ask(operation, may(SNAPSHOTS), whose=THEIRS)
            assert refused.status_code == (403 if shared else 404), operation


async def test_what_others_have_is_told_to_nobody_but_an_administrator(scene: Scene) -> None:
    base, live = scene.things[THEIRS]["tag"], scene.things[THEIRS]["id"]
    scene.app.state.asking = may(READ, RUN, SNAPSHOTS, tenant=THEIRS)
    made = await scene.http.post(f"/v2/sandboxes/{live}/branch", json={"n": 0, "tag": "link"})
    assert made.status_code == 201, made.text
    await scene.http.put("/v2/snapshots/link/shared", json={"shared": True})
    forked = await scene.http.post("/v2/sandboxes", json={"snapshot_tag": "link"})
    assert forked.status_code == 201, forked.text

    async def told(caller: Caller) -> tuple[Any, ...]:
        scene.app.state.asking = caller
        link = (await scene.http.get("/v2/snapshots/link/info")).json()
        host = (await scene.http.get("/v2/host")).json()
        listed = {each["tag"]: each for each in (await scene.http.get("/v2/snapshots")).json()}
        assert {name: link[name] for name in listed["link"]} == listed["link"]
        names = ("parent_tag", "source_id", "ancestors", "sandboxes")
        return (*(link[name] for name in names), host["snapshots"], host["sandboxes"])

    assert await told(may(READ)) == (None, None, [], 0, 2, 1)
    assert await told(may(ADMIN)) == (base, live, [base], 1, 3, 3)
    theirs = {"a": "link", "b": scene.things[OURS]["tag"]}
    scene.app.state.asking = may(RUN)
    apart = await scene.http.post("/v2/diff", json=theirs)
    assert (apart.status_code, base in apart.text) == (409, False)
    assert "another tenant's snapshot" in apart.json()["error"]
    v1 = await scene.http.get("/v1/snapshots", headers={})
    assert v1.status_code == 403
    scene.app.state.asking = may(READ)
    said = (await scene.http.get("/v1/snapshots")).text
    assert (base in said, live in said, "link" in said) == (False, False, True)
