"""Debian's docker-registry on a loopback address, with the images that a test puts into it."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.images.manifests import MANIFEST
from forkd.model.reference import parse_reference
from forkd.registry import client, session
from forkd.registry.credentials import Login
from tests.support import oci

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LISTENING = re.compile(r"listening on (127\.0\.0\.1:[0-9]+)")

USER, PASSWORD = "puller", "secret"
HTPASSWD = f"{USER}:$2b$04$4y5DYIFTMkWVavHlI/hOMu7uz81H4JisiSyMxHU8vSJyx5lJ.rBQm\n"
"""The password as bcrypt has it."""

CONFIG = """
version: 0.1
log: {{accesslog: {{disabled: true}}, level: info}}
storage: {{filesystem: {{rootdirectory: {folder}/stored}}, delete: {{enabled: true}}}}
http: {{addr: "127.0.0.1:0"{tls}}}
"""


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry that runs; `host` has its port."""

    host: str
    login: Login | None = None

    def push(self, layout: Path, name: str) -> str:
        """Put the image of a layout in under a name; return the reference of that."""
        reference = f"{self.host}/{name}"
        with self.opened(reference) as registry:
            index = json.loads((layout / "index.json").read_bytes())
            raw = oci.blob_at(layout, index["manifests"][0]["digest"]).read_bytes()
            manifest = json.loads(raw)
            for part in (manifest["config"], *manifest["layers"]):
                registry.put_blob(oci.blob_at(layout, part["digest"]).read_bytes())
            registry.put_manifest(parse_reference(reference).tag or "", raw)
        return reference

    def opened(self, reference: str, media_type: str = MANIFEST) -> client.Registry:
        """Return a client of it, which puts manifests of a type."""

        def failed(fault: session.Fault) -> Exception:
            return AssertionError(fault.text)

        image = parse_reference(reference)
        trust = session.Trust.ANY
        return client.Registry(
            image, "image", (media_type,), self.login, trust=trust, explain=failed
        )


@contextlib.contextmanager
def running(
    folder: Path, *, private: bool = False, tls: tuple[Path, Path] | None = None
) -> Iterator[Registry]:
    """Run a registry for the block.

    Args:
        folder: Where it keeps what it has.
        private: Whether it wants `USER` and `PASSWORD`.
        tls: Its certificate and the key of that; None for plain HTTP.
    """
    spoken = "" if tls is None else f", tls: {{certificate: {tls[0]}, key: {tls[1]}}}"
    config = CONFIG.format(folder=folder, tls=spoken)
    if private:
        (folder / "htpasswd").write_text(HTPASSWD)
        config += f"auth: {{htpasswd: {{realm: test, path: {folder}/htpasswd}}}}\n"
    (folder / "config.yml").write_text(config)
    command = ["docker-registry", "serve", str(folder / "config.yml")]
    with subprocess.Popen(  # noqa: S603 - our own arguments
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, map(LISTENING.search, process.stderr)))
            drain = threading.Thread(target=process.stderr.read, daemon=True)  # or its pipe fills
            drain.start()
            login = Login(USER, PASSWORD, "", "a test") if private else None
            yield Registry(found[1], login)
        finally:
            process.kill()


class Counter:
    """How many bytes clients sent.

    Attributes:
        sent: The number.
        cuts: How many connections are still to be cut.
        cut_at: What their clients get of them, in bytes.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.cuts = 0
        self.cut_at = 0


@contextlib.contextmanager
def counted(registry: Registry) -> Iterator[tuple[str, Counter]]:
    """Give another address of a registry for the block, and count what is sent to it there."""
    counter, host, port = Counter(), *registry.host.split(":")

    def passed_on(source: socket.socket, target: socket.socket, *, counts: bool) -> None:
        got = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                counter.sent += len(data) if counts else 0
                got += len(data)
                if not counts and counter.cuts and got > counter.cut_at:
                    counter.cuts -= 1
                    target.sendall(data[: len(data) - (got - counter.cut_at)])
                    source.shutdown(socket.SHUT_RDWR)
                    break
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def served(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            back = threading.Thread(
                target=passed_on, args=(server, client), kwargs={"counts": False}
            )
            back.start()
            passed_on(client, server, counts=True)
            back.join()

    def accepted() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threads.append(threading.Thread(target=served, args=(client,)))
                threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = threading.Thread(target=accepted)
        acceptor.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", counter
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            acceptor.join()
            for thread in threads:
                thread.join()
