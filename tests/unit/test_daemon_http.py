"""What the daemon answers to requests that no SDK would make."""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.limits import BODY_BYTES_MAX
from tests.support.daemon import TOKEN, RunningDaemon
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fake_guests import FakeGuest

JSON = {"Content-Type": "application/json"}
NDJSON = {"Accept": "application/x-ndjson"}


@pytest.fixture
def http(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    daemon.service.stored = some_snapshots("warm", "is-flaky")
    transport = httpx.HTTPTransport(uds=daemon.url.removeprefix("unix://"), verify=False)
    with httpx.Client(transport=transport, base_url="http://forkd") as client:
        yield client


@pytest.fixture
def tcp(daemon: RunningDaemon) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=daemon.tcp_url, verify=False, trust_env=False) as client:  # noqa: S501 - no TLS here
        yield client


class Heard(logging.Handler):
    """Knows when a crash has been logged, which is after it was answered."""

    def __init__(self) -> None:
        super().__init__()
        self.crash = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.crash.set()


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Return the body of an error, checked for what every error body has."""
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["code"]) == (status, code)
    assert set(body) == {"error", "code", "field", "context"}
    return body


def test_a_fork_answers_a_list_like_its_predecessor_did(http: httpx.Client) -> None:
    answer = http.post("/v2/sandboxes", json={"snapshot_tag": "warm", "n": 2})

    assert answer.status_code == 201
    assert [each["snapshot_tag"] for each in answer.json()] == ["warm", "warm"]
    assert answer.headers["Server-Timing"] == "fork;dur=12.500"


def test_a_fork_that_failed_in_part_is_207_and_has_one_element_for_each(http: httpx.Client) -> None:
    answer = http.post("/v2/sandboxes", json={"snapshot_tag": "is-flaky", "n": 2})

    assert answer.status_code == 207
    assert [each["status"] for each in answer.json()] == ["running", "failed"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"snapshot_tag": "warm", "n": 0}, "n"),
        ({"snapshot_tag": "warm", "n": 10_001}, "n"),
        ({"snapshot_tag": "warm", "n": "2"}, "n"),
        ({"snapshot_tag": "warm", "live_fork": True}, "live_fork"),
        ({"snapshot_tag": "warm", "memory_limit_mib": 31}, "memory_limit_mib"),
        ({"snapshot_tag": "warm", "deadline_secs": float("inf")}, "deadline_secs"),
        ({"snapshot_tag": "a..b"}, "snapshot_tag"),
        ({"snapshot_tag": "x" * 65}, "snapshot_tag"),
        ({}, "snapshot_tag"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    http: httpx.Client, body: dict[str, Any], field: str
) -> None:
    answer = http.post("/v2/sandboxes", content=json.dumps(body).encode(), headers=JSON)

    said = refused(answer, 400, "invalid_request")
    assert said["field"] == field
    assert field in said["error"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v2/sandboxes/sb-aaaaaaaaaaaaaaaaaaaaaaaaaa", 404, "not_found"),
        ("GET", "/v2/sandboxes/nonsense", 404, "not_found"),
        ("GET", "/v2/sandboxes/NONSENSE", 400, "invalid_request"),
        ("GET", "/v2/sandboxes/sb-", 400, "invalid_request"),
        ("DELETE", "/v2/sandboxes/nonsense", 404, "not_found"),
        ("DELETE", "/v2/sandboxes/NONSENSE", 400, "invalid_request"),
        ("GET", "/v2/snapshots/..%2f..%2fetc/info", 404, "not_found"),
        ("GET", "/v2/snapshots/a..b/info", 400, "invalid_request"),
        ("DELETE", "/v2/snapshots/nothing", 404, "not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("PATCH", "/v2/snapshots", 405, "request"),
        ("GET", "/v2/sandboxes?colour=red", 400, "invalid_request"),
    ],
)
def test_every_refusal_has_a_code(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    refused(http.request(method, path), status, code)


@pytest.fixture
def guest(http: httpx.Client, daemon: RunningDaemon) -> FakeGuest:
    """The guest of a sandbox."""
    http.post("/v2/sandboxes", json={"snapshot_tag": "warm"})
    (made,) = daemon.service.running.values()
    return made


@pytest.mark.parametrize(
    ("said", "mode"), [("0644", 0o644), ("420", 0o644), ("04755", 0o4755), ("0", 0), ("4095", 4095)]
)
def test_permissions_are_octal_or_a_decimal_number(
    http: httpx.Client, guest: FakeGuest, said: str, mode: int
) -> None:
    path = f"/v2/sandboxes/{guest.sandbox.id}/files"

    assert http.put(f"{path}?path=/tmp/x&mode={said}", content=b"").status_code == 200
    for told in (mode, f"0{mode:o}"):
        body = {"path": "/tmp/d", "parents": True, "mode": told}
        assert http.post(f"{path}/mkdir", json=body).status_code == 204
        assert guest.modes == {"/tmp/x": mode, "/tmp/d": mode}


@pytest.mark.parametrize("said", ["0999", "00000644", "010000", "4096", "-1", "rw-", "0x1ff"])
def test_what_is_no_permissions_is_refused(http: httpx.Client, guest: FakeGuest, said: str) -> None:
    path = f"/v2/sandboxes/{guest.sandbox.id}/files"

    answer = http.put(f"{path}?path=/tmp/x&mode={said}", content=b"")
    assert refused(answer, 400, "invalid_request")["field"] == "mode"
    answer = http.post(f"{path}/mkdir", json={"path": "/tmp/d", "mode": said})
    assert refused(answer, 400, "invalid_request")["field"] == "mode"


def test_a_body_that_is_no_json_is_refused(http: httpx.Client) -> None:
    said = refused(http.post("/v2/sandboxes", content=b"{", headers=JSON), 400, "invalid_request")

    assert "JSON" in said["error"]


def test_a_body_must_be_called_json(http: httpx.Client) -> None:
    """A page in a browser can post plain text to a loopback address, but not this."""
    answer = http.post("/v2/sandboxes", content=b"{}", headers={"Content-Type": "text/plain"})

    assert "application/json" in refused(answer, 400, "invalid_request")["error"]


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not(http: httpx.Client) -> None:
    within = http.post("/v2/sandboxes", content=b" " * BODY_BYTES_MAX, headers=JSON)
    beyond = http.post("/v2/sandboxes", content=b" " * (BODY_BYTES_MAX + 1))

    assert "longer than" not in refused(within, 400, "invalid_request")["error"]
    assert "longer than" in refused(beyond, 413, "invalid_request")["error"]


def test_a_body_that_does_not_say_how_long_it_is_is_counted(http: httpx.Client) -> None:
    pieces = [b" " * 65536] * (BODY_BYTES_MAX // 65536 + 1)

    answer = http.post("/v2/sandboxes", content=iter(pieces), headers=JSON)

    said = refused(answer, 413, "invalid_request")
    assert "longer than" in said["error"]


def test_a_file_may_be_longer_than_a_body(http: httpx.Client) -> None:
    sandbox = http.post("/v2/sandboxes", json={"snapshot_tag": "warm"}).json()[0]["id"]
    data = b"x" * (BODY_BYTES_MAX + 1)

    answer = http.put(f"/v2/sandboxes/{sandbox}/files", params={"path": "/tmp/x"}, content=data)
    back = http.get(f"/v2/sandboxes/{sandbox}/files", params={"path": "/tmp/x"})

    assert answer.json() == {"bytes": len(data)}
    assert (back.content, back.headers["X-File-Size"]) == (data, str(len(data)))
    assert back.headers["X-File-Mode"] == "0644"


def test_a_bake_without_a_stream_answers_when_it_is_done(http: httpx.Client) -> None:
    answer = http.post("/v2/snapshots", json={"tag": "new", "recipe": "/recipes/good"})

    assert (answer.status_code, answer.json()["status"]) == (201, "ready")


def test_a_bake_with_a_stream_is_a_line_for_each_step(http: httpx.Client) -> None:
    body = {"tag": "new", "recipe": "/recipes/good"}

    answer = http.post("/v2/snapshots", json=body, headers=NDJSON)

    assert answer.headers["Content-Type"] == "application/x-ndjson"
    events = [json.loads(line) for line in answer.text.splitlines()]
    assert [each["event"] for each in events] == ["progress", "progress", "snapshot"]


def test_a_stream_that_fails_ends_in_an_error_event(http: httpx.Client) -> None:
    body = {"tag": "new", "recipe": "/recipes/fails"}

    answer = http.post("/v2/snapshots", json=body, headers=NDJSON)

    last = json.loads(answer.text.splitlines()[-1])
    assert (answer.status_code, last["event"], last["code"]) == (200, "error", "warm_up")


def test_what_is_refused_at_once_is_no_stream(http: httpx.Client) -> None:
    body = {"tag": "warm", "recipe": "/recipes/good"}

    refused(http.post("/v2/snapshots", json=body, headers=NDJSON), 409, "conflict")


def test_a_bake_that_fails_without_a_stream_has_a_status(http: httpx.Client) -> None:
    body = {"tag": "new", "recipe": "/recipes/fails"}

    refused(http.post("/v2/snapshots", json=body), 422, "warm_up")


def test_a_client_that_leaves_a_stream_undoes_the_bake(
    http: httpx.Client, daemon: RunningDaemon
) -> None:
    body = {"tag": "new", "recipe": "/recipes/hangs"}

    with http.stream("POST", "/v2/snapshots", json=body, headers=NDJSON) as answer:
        next(answer.iter_lines())

    daemon.wait_for(lambda: daemon.service.bake_undone)
    assert "new" not in daemon.service.stored


def test_a_recipe_must_not_depend_on_where_the_daemon_runs(http: httpx.Client) -> None:
    answer = http.post("/v2/snapshots", json={"tag": "new", "recipe": "./good"})

    assert refused(answer, 400, "invalid_request")["field"] == "recipe"


def test_the_address_answers_nobody_without_the_token(tcp: httpx.Client) -> None:
    refused(tcp.get("/v2/snapshots"), 401, "denied")
    refused(tcp.get("/v2/snapshots", headers={"Authorization": "Bearer x"}), 401, "denied")
    refused(tcp.get("/v2/snapshots", headers={"Authorization": TOKEN}), 401, "denied")
    assert tcp.get("/version").headers["WWW-Authenticate"] == "Bearer"

    allowed = tcp.get("/v2/snapshots", headers={"Authorization": f"Bearer {TOKEN}"})
    assert allowed.status_code == 200


def test_health_is_told_to_anybody(tcp: httpx.Client) -> None:
    assert tcp.get("/healthz").json() == {"ok": True}


def test_a_crash_is_a_500_that_tells_nothing(http: httpx.Client, daemon: RunningDaemon) -> None:
    daemon.service.crashes_expected = 1
    daemon.service.system.info = None  # type: ignore[method-assign,assignment]  # a bug of ours

    heard = Heard()
    logging.getLogger().addHandler(heard)
    said = refused(http.get("/v2/host"), 500, "internal")

    assert "NoneType" not in said["error"]
    assert heard.crash.wait(5)
    logging.getLogger().removeHandler(heard)


def test_the_openapi_document_is_served(http: httpx.Client) -> None:
    assert http.get("/v2/openapi.json").json()["info"]["title"] == "forkd"
