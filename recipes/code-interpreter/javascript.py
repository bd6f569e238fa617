"""A Node.js that runs beside this Python and keeps its state from cell to cell."""

import json
import pathlib
import signal
import socket
import subprocess

PROGRAM = str(pathlib.Path(__file__).parent / "interpreter.js")

INTERRUPT_S, INTERRUPTS_MAX = 3.0, 3
"""How long, and how often, an interrupted cell is waited for; then Node.js is started anew."""

SOCKET_FD = 3
"""The number of the socket in Node.js, which hides from its children what is below 16."""


class JavaScriptError(Exception):
    """A cell of JavaScript has failed; `name` and `stack` are JavaScript's."""

    def __init__(self, name, message, stack):
        super().__init__(f"{name}: {message}")
        self.name = name
        self.message = message
        self.stack = stack


class Node:
    """One process, started on first use, and again after it has ended."""

    def __init__(self):
        self._process = self._replies = self._socket = None

    def run(self, code):
        """Run a cell; return `(text, value)` of its last expression, None if it has none.

        An interruption of Python interrupts the cell. Raises `JavaScriptError`.
        """
        reply = self._ask({"op": "cell", "code": code})
        if "error" in reply:
            raise JavaScriptError(**reply["error"])
        if "text" not in reply:
            return None
        return reply["text"], None if reply["json"] is None else json.loads(reply["json"])

    def forked(self):
        """Have Node.js draw random numbers of its own in this fork, or start it anew."""
        if self._process is not None and not self._ask({"op": "fork"})["drawsFromProcessor"]:
            self._end()

    def _ask(self, request):
        if self._process is None:
            self._start()
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            return self._reply()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except OSError:
            raise self._lost() from None

    def _reply(self):
        line = self._replies.readline()
        if not line:
            raise self._lost()
        return json.loads(line)

    def _lost(self):
        self._end()
        return RuntimeError("Node.js has ended; its state is lost, and the next cell starts anew")

    def _start(self):
        self._socket, theirs = socket.socketpair()
        command = f"exec {SOCKET_FD}<&{theirs.fileno()} && exec node {PROGRAM} {SOCKET_FD}"
        self._process = subprocess.Popen(  # a group of its own: signals to Python are Python's
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._replies = self._socket.makefile("rb")

    def _interrupt(self):
        """End the cell that runs; the agent interrupts us, too, each second until we answer."""
        self._socket.settimeout(INTERRUPT_S)
        for _ in range(INTERRUPTS_MAX):
            try:
                self._process.send_signal(signal.SIGINT)
                self._reply()
            except KeyboardInterrupt:
                continue
            except (OSError, RuntimeError, ValueError):
                break
            self._socket.settimeout(None)
            return
        self._end()

    def _end(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._replies.close()
            self._socket.close()
        self._process = None
