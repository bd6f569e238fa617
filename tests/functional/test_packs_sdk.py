"""`snapshots.push` and `snapshots.pull` of both clients, with a registry and with a web server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from forkd import AsyncClient, Client
from forkd.errors import Conflict, InvalidRequest, NotFound, PackError
from forkd.model.ids import Tag
from forkd.packs.keys import Keyring
from tests.support import registry as registries
from tests.support.fake_service import a_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.types import ProgressEvent
    from tests.support.daemon import RunningDaemon
    from tests.support.web import Web

REGISTRY = pytest.mark.needs("docker-registry")
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    with registries.running(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(autouse=True)
def _own_keys_and_one_snapshot(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, folder in (("FORKD_KEYS", "keys"), ("DOCKER_CONFIG", "docker")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE", "FORKD_PACKS_URL"):
        monkeypatch.delenv(name, raising=False)
    daemon.service.stored[Tag("numpy")] = a_snapshot("numpy")


@pytest.fixture
def key() -> str:
    """The public key of the user, as hex."""
    return Keyring().new("default").public.hex()


@REGISTRY
def test_a_pack_goes_to_a_registry_and_comes_back(
    daemon: RunningDaemon, server: registries.Registry, key: str
) -> None:
    name = f"{server.host}/team/sdk:1"
    steps: list[ProgressEvent] = []
    with Client(daemon.url) as client:
        pushed = client.snapshots.push("numpy", name, on_progress=steps.append)
        again = client.snapshots.push("numpy", name)
        pulled = client.snapshots.pull(name, "copy", on_progress=steps.append)
        fixed = client.snapshots.pull(f"{server.host}/team/sdk@{pushed.digest}", "fixed")

    assert (pushed.target, pushed.tag, pushed.links) == (name, "numpy", ["base", "numpy"])
    assert pushed.signed_by == pulled.signed_by == fixed.signed_by == key
    assert (pushed.sent_layers, again.sent_layers) == (pushed.layers, 0)
    assert pushed.digest == again.digest
    assert {"copy", "fixed"} <= set(daemon.service.stored)
    assert [step.stage for step in steps][:2] == ["pack", "push"]
    assert steps[-1].stage == "unpack"
    assert all(step.fraction for step in steps[2:] if step.stage == "push")
    assert [step.stage for step in steps].count("push") == 1 + (pushed.layers or 0)


@REGISTRY
@pytest.mark.asyncio
async def test_the_asynchronous_client_does_the_same(
    daemon: RunningDaemon, server: registries.Registry, key: str
) -> None:
    name = f"{server.host}/team/async:1"
    async with AsyncClient(daemon.url) as client:
        pushed = await client.snapshots.push("numpy", f"oci://{name}")
        pulled = await client.snapshots.pull(name, "copy")

        with pytest.raises(NotFound, match="no such repository or tag"):
            await client.snapshots.pull(f"{server.host}/team/none:1")

    assert pushed.target == name
    assert pulled.signed_by == key
    assert Tag("copy") in daemon.service.stored


@REGISTRY
def test_who_signed_a_pack_decides(daemon: RunningDaemon, server: registries.Registry) -> None:
    name = f"{server.host}/team/unsigned:1"
    with Client(daemon.url) as client:
        with pytest.raises(NotFound, match="forkd key new default"):
            client.snapshots.push("numpy", name)
        assert client.snapshots.push("numpy", name, key=None).signed_by is None
        with pytest.raises(PackError, match="not signed"):
            client.snapshots.pull(name, "copy")
        assert Tag("copy") not in daemon.service.stored
        pulled = client.snapshots.pull(name, "copy", allow_unsigned=True)

        public = Keyring().new("other").public
        client.snapshots.push("numpy", name, key="other")
        Keyring().remove("other")
        with pytest.raises(PackError, match="not trusted"):
            client.snapshots.pull(name, "trusted")
        trusted = client.snapshots.pull(name, "trusted", trusted=[public])

    assert pulled.signed_by is None
    assert trusted.signed_by == public.hex()


def test_a_server_keeps_versions(daemon: RunningDaemon, web: Web, key: str) -> None:
    with Client(daemon.url) as client:
        first = client.snapshots.push("numpy", web.url("/packs/"))
        second = client.snapshots.push("numpy", web.url("/packs/"), version="1.4")
        alone = client.snapshots.push("numpy", web.url("/x.forkpack"))
        with pytest.raises(Conflict):
            client.snapshots.push("numpy", web.url("/packs/"), version="1.4")
        by_url = client.snapshots.pull(web.url("/packs/numpy@1"), "by-url")
        by_name = client.snapshots.pull("numpy@1.4", "by-name", folder=web.url("/packs/"))

    assert (first.version, second.version, alone.version) == ("1", "1.4", None)
    assert first.digest is not None
    assert (alone.target, alone.digest, alone.layers) == (web.url("/x.forkpack"), None, None)
    assert alone.bytes == alone.sent_bytes == len(web.files["/x.forkpack"])
    assert by_url.signed_by == by_name.signed_by == key
    assert {"by-url", "by-name"} <= set(daemon.service.stored)


@pytest.mark.parametrize(
    ("target", "options", "field"),
    [
        ("127.0.0.1:5/Upper:1", {}, "url"),
        ("127.0.0.1:5/x:1", {"version": "2"}, "version"),
        ("127.0.0.1:5/x:1", {"cosign_key": Path("none")}, "cosign_key"),
        ("http://127.0.0.1:5/x/", {"cosign_key": "x"}, "cosign_key"),
        ("http://127.0.0.1:5/x/", {"plain_http": True}, "plain_http"),
    ],
)
def test_a_wrong_argument_of_a_push_is_named(
    target: str, options: dict[str, Any], field: str, daemon: RunningDaemon
) -> None:
    with Client(daemon.url) as client, pytest.raises(InvalidRequest) as refused:
        client.snapshots.push("numpy", target, **options)

    assert refused.value.context["field"] == field


@pytest.mark.parametrize(
    ("source", "options", "field"),
    [
        ("numpy", {}, "source"),
        ("127.0.0.1:5/Upper:1", {}, "source"),
        ("http://127.0.0.1:5/x/numpy", {"plain_http": True}, "plain_http"),
    ],
)
def test_a_wrong_argument_of_a_pull_is_named(
    source: str, options: dict[str, Any], field: str, daemon: RunningDaemon
) -> None:
    with Client(daemon.url) as client, pytest.raises(InvalidRequest) as refused:
        client.snapshots.pull(source, **options)

    assert refused.value.context["field"] == field


class Silent:
    """A registry that takes a request, and closes the connection once it is let go."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(DEADLINE_S)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client:
                client.recv(1 << 16)
                self.asked.set()
                self.let_go.wait(DEADLINE_S)


@pytest.mark.parametrize("direction", ["push", "pull"])
@pytest.mark.asyncio
async def test_a_cancelled_transfer_ends_with_the_request_under_way(
    direction: str, daemon: RunningDaemon
) -> None:
    with Silent() as registry:
        async with AsyncClient(daemon.url) as client:
            name = f"{registry.host}/team/silent:1"
            transfer = asyncio.create_task(
                client.snapshots.push("numpy", name, key=None)
                if direction == "push"
                else client.snapshots.pull(name, "copy")
            )
            assert await asyncio.to_thread(registry.asked.wait, DEADLINE_S)

            transfer.cancel()
            registry.let_go.set()
            with pytest.raises(asyncio.CancelledError):
                await transfer

    assert Tag("copy") not in daemon.service.stored
