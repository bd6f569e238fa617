"""A call that failed for a passing reason is made again, but nothing is done twice."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING

import httpx
import pytest

from forkd import AsyncClient, Client
from forkd.errors import CapacityError, Conflict, EngineError, NotFound, TransportError
from forkd.sdk import _retries
from forkd.sdk._retries import JITTER, PAUSE_S_MAX, RETRIES_MAX, RETRY_S_MAX, Retries
from tests.support.daemon import TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.errors import ForkdError

VERSION = {"version": "0", "api": "v2"}


def failed(cause: type[httpx.HTTPError]) -> TransportError:
    error = TransportError("x")
    error.__cause__ = cause("x")
    return error


def pauses(error: ForkdError, *, most: int = 100, repeatable: bool = True) -> list[float]:
    """Return the pauses after the same error again and again, until we give up."""
    retries, found = Retries(most, repeatable=repeatable), []
    while (pause_s := retries.pause_s(error)) is not None:
        found.append(pause_s)
    return found


def test_a_call_is_made_again_a_few_times_with_growing_jittered_pauses() -> None:
    found = pauses(failed(httpx.ReadError), most=RETRIES_MAX)

    assert len(found) == RETRIES_MAX
    for number, pause_s in enumerate(found):
        least = min(_retries.PAUSE_S_MIN * 2**number, PAUSE_S_MAX)
        assert least <= pause_s <= least * (1 + JITTER)
    assert found != pauses(failed(httpx.ReadError), most=RETRIES_MAX)


def test_one_call_waits_for_a_limited_time_in_all() -> None:
    found = pauses(failed(httpx.ReadError))

    assert RETRY_S_MAX - PAUSE_S_MAX * (1 + JITTER) < sum(found) <= RETRY_S_MAX


def test_a_daemon_that_is_not_there_is_tried_twice_more() -> None:
    assert len(pauses(failed(httpx.ConnectError), repeatable=False)) == 2
    assert len(pauses(failed(httpx.ConnectTimeout), repeatable=False)) == 2


def test_the_daemon_says_when_to_come_back() -> None:
    (first, *_) = found = pauses(CapacityError("x", retry_after_s=3), repeatable=False)

    assert 3 <= first <= 3 * (1 + JITTER)
    assert sum(found) <= RETRY_S_MAX
    assert pauses(CapacityError("x", retry_after_s=int(RETRY_S_MAX) + 1)) == []
    assert pauses(CapacityError("the disk is full")) == []


@pytest.mark.parametrize(
    "error",
    [
        Conflict("x"),
        NotFound("x"),
        EngineError("x"),
        failed(httpx.ReadTimeout),
        TransportError("x"),
    ],
)
def test_what_does_not_pass_by_itself_is_not_tried_again(error: ForkdError) -> None:
    assert pauses(error) == []


def test_what_may_have_been_done_is_done_again_only_where_that_is_harmless() -> None:
    assert pauses(failed(httpx.RemoteProtocolError), repeatable=False) == []
    assert Retries(9, repeatable=True, resendable=False).pause_s(failed(httpx.ReadError)) is None


class Failing(socketserver.ThreadingTCPServer):
    """A daemon that does what a list says: a status, or "cut" for no answer."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, *plan: object) -> None:
        self.plan = list(plan)
        self.seen: list[tuple[str, str, str | None]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Failing
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.command, self.path, self.headers.get("Idempotency-Key")))
        match self.server.plan.pop(0):
            case "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case ("events", list(events)):
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for event in events:
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case (int(status), (dict() | list()) as body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = answer  # noqa: N815 - names of the library

    def log_message(self, *_: object) -> None:
        """Say nothing."""


BUSY = (503, {"error": "busy", "code": "busy", "context": {"retry_after_s": 0}})
GONE = (404, {"error": "no sandbox", "code": "not_found"})


@contextmanager
def failing(*plan: object) -> Iterator[Failing]:
    with Failing(*plan) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    assert server.plan == []


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_retries, "PAUSE_S_MIN", 0.0)


@pytest.mark.usefixtures("no_waiting")
def test_a_reading_call_survives_lost_answers_and_busy_daemons() -> None:
    plan = ("cut", BUSY, "cut", (200, VERSION))
    with failing(*plan) as server, Client(server.url, token=TOKEN) as client:
        assert client.version().version == "0"
    assert len(server.seen) == 4


@pytest.mark.usefixtures("no_waiting")
async def test_an_async_one_too() -> None:
    with failing("cut", BUSY, (200, VERSION)) as server:
        async with AsyncClient(server.url, token=TOKEN) as client:
            assert (await client.version()).version == "0"


@pytest.mark.usefixtures("no_waiting")
def test_a_client_may_want_no_second_attempt() -> None:
    with (
        failing("cut") as server,
        Client(server.url, token=TOKEN, retries_max=0) as client,
        pytest.raises(TransportError),
    ):
        client.version()


@pytest.mark.usefixtures("no_waiting")
def test_a_removal_whose_answer_was_lost_has_removed() -> None:
    with failing("cut", GONE, GONE) as server, Client(server.url, token=TOKEN) as client:
        client.snapshots.delete("x")
        with pytest.raises(NotFound):
            client.snapshots.delete("x")


@pytest.mark.usefixtures("no_waiting")
def test_a_command_whose_answer_was_lost_is_not_run_again() -> None:
    info = {
        "id": "sb-a", "snapshot_tag": "x", "status": "running", "created_at_unix": 1,
        "hostname": "g", "pid": 1, "guest_addr": None, "memory_limit_mib": None,
        "disk_limit_mib": None, "fork_ms": None,
    }  # fmt: skip
    with failing((200, info), BUSY, "cut") as server, Client(server.url, token=TOKEN) as client:
        sandbox = client.sandboxes.get("sb-a")
        with pytest.raises(TransportError, match="ended the connection"):
            sandbox.exec("true")
    assert [method for method, *_ in server.seen] == ["GET", "POST", "POST"]


IMAGE = {
    "event": "image",
    "image": {
        "key": "k", "name": "n", "kernel": "/k", "initramfs": None, "rootfs": "/r", "disk_mib": 1
    },
}  # fmt: skip


def step(name: str) -> dict[str, str]:
    return {"event": "progress", "stage": name, "message": ""}


@pytest.mark.usefixtures("no_waiting")
def test_a_stream_that_breaks_is_followed_again_and_each_step_is_told_once() -> None:
    steps: list[str] = []
    one, two, three = (step(name) for name in ("one", "two", "three"))
    plan = (
        ("events", [one, two]),
        "cut",
        ("events", [one]),
        ("events", [one, two, three, IMAGE]),
    )
    with failing(*plan) as server, Client(server.url, token=TOKEN) as client:
        made = client.images.build("good", on_progress=lambda each: steps.append(each.stage))

    assert (made.key, steps) == ("k", ["one", "two", "three"])
    keys = {key for *_, key in server.seen}
    assert len(keys) == 1
    assert None not in keys


def test_every_call_has_a_key_of_its_own() -> None:
    with failing((201, []), (201, [])) as server, Client(server.url, token=TOKEN) as client:
        client.fork("x")
        client.fork("x")

    first, second = (key for *_, key in server.seen)
    assert first is not None
    assert second is not None
    assert first != second


def test_a_daemon_that_is_started_meanwhile_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    servers: list[Failing] = []

    def start(_: float) -> None:
        monkeypatch.setattr(Failing, "server_bind", lambda self: bind(self, port))
        servers.append(Failing((200, VERSION)))
        threading.Thread(target=servers[0].serve_forever, args=(0.01,)).start()

    monkeypatch.setattr("forkd.sdk._sync.http.sync_pause", start)
    with Client(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        assert client.version().version == "0"
    servers[0].shutdown()
    servers[0].server_close()


def bind(server: Failing, port: int) -> None:
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.socket.bind(("127.0.0.1", port))
    server.server_address = server.socket.getsockname()
