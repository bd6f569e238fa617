"""The client alone, from the pure wheel, on every Python that it is for.

Each Python installs the wheel without extras into an environment of its own, and drives a daemon
over TCP with TLS and a token.  No module that only Unix has can be imported there, as on Windows.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from forkd import installed
from tests.support import certificates, pythons, remote_client
from tests.support.fake_daemon import FakeDaemon
from tests.support.pythons import VERSIONS
from tests.support.wheels import built

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from tests.support.pythons import Python
    from tests.support.service_host import FakeHost

pytestmark = [
    pytest.mark.needs("network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(900),
]

CONVERSATION = {
    "run": ["hello\n", "hello\n"],
    "exit": 3,
    "raised": 3,
    "streamed": "typed",
    "eval": 42,
    "read": "text",
    "listed": True,
    "exists": False,
    "killed": True,
    "gone": True,
    "left": 0,
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("pure", tmp_path_factory.mktemp("pure"))


@dataclass(frozen=True, slots=True)
class Client:
    """An environment with the client, and where the daemon is.

    Attributes:
        python: The Python of which it is.
        folder: Where it is.
        environment: What it is told.
    """

    python: Python
    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the program of a client."""
        program = self.folder / "remote_client.py"
        return self.python.run([self.folder / "venv/bin/python", program, *words], self.environment)

    def forkd(self, *words: str) -> str:
        """Run a command; return what it prints."""
        done = self.run("cli", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(
    params=[pytest.param(each, marks=pytest.mark.needs(f"python{each}")) for each in VERSIONS]
)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def client(version: str, wheel: Path, fake_host: FakeHost) -> Iterator[Client]:
    """Serve a daemon, and install the client in an environment of a Python."""
    ca = certificates.root()
    with (
        tempfile.TemporaryDirectory(prefix="fk-py-", dir="/tmp") as made,
        pythons.python(version, Path(made)) as python,
    ):
        folder = Path(made) / "shared"
        folder.mkdir(exist_ok=True)
        tls = ca.sign("server").write(fake_host.folder, "server")
        ca_file, _ = ca.write(folder, "ca")
        shutil.copy(remote_client.__file__, folder)
        copied = shutil.copy(wheel, folder)
        pip = str(folder / "venv/bin/pip")
        for words in (
            [python.path, "-m", "venv", str(folder / "venv")],
            [pip, "install", "-q", "--no-cache-dir", str(copied)],
        ):
            done = python.run(words)
            assert done.returncode == 0, done.stdout + done.stderr
        with FakeDaemon(fake_host, tcp=True, tls=tls) as daemon:
            body = {"tag": remote_client.TAG, "recipe": str(fake_host.recipe())}
            assert daemon.http.post("/v2/snapshots", json=body).status_code == 201
            asked = {"name": "remote", "scopes": ["read", "run"]}
            token = daemon.http.post("/v2/tokens", json=asked)
            assert token.status_code == 201, token.text
            environment = {
                "FORKD_URL": daemon.tcp_url,
                "FORKD_TOKEN": token.json()["token"],
                "FORKD_CA_FILE": str(ca_file),
                "HOME": str(folder),
            }
            yield Client(python, folder, environment)
            assert json.loads(daemon.http.get("/v2/sandboxes").text) == []
    assert fake_host.left_over() == []


def test_the_client_alone_drives_a_remote_daemon_without_unixs_modules(
    client: Client, version: str
) -> None:
    done = client.run("sdk")
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)

    assert (seen["python"], seen["names"], seen["needless"]) == (version, True, [])
    assert seen["where"].startswith(str(client.folder / "venv/lib"))
    url = client.environment["FORKD_URL"]
    assert url.startswith("https://127.0.0.1:")
    assert seen["sync"] == CONVERSATION | {"url": url}
    assert seen["async"] == CONVERSATION | {"url": url}
    assert seen["unix"] == []

    (sandbox,) = client.forkd("fork", remote_client.TAG).split()
    listed = json.loads(client.forkd("ls", "--json"))
    assert [each["id"] for each in listed] == [sandbox]
    assert client.forkd("exec", sandbox, "--", "echo", "hello") == "hello\n"
    assert client.forkd("eval", sandbox, "40 + 2") == "42\n"
    assert client.forkd("run", remote_client.TAG, "--", "echo", "again") == "again\n"
    tags = json.loads(client.forkd("snapshot", "ls", "--json"))
    assert [each["tag"] for each in tags] == [remote_client.TAG]
    assert "Kernel" in client.forkd("host", "show")
    client.forkd("kill", sandbox)

    refused = client.run("cli", "up")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 2)
    assert f"this command needs Python's module {installed.UNIX_MODULES[0]}" in refused.stderr
