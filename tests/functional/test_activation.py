"""A service manager's sockets are served, outlive the daemon, and are refused if they are wrong."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from forkd.host import activation
from tests.support.daemon_program import PROGRAMS, bare_environment, environment_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.service_host import FakeHost

TAKE = "from forkd.host import activation; print([each.name for each in activation.take()])"


def started(
    command: list[str], files: list[int], names: str, environment: dict[str, str], **more: str
) -> subprocess.Popen[str]:
    """Start a program as a service manager does: its descriptors from 3 on are these."""
    # Descriptors go up in two steps, so that none is overwritten before it is moved.
    away = " ".join(f"{20 + at}<&{number}" for at, number in enumerate(files))
    back = " ".join(f"{3 + at}<&{20 + at} {20 + at}<&-" for at in range(len(files)))
    script = f'{f"exec {away}; exec {back}; " if files else ""}LISTEN_PID=$$ exec "$@"'
    said = {"LISTEN_FDS": str(len(files)), "LISTEN_FDNAMES": names}
    return subprocess.Popen(  # noqa: S603 - a test's own
        ["bash", "-c", script, "bash", *command],  # noqa: S607 - the host's
        env={**environment, **said, **more},
        pass_fds=files,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def taken(files: list[int], names: str, **more: str) -> tuple[str, str]:
    environment = {**bare_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TAKE]
    with started(command, files, names, environment, **more) as program:
        said, wrong = program.communicate(timeout=30)
    return said.strip(), wrong


@contextlib.contextmanager
def unix(path: Path, kind: int = socket.SOCK_STREAM, *, listens: bool = True) -> Iterator[int]:
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        if listens:
            sock.listen()
        yield sock.fileno()


def test_what_is_handed_over_is_taken_by_the_process_that_it_is_for(tmp_path: Path) -> None:
    with unix(tmp_path / "a") as one, unix(tmp_path / "b") as other:
        assert taken([one, other], "a:b")[0] == "['a', 'b']"
        assert taken([one], "")[0] == "['unknown']"
        assert taken([], "")[0] == "[]"


def test_what_is_for_another_process_is_left_alone_and_not_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("LISTEN_FDS", "1"), ("LISTEN_PID", "1"), ("LISTEN_FDNAMES", "a")):
        monkeypatch.setenv(name, value)

    assert activation.take() == []

    assert not {"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"} & os.environ.keys()


def test_what_cannot_be_served_is_refused_by_its_name_and_kind(tmp_path: Path) -> None:
    pair = socket.socketpair()
    with (
        unix(tmp_path / "a", socket.SOCK_DGRAM, listens=False) as packets,
        unix(tmp_path / "b", listens=False) as deaf,
        unix(tmp_path / "c", socket.SOCK_SEQPACKET) as sequence,
        (tmp_path / "file").open("w") as file,
        socket.socket(socket.AF_UNIX) as abstract,
        contextlib.closing(pair[0]) as connected,
        contextlib.closing(pair[1]),
    ):
        abstract.bind(f"\0{tmp_path}")
        abstract.listen()
        numbers = [packets, deaf, sequence, *(f.fileno() for f in (file, abstract, connected))]
        refusals = [taken([number], "it")[1] for number in numbers]
    problems = [
        "is a datagram socket", "does not listen", "is a socket of packets in sequence",
        "is no socket", "is in the abstract namespace", "does not listen",
    ]  # fmt: skip
    for refusal, problem in zip(refusals, problems, strict=True):
        assert (
            f"InvalidRequest: the service manager's socket it (descriptor 3) {problem}" in refusal
        )


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"LISTEN_FDS": "many"}, "LISTEN_FDS is 'many': must be a number from 0 to 16"),
        ({"LISTEN_FDS": "17"}, "LISTEN_FDS is '17': must be a number from 0 to 16"),
        ({"LISTEN_FDNAMES": "a:b"}, "LISTEN_FDNAMES has 2 names, and LISTEN_FDS is 1"),
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}, "socket b (descriptor 4) is not open"),
    ],
)
def test_variables_that_make_no_sense_are_refused(
    tmp_path: Path, variables: dict[str, str], problem: str
) -> None:
    with unix(tmp_path / "a") as one:
        assert problem in taken([one], "a", **variables)[1]


class Daemon:
    """`forkd-daemon` with sockets of a manager."""

    def __init__(self, host: FakeHost, files: list[int], names: str) -> None:
        environment = environment_of(host) | {"FORKD_SOCKET": "/nowhere/forkd.sock"}
        command = [str(PROGRAMS / "forkd-daemon"), "serve"]
        self.process = started(command, files, names, environment)
        assert self.process.stdout is not None
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")

    def end(self, *, kill: bool = False) -> tuple[int, str]:
        if kill:
            self.process.kill()
        else:
            self.process.terminate()
        _, wrong = self.process.communicate(timeout=30)
        return self.process.returncode, wrong


def get(path: Path, url: str = "http://forkd/readyz") -> int:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
        return client.get(url).status_code


def test_a_request_made_while_no_daemon_runs_is_answered_by_the_next(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    path = tmp_path / "given.sock"
    with unix(path) as ours, socket.create_server(("127.0.0.1", 0)) as tcp:
        port = tcp.getsockname()[1]
        files = [ours, tcp.fileno()]
        first = Daemon(fake_host, files, "forkd.socket:forkd-tcp.socket")
        assert first.said["urls"] == [f"unix://{path}", f"http://127.0.0.1:{port}"]
        assert get(path) == 200
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        assert httpx.get(f"http://127.0.0.1:{port}/v2/sandboxes").status_code == 401

        for kill in (True, False):
            status, wrong = first.end(kill=kill)
            assert status == (-9 if kill else 0), wrong
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b"GET /readyz HTTP/1.1\r\nHost: forkd\r\n\r\n")
                first = Daemon(fake_host, files, "forkd.socket:forkd-tcp.socket")
                client.settimeout(60)
                assert client.recv(12) == b"HTTP/1.1 200"

        status, wrong = first.end()
        assert (status, path.is_socket()) == (0, True)
        assert "the service manager's socket is served, not that of a setting" in wrong


def test_a_daemon_with_two_sockets_of_one_kind_does_not_start(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    with unix(tmp_path / "a") as one, unix(tmp_path / "b") as other:
        daemon = Daemon(fake_host, [one, other], "a.socket:b.socket")
        _, wrong = daemon.process.communicate(timeout=30)

    assert daemon.process.returncode == 2
    assert "handed over two sockets of one kind, a.socket and b.socket" in wrong
    assert wrong.count("\n") == 1
