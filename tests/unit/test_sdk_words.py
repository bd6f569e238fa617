"""Words and names of any bytes through the SDK, those that cannot be, and files that break off.

Checked in one flavour: the requests are the same in both.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from forkd import Client
from forkd.errors import EngineExited, InvalidRequest
from forkd.model.sandbox import SandboxState
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk import Sandbox
    from tests.support.daemon import RunningDaemon


@pytest.fixture
def sandbox(daemon: RunningDaemon) -> Iterator[Sandbox]:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        yield client.fork("warm")[0]


def test_names_and_words_that_are_no_text_arrive_as_they_are(
    sandbox: Sandbox, daemon: RunningDaemon
) -> None:
    path = os.fsdecode(b"/tmp/caf\xe9")
    sandbox.files.write(path, b"x")

    assert sandbox.files.read(path) == b"x"
    entry = sandbox.files.stat(path)
    assert (entry.name, entry.name_b64) == (os.fsdecode(b"caf\xe9"), "Y2Fm6Q==")
    assert json.loads(entry.model_dump_json())["name"] == "caf\ufffd"
    assert path in [f"/tmp/{each.name}" for each in sandbox.files.list("/tmp")]
    sandbox.files.move(path, "/tmp/plain")
    assert sandbox.files.exists("/tmp/plain")
    assert not sandbox.files.exists(path)

    sandbox.exec(["echo", "\udcff"], env={"V": "\udce9"}, cwd=path)
    asked = daemon.service.execs[-1].request
    assert (asked.args, asked.env, asked.cwd) == (("echo", "\udcff"), {"V": "\udce9"}, path)
    with sandbox.exec_stream(["echo", "\udcfe"]) as process:
        assert list(process)
    assert daemon.service.execs[-1].request.args == ("echo", "\udcfe")


TOO_LONG = "131072 bytes; at most 131071 .*`stdin`, or as a file by `files.write`"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": ["sh", "-c", "x" * 131_072]}, f"args.2.*{TOO_LONG}"),
        ({"args": ["true"], "env": {"V": "x" * 131_072}}, f"env.V.*{TOO_LONG}"),
        ({"args": ["true"], "env": {"V": "x" * 131_070}}, f"env.*{TOO_LONG}"),
        ({"args": ["x"] * 4_097}, "args.*4097 arguments; at most 4096 .*`stdin`"),
        ({"args": ["true", *["x" * 100_000] * 6]}, "600004 bytes together.*`files.write`"),
        ({"args": ["a\0b"]}, "args.0.*NUL"),
        ({"args": ["\ud800"]}, "args.0.*surrogate"),
        ({"args": ["true"], "cwd": "/\ud800"}, "cwd.*surrogate"),
        ({"args": ["true"], "user": "\udcff"}, "user"),
    ],
)
def test_words_that_cannot_be_are_named_with_the_way_out(
    sandbox: Sandbox, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        sandbox.exec(**options)

    assert (sandbox.exec(["echo", "hi"])).exit_code == 0


@pytest.mark.parametrize("path", ["/tmp/\ud800", "/tmp/a\0b", "/" + "x" * 5_000])
def test_paths_that_cannot_be_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(InvalidRequest, match="path"):
        sandbox.files.read(path)
    with pytest.raises(InvalidRequest, match="path"):
        sandbox.files.make_dir(path)


def test_code_that_is_no_unicode_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequest, match="code"):
        sandbox.eval("x = '\udcff'")

    assert (sandbox.eval("1 + 1")).value == 2


def test_a_file_that_breaks_off_says_why_the_sandbox_ended(
    sandbox: Sandbox, daemon: RunningDaemon
) -> None:
    sandbox.files.write("/tmp/x", b"x" * 100_000)
    guest = next(iter(daemon.service.running.values()))
    guest.sandbox = replace(guest.sandbox, state=SandboxState.EXITED, exit_reason="ttl")

    with pytest.raises(EngineExited, match=f"sandbox {sandbox.id} has exited: ttl"):
        sandbox.files.read("/tmp/x")
