"""Every request that is authenticated or refused is one line of the audit log."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.asyncio.client import connect, unix_connect
from websockets.exceptions import InvalidStatus

from forkd.daemon.app import create_app
from forkd.daemon.auditing import Actions
from forkd.daemon.reference.app import PREFIX, create_reference
from forkd.model.caller import Scope, Tenant
from forkd.model.ids import new_sandbox_id
from forkd.wire import v2
from tests.support.audited import DEADLINE_S, audited, lines_of
from tests.support.fake_service import FakeService
from tests.support.raw_http import RawClient
from tests.support.service_host import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.audited import Audited

SANDBOX = new_sandbox_id()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Audited]:
    async with audited(tmp_path) as made:
        yield made


def short(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[each] for each in ("principal", "action", "result", "error", "status"))


async def test_a_request_over_tcp_says_which_token_asked_on_whose_behalf_and_from_where(
    daemon: Audited,
) -> None:
    made = await daemon.token(Scope.READ, tenant=Tenant("red"))
    async with daemon.http(made.secret) as http:
        answer = await http.get("/v2/sandboxes")

    (line,) = await daemon.lines(1)
    assert short(line) == ("token:ci", "list_sandboxes", "ok", None, 200)
    assert line["tenant"] == "red"
    assert line["request"] == answer.headers["x-request-id"]
    host, _, port = line["remote"].rpartition(":")
    assert (host, port.isdecimal()) == ("127.0.0.1", True)
    assert 0 < line["latency_ms"] < 60_000


async def test_a_request_over_the_unix_socket_says_which_user_and_process_asked(
    daemon: Audited,
) -> None:
    import os  # noqa: PLC0415 - whose number it is

    async with daemon.unix() as http:
        await http.get("/v2/sandboxes")

    (line,) = await daemon.lines(1)
    assert line["remote"] == f"unix:uid={os.geteuid()},pid={os.getpid()}"
    assert line["principal"].startswith("user:")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("DELETE", "/v2/tokens/nobody", ("delete_token", "refused", "not_found", 404)),
        ("GET", f"/v2/sandboxes/{SANDBOX}", ("get_sandbox", "refused", "not_found", 404)),
        ("GET", "/v2/sandboxes/no.id", ("get_sandbox", "refused", "invalid_request", 400)),
        ("GET", "/secret/path", ("GET *", "refused", "not_found", 404)),
        ("GET", "/v2/openapi.json", ("GET /v2/openapi.json", "ok", None, 200)),
        ("PATCH", "/v2/sandboxes", ("PATCH *", "refused", "request", 405)),
        ("SECRET", "/v2/sandboxes", ("OTHER *", "refused", "request", 405)),
        ("POST", "/v2/sandboxes", ("fork", "refused", "invalid_request", 400)),
    ],
)
async def test_what_was_asked_for_and_what_came_of_it(
    daemon: Audited, method: str, path: str, expected: tuple[object, ...]
) -> None:
    async with daemon.http() as http:
        await http.request(method, httpx.URL(daemon.url, raw_path=path.encode()))

    (line,) = await daemon.lines(1)
    assert short(line) == ("token-file", *expected)


async def test_a_log_in_that_is_denied_is_there_with_what_it_was_for(daemon: Audited) -> None:
    async with daemon.http("guessed") as http:
        await http.delete(f"/v2/sandboxes/{SANDBOX}")

    (line,) = await daemon.lines(1)
    assert short(line) == (None, "delete_sandbox", "denied", "denied", 401)
    assert (line["tenant"], line["objects"]) == (None, [])


async def test_a_scope_that_is_missing_is_a_denial_of_somebody_known(daemon: Audited) -> None:
    made = await daemon.token(Scope.READ)
    async with daemon.http(made.secret) as http:
        await http.post("/v2/tokens", json={"name": "more", "scopes": ["admin"]})

    (line,) = await daemon.lines(1)
    assert short(line) == ("token:ci", "create_token", "denied", "forbidden", 403)


async def test_a_host_that_is_not_served_is_a_denial(daemon: Audited) -> None:
    async with daemon.http() as http:
        await http.get("/v2/sandboxes", headers={"Host": "evil.example"})

    (line,) = await daemon.lines(1)
    assert short(line) == (None, "list_sandboxes", "denied", "forbidden", 403)


async def test_what_is_made_and_removed_is_named(daemon: Audited) -> None:
    async with daemon.http() as http:
        await http.post("/v2/tokens", json={"name": "more", "scopes": ["read"]})
        await http.delete("/v2/tokens/more")

    made, removed = await daemon.lines(2)
    assert (made["action"], made["objects"]) == ("create_token", ["token:more"])
    assert (removed["action"], removed["objects"]) == ("delete_token", ["token:more"])


async def test_whether_it_lives_is_asked_too_often_to_be_written_down(daemon: Audited) -> None:
    async with daemon.http("guessed") as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        await http.get("/version")

    (line,) = await daemon.lines(1)
    assert short(line) == (None, "version", "denied", "denied", 401)


async def test_a_crash_is_a_failure(daemon: Audited) -> None:
    daemon.service.crashes_expected = 1

    async def crash(*_: object) -> None:
        raise RuntimeError("secret")

    daemon.service.system.info = crash  # type: ignore[method-assign,assignment]
    async with daemon.http() as http:
        assert (await http.get("/v2/host")).status_code == 500

    (line,) = await daemon.lines(1)
    assert short(line) == ("token-file", "get_host", "failed", "internal", 500)


async def test_a_client_cannot_say_that_it_is_somewhere_else(daemon: Audited) -> None:
    async with daemon.http("guessed") as http:
        headers = {"X-Forwarded-For": "10.9.8.7", "Forwarded": "for=10.9.8.7"}
        await http.get("/v2/sandboxes", headers=headers)

    (line,) = await daemon.lines(1)
    assert line["remote"].startswith("127.0.0.1:")


async def test_a_client_that_leaves_has_its_request_cancelled(daemon: Audited) -> None:
    begun = asyncio.Event()

    async def wait(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    daemon.service.system.info = wait  # type: ignore[method-assign,assignment]
    async with RawClient(daemon.unix_url) as client:
        client.say("GET /v2/host HTTP/1.1\nHost: forkd\n\n")
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()

    (line,) = await daemon.lines(1)
    assert line["action"] == "get_host"
    assert (line["result"], line["error"], line["status"]) == ("cancelled", None, None)


async def forked(daemon: Audited) -> str:
    async with daemon.unix() as http:
        body = {"tag": "new", "recipe": "/recipes/good"}
        assert (await http.post("/v2/snapshots", json=body)).is_success
        answer = await http.post("/v2/sandboxes", json={"snapshot_tag": "new", "n": 1})
        return str(answer.json()[0]["id"])


async def test_a_websocket_is_written_down_at_its_end_however_it_ends(daemon: Audited) -> None:
    sandbox = await forked(daemon)
    path = f"/v2/sandboxes/{sandbox}/exec/stream"
    start = bytes([v2.Kind.REQUEST]) + v2.ExecStart(args=["echo", "x"]).model_dump_json().encode()
    url = daemon.unix_url.removeprefix("unix://")
    async with unix_connect(url, f"ws://forkd{path}") as socket:
        await socket.send(start)
        async for _ in socket:
            pass
    async with unix_connect(url, f"ws://forkd{path}"):
        pass  # leaves without a word
    async with unix_connect(url, f"ws://forkd/v2/sandboxes/{SANDBOX}/exec/stream") as socket:
        await socket.send(start)
        async for _ in socket:
            pass
    with pytest.raises(InvalidStatus):
        await connect(f"ws{daemon.url.removeprefix('http')}{path}")

    lines = (await daemon.lines(6))[2:]
    named = "WEBSOCKET /v2/sandboxes/{id}/exec/stream"
    assert [short(line)[1:] for line in lines] == [
        (named, "ok", None, 101),
        (named, "cancelled", None, 101),
        (named, "refused", "not_found", 101),
        (named, "denied", "denied", 401),
    ]


async def test_a_stream_that_ends_with_an_error_is_no_success(daemon: Audited) -> None:
    async with daemon.unix() as http:
        answer = await http.post(
            "/v2/snapshots",
            json={"tag": "a", "recipe": "/recipes/fails"},
            headers={"Accept": "application/x-ndjson"},
        )

    assert answer.status_code == 200
    (line,) = await daemon.lines(1)
    assert line["action"] == "create_snapshot"
    assert (line["result"], line["error"]) == ("refused", "warm_up")


async def test_on_a_full_disk_only_reads_are_served_if_so_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with audited(tmp_path, audit_full="refuse") as daemon, daemon.http() as http:
        # Until then it has nothing to write, and does not find out that it could.
        monkeypatch.setattr(daemon.log, "_problem", OSError(28, "No space left on device"))
        monkeypatch.setattr(daemon.log, "note", lambda _: None)

        refused = await http.post("/v2/tokens", json={"name": "more", "scopes": ["read"]})
        assert (refused.status_code, refused.json()["code"]) == (503, "capacity")
        assert "FORKD_AUDIT_FULL" in refused.json()["error"]
        with pytest.raises(InvalidStatus, match="503"):
            await connect(
                f"ws{daemon.url.removeprefix('http')}/v2/sandboxes/{SANDBOX}/exec/stream",
                additional_headers={"Authorization": f"Bearer {daemon.secret}"},
            )
        assert (await http.get("/v2/tokens")).json() == []
        assert (await http.get("/healthz")).status_code == 200


async def test_a_reload_says_what_was_and_what_was_not(daemon: Audited) -> None:
    path, renamed = daemon.log.path, daemon.log.path.with_suffix(".1")
    path.rename(renamed)
    path.touch()
    path.chmod(0o644)
    daemon.reloads.run()
    await until(lambda: len(lines_of(renamed)) == 2)
    path.unlink()
    daemon.reloads.run()

    failed, done = lines_of(renamed)
    assert short(failed) == ("forkd", "reload", "failed", "invalid_request", None)
    assert (failed["objects"], done["objects"]) == (["audit_log"], ["config", "token_file"])
    (line,) = await daemon.lines(1)
    assert short(line) == ("forkd", "reload", "ok", None, None)
    assert line["objects"] == ["config", "audit_log", "token_file"]


def test_every_operation_of_ours_has_a_name() -> None:
    actions = Actions(create_app(FakeService()).routes)
    app = create_app(FakeService())
    documents = {"": app.openapi(), PREFIX: create_reference(app.state).openapi()}

    for prefix, document in documents.items():
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                asked = prefix + re.sub(r"\{\w+\}", "one", path)
                scope = {"type": "http", "method": method.upper(), "path": asked}
                assert actions.of(scope) == operation["operationId"]
