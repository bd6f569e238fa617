"""The exec WebSocket refuses what it does not understand, and says what it was."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect, unix_connect

from forkd.daemon import exec as daemon_exec
from forkd.limits import MESSAGE_BYTES_MAX
from forkd.wire.v2 import Kind
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from websockets.sync.client import ClientConnection

    from forkd.model.ids import SandboxId
    from tests.support.daemon import RunningDaemon

UNKNOWN = "sb-aaaaaaaaaaaaaaaaaaaaaaaaaa"


@pytest.fixture
def sandbox(daemon: RunningDaemon) -> SandboxId:
    from forkd import Client  # noqa: PLC0415 - the rest of this file does without

    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        client.fork("warm")
    return next(iter(daemon.service.running))


def path_of(sandbox: str) -> str:
    return f"ws://forkd/v2/sandboxes/{sandbox}/exec/stream"


@pytest.fixture
def socket(daemon: RunningDaemon, sandbox: SandboxId) -> Iterator[ClientConnection]:
    path = daemon.url.removeprefix("unix://")
    with unix_connect(path, path_of(sandbox), max_size=None) as connection:
        yield connection


@pytest.fixture
def evaluating(daemon: RunningDaemon, sandbox: SandboxId) -> Iterator[ClientConnection]:
    path = path_of(sandbox).replace("exec/stream", "eval/stream")
    with unix_connect(daemon.url.removeprefix("unix://"), path, max_size=None) as connection:
        yield connection


def message(kind: Kind, body: object = None) -> bytes:
    return bytes([kind]) + (b"" if body is None else json.dumps(body).encode())


def refusal(socket: ClientConnection) -> dict[str, Any]:
    """Return the body of the ERROR that comes next, after which the daemon closes."""
    data = socket.recv(timeout=5, decode=False)
    assert data[0] == Kind.ERROR
    with pytest.raises(ConnectionClosed):
        socket.recv(timeout=5)
    body: dict[str, Any] = json.loads(data[1:])
    return body


def echoed(socket: ClientConnection, data: bytes) -> bytes:
    """Send input to a `cat`, and return the message that comes back."""
    socket.send(bytes([Kind.STDIN]) + data)
    return socket.recv(timeout=5, decode=False)


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (message(Kind.STDIN), "must be a REQUEST"),
        (b"\xc8", "200 is not a kind"),
        (b"", "a kind and a payload"),
        ("text", "messages are binary"),
        (message(Kind.REQUEST), "EOF while parsing"),
        (message(Kind.REQUEST, {"args": []}), "args"),
        (message(Kind.REQUEST, {"args": ["true"], "shell": True}), "shell"),
        (message(Kind.REQUEST, {"args": ["true"], "tty": {"rows": 0, "columns": 1}}), "tty.rows"),
    ],
)
def test_a_first_message_that_is_no_request_is_refused(
    socket: ClientConnection, first: bytes | str, complaint: str
) -> None:
    socket.send(first)

    said = refusal(socket)
    assert said["code"] == "invalid_request"
    assert complaint in said["error"]


@pytest.mark.parametrize(
    ("then", "complaint"),
    [
        (message(Kind.REPLY), "does not send REPLY"),
        (message(Kind.CONTROL, {"signal": 65}), "signal"),
        (message(Kind.CONTROL, {"stop": True}), "stop"),
        (message(Kind.CONTROL, {"resize": {"rows": 1, "columns": 1}}), "no terminal"),
    ],
)
def test_a_later_message_that_makes_no_sense_ends_the_program(
    socket: ClientConnection, daemon: RunningDaemon, then: bytes, complaint: str
) -> None:
    socket.send(message(Kind.REQUEST, {"args": ["sleep"]}))
    assert socket.recv(timeout=5, decode=False)[0] == Kind.EVENT

    socket.send(then)

    assert complaint in refusal(socket)["error"]
    daemon.wait_for(lambda: daemon.service.execs[0].closed)


def test_a_message_beyond_the_limit_closes_the_connection(socket: ClientConnection) -> None:
    socket.send(message(Kind.REQUEST, {"args": ["cat"], "stdin": True}))
    assert socket.recv(timeout=5, decode=False)[0] == Kind.EVENT

    assert len(echoed(socket, b"x" * (MESSAGE_BYTES_MAX - 1))) == MESSAGE_BYTES_MAX
    with pytest.raises(ConnectionClosed):
        echoed(socket, b"x" * MESSAGE_BYTES_MAX)


@pytest.mark.parametrize(
    ("name", "code"),
    [("NONSENSE", "invalid_request"), ("nonsense", "not_found"), (UNKNOWN, "not_found")],
)
def test_a_sandbox_that_is_none_is_refused(daemon: RunningDaemon, name: str, code: str) -> None:
    with unix_connect(daemon.url.removeprefix("unix://"), path_of(name)) as socket:
        socket.send(message(Kind.REQUEST, {"args": ["true"]}))

        assert refusal(socket)["code"] == code


def test_a_client_that_says_nothing_is_let_go(
    monkeypatch: pytest.MonkeyPatch, daemon: RunningDaemon
) -> None:
    monkeypatch.setattr(daemon_exec, "FIRST_MESSAGE_TIMEOUT_S", 0.01)

    with unix_connect(daemon.url.removeprefix("unix://"), path_of(UNKNOWN)) as silent:
        assert refusal(silent)["code"] == "engine_timeout"


def test_the_token_is_asked_for_before_the_upgrade(daemon: RunningDaemon) -> None:
    url = path_of(UNKNOWN).replace("ws://forkd", daemon.tcp_url.replace("http", "ws"))

    with pytest.raises(InvalidStatus) as caught, connect(url, proxy=None):
        pass

    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body)["code"] == "denied"


def test_output_that_a_program_in_the_background_still_has_is_said_to_be_missing(
    daemon: RunningDaemon, sandbox: SandboxId, socket: ClientConnection
) -> None:
    from forkd import Client  # noqa: PLC0415 - the rest of this file does without

    socket.send(message(Kind.REQUEST, {"args": ["leave"]}))
    while (data := socket.recv(timeout=5, decode=False))[0] != Kind.REPLY:
        pass
    with Client(daemon.url) as client:
        found = client.sandboxes.get(sandbox)
        answered = [found.exec([name]).truncated for name in ("leave", "true")]

    assert json.loads(data[1:])["truncated"] is True
    assert answered == [True, False]


def test_code_is_told_of_line_by_line_and_its_end_comes_last(
    evaluating: ClientConnection,
) -> None:
    evaluating.send(message(Kind.REQUEST, {"code": "print('a')\nprint('b')\n1"}))

    said = [evaluating.recv(timeout=5, decode=False) for _ in range(3)]
    assert [each[0] for each in said] == [Kind.STDOUT, Kind.STDOUT, Kind.REPLY]
    assert [each[1:] for each in said[:2]] == [b"a\n", b"b\n"]
    reply = json.loads(said[2][1:])
    assert (reply["value"], reply["stdout"], reply["stderr"]) == (1, "", "")
    with pytest.raises(ConnectionClosed):
        evaluating.recv(timeout=5)


@pytest.mark.parametrize(
    ("first", "complaint"),
    [
        (message(Kind.STDIN), "must be a REQUEST"),
        (message(Kind.REQUEST, {"args": ["true"]}), "code"),
        (message(Kind.REQUEST, {"code": "1", "env": {"A": 1}}), "env"),
        (message(Kind.REQUEST, {"code": "1", "runtime": "node"}), "no runtime 'node'"),
    ],
)
def test_code_that_cannot_be_evaluated_is_refused(
    evaluating: ClientConnection, first: bytes, complaint: str
) -> None:
    evaluating.send(first)

    assert complaint in refusal(evaluating)["error"]


def test_a_client_that_speaks_or_leaves_interrupts_its_code(
    evaluating: ClientConnection, daemon: RunningDaemon
) -> None:
    daemon.service.eval_goes_on.clear()
    evaluating.send(message(Kind.REQUEST, {"code": "print('a')\nprint('b')"}))
    assert evaluating.recv(timeout=5, decode=False)[0] == Kind.STDOUT

    evaluating.send(message(Kind.STDIN))

    assert "does not send STDIN" in refusal(evaluating)["error"]
    daemon.wait_for(lambda: daemon.service.eval_left)


def test_a_result_that_is_too_long_for_a_message_says_what_it_left_out(
    evaluating: ClientConnection,
) -> None:
    code = f"class Page:\n def _repr_html_(self): return 'x' * {MESSAGE_BYTES_MAX}\nPage()"
    evaluating.send(message(Kind.REQUEST, {"code": code}))

    reply = json.loads(evaluating.recv(timeout=5, decode=False)[1:])
    assert (reply["results"], reply["more_results"]) == ([], 1)
