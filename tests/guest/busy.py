"""A program in the middle of many things at once, which can tell whether any of them was disturbed.

    python3 busy.py FOLDER        work until somebody writes to FOLDER/stop, then say what was done
    python3 busy.py serve         be the other end of its connection

Threads compute over a board of pages, write a file, read a file, write and read one that has no
name any more, count in a file that is mapped, and talk to another process over TCP, with messages
in flight at any time.  All that they do follows from a secret that is in memory only and from how
many steps they have made.  So whoever hears both in the end knows what must have come out; a step
that was lost, repeated or torn shows, there or at once.

It is also a module: the tests compute with it what an undisturbed program has.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

PACE_S = 0.3
"""Rest after each step, so that a whole tree of these leaves room for who looks at them."""

PAGE_BYTES = 4096
BOARD_PAGES = 256
STEP_PAGES = 2
FLUSH_STEPS = 8
READ_BYTES = 1000
READ_FILE_BYTES = 100 * READ_BYTES + 1
SLOTS = 64
PATIENCE_S = 60
WINDOW = 16
"""Most messages that were sent and not answered."""

HEAD = struct.Struct("<Q32s")
BODY_BYTES = 2000
ANSWER = struct.Struct("<Q32s")
COUNTER = struct.Struct("<Q")
PARTS = ("left", "right", "writer", "reader", "ghost", "sender", "answers")


def fill(seed: bytes, size: int) -> bytes:
    """Return `size` bytes that nobody guesses without `seed`."""
    return hashlib.shake_128(seed).digest(size)


def link(chain: bytes, number: int) -> bytes:
    """Return the next link of a chain."""
    return hashlib.sha256(chain + COUNTER.pack(number)).digest()


class Computer:
    """A computation whose every step depends on all before, and on pages written long ago."""

    def __init__(self, seed: bytes) -> None:
        self.steps = 0
        self.chain = seed
        self.board = bytearray(fill(seed, BOARD_PAGES * PAGE_BYTES))

    def step(self) -> int:
        """Hash some pages, and fill others that the hash names."""
        for page in range(self.steps * STEP_PAGES, (self.steps + 1) * STEP_PAGES):
            at = page % BOARD_PAGES * PAGE_BYTES
            self.chain = hashlib.sha256(self.chain + self.board[at : at + PAGE_BYTES]).digest()
            to = self.chain[0] % BOARD_PAGES * PAGE_BYTES
            self.board[to : to + PAGE_BYTES] = fill(self.chain, PAGE_BYTES)
        self.steps += 1
        return self.steps

    def digest(self) -> str:
        """Return what says all of it."""
        return hashlib.sha256(self.chain + self.board).hexdigest()


class Writer:
    """A file that grows by numbered lines, the last of them in this process's buffer."""

    def __init__(self, seed: bytes, path: Path) -> None:
        self.steps = 0
        self.chain = seed
        self.file = path.open("w")

    def step(self) -> int:
        """Write a line; hand some to the kernel now and then."""
        self.chain = link(self.chain, self.steps)
        self.file.write(f"{self.steps} {self.chain.hex()}\n")
        self.steps += 1
        if self.steps % FLUSH_STEPS == 0:
            self.file.flush()
        return self.steps

    @staticmethod
    def expected(seed: bytes, steps: int) -> str:
        """Return what is in the file after so many steps."""
        lines = []
        for number in range(steps):
            seed = link(seed, number)
            lines.append(f"{number} {seed.hex()}\n")
        return "".join(lines)


class Reader:
    """A file that is read again and again; only the kernel knows how far."""

    def __init__(self, seed: bytes, path: Path) -> None:
        self.steps = 0
        self.contents = fill(seed, READ_FILE_BYTES)
        path.write_bytes(self.contents)
        self.file = path.open("rb", buffering=0)

    def step(self) -> int:
        """Read on, or begin anew at the end."""
        turns = len(self.contents) // READ_BYTES + 1
        at = self.steps % turns * READ_BYTES
        expect(self.file.tell() == at, f"the file is not at {at}")
        piece = self.contents[at : at + READ_BYTES]
        expect(self.file.read(READ_BYTES) == piece, f"something else was read at {at}")
        if at + len(piece) == len(self.contents):
            self.file.seek(0)
        self.steps += 1
        return self.steps


class Ghost:
    """A file that has no name any more."""

    def __init__(self, seed: bytes, path: Path) -> None:
        self.steps = 0
        self.seed = seed
        self.file = path.open("w+b", buffering=0)
        path.unlink()

    def step(self) -> int:
        """Write one slot, and look at another."""
        self._seek(self.steps)
        self.file.write(self._record(self.steps))
        self.steps += 1
        oldest = max(0, self.steps - SLOTS)
        self._check(oldest + self.steps * 7 % (self.steps - oldest))
        return self.steps

    def check(self) -> None:
        """Look at every slot."""
        for number in range(max(0, self.steps - SLOTS), self.steps):
            self._check(number)

    def _check(self, number: int) -> None:
        self._seek(number)
        found = self.file.read(PAGE_BYTES)
        expect(found == self._record(number), f"slot of {number} holds something else")

    def _seek(self, number: int) -> None:
        self.file.seek(number % SLOTS * PAGE_BYTES)

    def _record(self, number: int) -> bytes:
        return fill(link(self.seed, number), PAGE_BYTES)


class Caller:
    """A connection to another process, which answers each message once and in order."""

    def __init__(self, seed: bytes) -> None:
        self.sent = self.answered = 0
        self.sent_chain = self.answered_chain = seed
        self.window = threading.Semaphore(WINDOW)
        self.closed = threading.Event()
        command = [sys.executable, __file__, "serve", seed.hex()]
        self.server = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603 - ours
        port = int(self._heard())
        self.peer = socket.create_connection(("127.0.0.1", port))

    def send(self) -> int:
        """Send a message, once there are not too many under way."""
        expect(self.window.acquire(timeout=PATIENCE_S), "there is no answer")
        self.sent_chain = link(self.sent_chain, self.sent)
        self.peer.sendall(message(self.sent_chain, self.sent))
        self.sent += 1
        return self.sent

    def listen(self) -> int:
        """Take the next answer, or hear that there are no more."""
        if data := receive(self.peer, ANSWER.size):
            self.answered_chain = link(self.answered_chain, self.answered)
            expected = ANSWER.pack(self.answered, self.answered_chain)
            expect(data == expected, f"this is not the answer to {self.answered}")
            self.answered += 1
            self.window.release()
        else:
            self.closed.set()
        return self.answered

    def hang_up(self) -> None:
        """Say that there are no more messages; the server answers the last ones."""
        self.peer.shutdown(socket.SHUT_WR)

    def served(self) -> int:
        """Return how many messages the server has had, once it has ended."""
        count = int(self._heard())
        expect(self.server.wait() == 0, "the server has failed")
        return count

    def _heard(self) -> bytes:
        assert self.server.stdout is not None
        return self.server.stdout.readline()


def message(chain: bytes, number: int) -> bytes:
    """Return the message `number`."""
    return HEAD.pack(number, chain) + fill(chain, BODY_BYTES)


def serve(chain: bytes) -> None:
    """Answer one connection until its end; fail at a message that is not the next one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)  # noqa: T201 - read by `Caller`
        peer, _ = listener.accept()
    number, size = 0, HEAD.size + BODY_BYTES
    with peer:
        while data := receive(peer, size):
            chain = link(chain, number)
            expect(data == message(chain, number), f"another message than {number} has come")
            peer.sendall(ANSWER.pack(number, chain))
            number += 1
    print(number, flush=True)  # noqa: T201 - read by `Caller`


def receive(peer: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes; fewer if there are no more."""
    data = b""
    while len(data) < size and (piece := peer.recv(size - len(data))):
        data += piece
    return data


def expect(true: bool, otherwise: str) -> None:  # noqa: FBT001 - a condition
    """Raise if something is not as it must be."""
    if not true:
        raise AssertionError(otherwise)


class Busy:
    """All of it at once, in a folder that is made for it."""

    def __init__(self, folder: str) -> None:
        self.secret = secrets.token_bytes(32)
        self.errors: list[str] = []
        self.stopping = threading.Event()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        seeds = {name: seed_of(self.secret, name) for name in PARTS}
        self.left, self.right = Computer(seeds["left"]), Computer(seeds["right"])
        self.writer = Writer(seeds["writer"], path / "written")
        self.reader = Reader(seeds["reader"], path / "read")
        self.ghost = Ghost(seeds["ghost"], path / "ghost")
        self.caller = Caller(seeds["sender"])
        self.counters = mapped(path / "counters", len(PARTS) * COUNTER.size)
        steps = (
            *(self.left.step, self.right.step, self.writer.step, self.reader.step),
            *(self.ghost.step, self.caller.send, self.caller.listen),
        )
        self.threads = [
            threading.Thread(target=self._go_on, args=(index, step), daemon=True)
            for index, step in enumerate(steps)
        ]
        for each in self.threads:
            each.start()

    def _go_on(self, index: int, step: Callable[[], int]) -> None:
        name = PARTS[index]
        until = self.caller.closed if name == "answers" else self.stopping
        rest_s = 0.0 if name == "sender" else PACE_S  # so that many messages are under way
        try:
            while not until.is_set():
                COUNTER.pack_into(self.counters, index * COUNTER.size, step())
                until.wait(rest_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self.errors.append(f"{name}: {error!r}")

    def stop(self) -> dict[str, object]:
        """End all of it; return what was done."""
        self.stopping.set()
        *threads, listener = self.threads
        for each in threads:
            each.join()
        self.caller.hang_up()
        listener.join()
        self.ghost.check()
        self.writer.file.close()
        return {
            "secret": self.secret.hex(),
            "pid": os.getpid(),
            "errors": self.errors,
            "left": [self.left.steps, self.left.digest()],
            "right": [self.right.steps, self.right.digest()],
            "written": self.writer.steps,
            "messages": [self.caller.sent, self.caller.answered, self.caller.served()],
            "counted": [number for (number,) in COUNTER.iter_unpack(self.counters)],
        }


def seed_of(secret: bytes, part: str) -> bytes:
    """Return what one part of the program begins with."""
    return hashlib.sha256(secret + part.encode()).digest()


def mapped(path: Path, size: int) -> mmap.mmap:
    """Return a file of zeroes, mapped; whoever reads it sees what is written to the memory."""
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def main() -> None:
    """Be one of the two processes."""
    if sys.argv[1] == "serve":
        serve(bytes.fromhex(sys.argv[2]))
        return
    folder = Path(sys.argv[1])
    os.mkfifo(folder / "stop")
    busy = Busy(str(folder))
    print("begun", flush=True)  # noqa: T201 - somebody waits for it
    (folder / "stop").read_bytes()
    (folder / "report.json").write_text(json.dumps(busy.stop()))


if __name__ == "__main__":
    main()
