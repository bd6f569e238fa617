"""A pack that was pulled from a registry is forked at once: nothing is built or baked for it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from tests.support import registry as registries
from tests.support.daemon_program import PROGRAMS, bare_environment
from tests.support.real_daemon import running_daemon
from tests.support.real_host import EVAL_TIMEOUT_S, FORK_DEADLINE_S, REAL, RECIPE, STATE_PARENT, TAG

if TYPE_CHECKING:
    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon

pytestmark = [
    REAL,
    pytest.mark.needs("docker-registry"),
    pytest.mark.soak(only=True),  # over the fake VMM: test_packs_registry.py
    pytest.mark.timeout(900),
]

QUESTION = "[int(numpy.arange(10).sum()), open('/root/note').read()]"
ANSWER = [45, "five"]


def test_forks_of_a_pulled_snapshot_answer_in_another_daemon(bakes: Bakes) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="test-pulled-", dir=STATE_PARENT) as name,
        running_daemon(bakes.of(RECIPE)) as here,
        running_daemon() as there,
        registries.running(folder := Path(name)) as registry,
    ):
        pack = f"{registry.host}/team/noted:1"
        with Client(here.url) as client:
            with client.sandbox(TAG, deadline_s=FORK_DEADLINE_S) as source:
                source.files.write("/root/note", "five")
                client.snapshots.link("noted", source.id)
            forkd(folder, here, "key", "new")
            forkd(folder, here, "push", "noted", pack)

        forkd(folder, there, "pull", pack, "--as", "pulled")

        with Client(there.url) as client:
            statuses = {each.tag: each.status for each in client.snapshots.list()}
            *_, last = client.events(0, follow=False)
            with client.fork("pulled", 2, deadline_s=FORK_DEADLINE_S) as sandboxes:
                answers = [each.eval(QUESTION, timeout_s=EVAL_TIMEOUT_S) for each in sandboxes]
            happened = {each.event for each in client.events(last.id, follow=False)}

        assert statuses == {TAG: "ready", "pulled": "ready"}
        assert [each.value for each in answers] == [ANSWER, ANSWER]
        assert happened == {"sandbox.ready", "sandbox.deleted"}, "a snapshot was made"


def forkd(home: Path, daemon: Daemon, *words: str) -> None:
    """Run a command that must succeed, for a user with keys of its own."""
    environment = {**bare_environment(), "HOME": str(home), "FORKD_URL": daemon.url}
    done = subprocess.run(  # noqa: S603 - our own
        [PROGRAMS / "forkd", *words],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
