"""The other end of a connection: frames over a blocking socket, one thread for each."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any

from forkd.engine.frames import Frame, FrameDecoder, Kind, encode_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Members = dict[str, Any]


class Peer:
    """A blocking connection that carries frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._decoder = FrameDecoder()
        self._frames: list[Frame] = []

    def receive(self) -> Frame | None:
        while not self._frames:
            try:
                data = self.sock.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._frames = self._decoder.feed(data)
        return self._frames.pop(0)

    def send(self, kind: Kind, members: Members) -> None:
        self.send_bytes(encode_json(kind, members))

    def send_bytes(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(data)


def serve(path: Path, handle: Callable[[socket.socket], None], backlog: int = 128) -> socket.socket:
    """Call `handle(sock)` in a thread for every connection to `path`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(backlog)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=handle, args=[sock], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener
