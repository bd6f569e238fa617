"""Where a daemon runs follows from what was tried, and what was started is found again."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.errors import EngineError, NotFound
from forkd.machine import build, lifecycle
from forkd.machine.process import ProcessId

if TYPE_CHECKING:
    from pathlib import Path


def us() -> ProcessId:
    found = ProcessId.of(os.getpid())
    assert found is not None
    return found


def daemon(tmp_path: Path, *, mode: lifecycle.Mode = "helper") -> lifecycle.RunningDaemon:
    return lifecycle.RunningDaemon("http://127.0.0.1:1", tmp_path / "token", mode, us())


def test_root_on_a_host_that_runs_guests_needs_no_helper() -> None:
    assert lifecycle.choose_mode(is_root=True, native=None)[0] == "native"


@pytest.mark.parametrize(("is_root", "native"), [(True, "it is PVM"), (False, None), (False, "no")])
def test_everyone_else_gets_the_helper_and_is_told_why(
    is_root: bool,  # noqa: FBT001 - a parameter of the test
    native: str | None,
) -> None:
    mode, why = lifecycle.choose_mode(is_root=is_root, native=native)

    assert mode == "helper"
    assert (native or "root") in why


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


def test_a_second_up_returns_the_daemon_of_the_first(tmp_path: Path) -> None:
    lifecycle.publish(tmp_path, daemon(tmp_path))

    assert lifecycle.up(tmp_path, progress=str) == daemon(tmp_path)


def test_down_where_nothing_was_started_says_so_and_makes_nothing(tmp_path: Path) -> None:
    assert lifecycle.down(tmp_path / "never") is False
    assert not (tmp_path / "never").exists()


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
            recipe, daemon(tmp_path).url, tmp_path, str, build=lambda path, _: built.append(path)
        )

    assert prepared(tmp_path) == tmp_path
    assert prepared("python-numpy") == programs.RECIPES / "python-numpy"
    assert prepared("of-the-daemon") == "of-the-daemon"
    assert built == [tmp_path, programs.RECIPES / "python-numpy"]
