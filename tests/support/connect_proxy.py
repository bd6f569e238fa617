"""A proxy of an operator: takes CONNECT, says what it was asked, and passes bytes on."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.outside import DEADLINE_S, listening

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.namespaces import Namespace


@dataclass
class ConnectProxy:
    """What it was asked, with which credentials, and what it answers."""

    asked: list[str] = field(default_factory=list)
    credentials: list[str] = field(default_factory=list)
    status: str = "200 Connection established"


@contextlib.contextmanager
def connect_proxy(namespace: Namespace, address: str, port: int) -> Iterator[ConnectProxy]:
    """Be a proxy at an address of a namespace within the block."""
    proxy = ConnectProxy()
    listener = namespace.run(lambda: listening(address, port))
    listener.settimeout(None)
    threads: list[threading.Thread] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                work = threading.Thread(
                    target=namespace.run, args=(lambda a=accepted: _lead(proxy, a),)
                )
                work.start()
                threads.append(work)

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield proxy
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()
        for each in threads:
            each.join()


def _lead(proxy: ConnectProxy, client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        client.settimeout(DEADLINE_S)
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(4_096)
        lines = head.decode().split("\r\n")
        target = lines[0].split()[1]
        proxy.asked.append(target)
        for line in lines[1:]:
            name, _, value = line.partition(": ")
            if name == "Proxy-Authorization":
                proxy.credentials.append(value)
        client.sendall(f"HTTP/1.1 {proxy.status}\r\n\r\n".encode())
        if not proxy.status.startswith("200"):
            return
        address, _, port = target.rpartition(":")
        with socket.create_connection((address.strip("[]"), int(port)), DEADLINE_S) as server:
            back = threading.Thread(target=_pump, args=(server, client))
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
