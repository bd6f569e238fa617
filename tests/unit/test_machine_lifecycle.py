"""Where a daemon runs follows from what was tried, and what was started is found again."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.errors import EngineError, HostError, NotFound
from forkd.host.sockets import PATH_BYTES_MAX
from forkd.machine import Machine, build, lifecycle
from forkd.machine.health import why_unwell
from forkd.machine.process import ProcessId
from forkd.service.settings import LONGEST_SOCKET_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator


NO_RUN_DIR = Path(f"/run/fk-never-{os.getpid()}")
"""A run folder that nobody makes; of a short path, as each must be."""


def us() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def daemon(tmp_path: Path, *, mode: lifecycle.Mode = "helper") -> lifecycle.RunningDaemon:
    return lifecycle.RunningDaemon("http://127.0.0.1:1", tmp_path / "token", mode, us())


@pytest.mark.parametrize(
    ("is_root", "native", "jail", "mode", "says"),
    [
        (True, None, None, "native", "runs a test guest"),
        (False, None, None, "native", "without root"),
        (False, None, "no user namespaces", "helper", "without root, no user namespaces"),
        (True, "it is PVM", None, "helper", "it is PVM"),
        (False, "it is PVM", None, "helper", "it is PVM"),
    ],
)
def test_machines_run_on_this_host_where_its_kvm_runs_a_guest_and_they_can_be_jailed(
    is_root: bool,  # noqa: FBT001 - a parameter of the test
    native: str | None,
    jail: str | None,
    mode: str,
    says: str,
) -> None:
    found, why = lifecycle.choose_mode(is_root=is_root, native=native, jail=jail)

    assert found == mode
    assert says in why


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo \'{"event":"jailed","keeps_signals":true}\'', None),
        (
            'echo \'{"event":"failed","message":"no user namespace"}\' >&2; exit 1',
            "machines cannot be jailed: no user namespace",
        ),
        ("exit 3", "trying a jail failed"),
        ("echo 7", "trying a jail failed"),
    ],
)
def test_why_machines_cannot_be_jailed_is_what_the_vmm_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str | None
) -> None:
    vmm = tmp_path / "vmm"
    vmm.write_text(f"#!/bin/sh\n{script}\n")
    vmm.chmod(0o755)
    monkeypatch.setenv("FORKD_VMM", str(vmm))

    said = lifecycle.why_no_jail()

    assert (said is None) == (reason is None)
    assert (reason or "") in (said or "")


def test_the_longest_run_folder_leaves_room_for_the_names_of_sockets() -> None:
    assert PATH_BYTES_MAX - len(f"/{LONGEST_SOCKET_NAME}") == lifecycle.RUN_DIR_BYTES_MAX


def test_a_daemon_that_was_published_is_found(tmp_path: Path) -> None:
    lifecycle.publish(tmp_path, daemon(tmp_path))

    assert lifecycle.find(tmp_path) == daemon(tmp_path)
    assert (tmp_path / "endpoint.json").stat().st_mode & 0o777 == 0o600


def test_a_daemon_whose_process_is_another_now_is_not_found(tmp_path: Path) -> None:
    lifecycle.publish(tmp_path, daemon(tmp_path))
    said = json.loads((tmp_path / "endpoint.json").read_text())
    said["start_ticks"] += 1
    (tmp_path / "endpoint.json").write_text(json.dumps(said))

    with pytest.raises(NotFound, match="has ended"):
        lifecycle.find(tmp_path)


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_a_folder_without_a_daemon_is_not_one(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "endpoint.json").write_text(text)

    with pytest.raises(NotFound):
        lifecycle.find(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x"}', "\0"])
def test_a_damaged_record_of_a_machine_is_none_and_down_removes_it(
    tmp_path: Path, text: str
) -> None:
    """A crash of the host can leave the file empty."""
    folder = tmp_path / "machine"
    folder.mkdir()
    (folder / "machine.json").write_text(text)
    (folder / "token").write_text("token")

    with pytest.raises(NotFound):
        Machine.attach(folder)
    assert lifecycle.down(tmp_path) is False
    assert not (folder / "machine.json").exists()


@contextlib.contextmanager
def answering(folder: Path, status: str) -> Iterator[str]:
    """Serve one HTTP status on a Unix socket; gives its URL."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "served.sock"))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                head = f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode())

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield f"unix://{folder / 'served.sock'}"
        finally:
            server.join()


def test_a_second_up_returns_the_daemon_of_the_first(tmp_path: Path) -> None:
    with answering(tmp_path, "200 OK") as url:
        first = lifecycle.RunningDaemon(url, None, "native", us())
        lifecycle.publish(tmp_path, first)

        assert lifecycle.up(tmp_path, progress=str) == first


def test_up_says_so_when_the_daemon_it_finds_does_not_answer(tmp_path: Path) -> None:
    """A process that lives is not yet a daemon that serves."""
    url = f"unix://{tmp_path / 'nobody.sock'}"
    lifecycle.publish(tmp_path, lifecycle.RunningDaemon(url, None, "native", us()))

    with pytest.raises(HostError, match=f"process {os.getpid()}, does not answer .*forkd down"):
        lifecycle.up(tmp_path, progress=str)


@pytest.mark.parametrize(
    ("status", "reason"), [("200 OK", None), ("503 Service Unavailable", "HTTP status 503")]
)
def test_a_daemon_that_answers_is_well_if_it_says_so(
    tmp_path: Path, status: str, reason: str | None
) -> None:
    with answering(tmp_path, status) as url:
        assert why_unwell(url) == reason


def test_down_of_a_native_daemon_that_has_died_and_left_nothing_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run folder and with users of its own: what other daemons left is not this one's."""
    monkeypatch.setattr(lifecycle, "_run_dir", lambda _: NO_RUN_DIR)
    monkeypatch.setenv("FORKD_BUILD_UID_RANGE", "3500000000:262400")
    lifecycle.publish(tmp_path, daemon(tmp_path, mode="native"))
    said = json.loads((tmp_path / "endpoint.json").read_text())
    (tmp_path / "endpoint.json").write_text(json.dumps(said | {"start_ticks": 0}))
    (tmp_path / "store").mkdir()

    assert lifecycle.down(tmp_path) is False
    assert not (tmp_path / "endpoint.json").exists()


def test_down_where_nothing_was_started_says_so_and_makes_nothing(tmp_path: Path) -> None:
    assert lifecycle.down(tmp_path / "never") is False
    assert not (tmp_path / "never").exists()


def test_what_an_installed_package_has_in_one_folder_is_seen_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (programs.VMM, programs.AGENT):
        (tmp_path / name).touch(mode=0o755)
        monkeypatch.setenv(f"FORKD_{name.removeprefix('forkd-').upper()}", str(tmp_path / name))
    (tmp_path / "recipes").mkdir()
    monkeypatch.setattr(programs, "RECIPES", tmp_path / "recipes")

    folders = lifecycle._folders()  # noqa: SLF001 - what the machine is given

    assert [each for each in folders if each.is_relative_to(tmp_path)] == [tmp_path]
    assert any(Path(sys.prefix).resolve().is_relative_to(each) for each in (*folders, Path("/usr")))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (b'{"event": "failed", "code": "host", "message": "no room"}', "no room (host)"),
        (b"Traceback ...", "Traceback"),
        (b"", "it said nothing"),
    ],
)
def test_a_daemon_that_did_not_start_says_why(output: bytes, message: str) -> None:
    with pytest.raises(EngineError) as caught:
        lifecycle.listening_event(output, b"")

    assert message in str(caught.value)


def test_a_recipe_for_another_daemon_stays_where_it_is(tmp_path: Path) -> None:
    lifecycle.publish(tmp_path, daemon(tmp_path))

    assert build.prepare(tmp_path, "http://elsewhere:1", tmp_path, str) == tmp_path
    assert build.prepare(tmp_path, "http://elsewhere:1", tmp_path / "none", str) == tmp_path


def test_the_image_of_a_recipe_for_our_helper_machine_is_built_here(tmp_path: Path) -> None:
    """Emulated, a build takes about twelve times as long."""
    lifecycle.publish(tmp_path, daemon(tmp_path))
    built: list[Path] = []

    def prepared(recipe: Path | str) -> Path | str:
        return build.prepare(
            recipe, daemon(tmp_path).url, tmp_path, str, build=lambda path, *_: built.append(path)
        )

    assert prepared(tmp_path) == tmp_path
    assert prepared("python-numpy") == programs.RECIPES / "python-numpy"
    assert prepared("of-the-daemon") == "of-the-daemon"
    assert built == [tmp_path, programs.RECIPES / "python-numpy"]


@pytest.mark.parametrize(("system", "machine"), [("Linux", "aarch64"), ("Darwin", "arm64")])
def test_up_on_another_system_or_processor_names_both_and_leaves_nothing(
    system: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    told: list[str] = []

    here = f"this host is {system} on {machine}: set FORKD_URL"
    with pytest.raises(HostError, match=here):
        lifecycle.up(tmp_path / "state", progress=told.append)
    with pytest.raises(HostError, match=here):
        programs.find(programs.VMM)

    assert (told, list(tmp_path.iterdir())) == ([], [])
