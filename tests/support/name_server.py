"""A DNS server of a test: it knows some names, and says what it was asked."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rrset

from tests.support.outside import DEADLINE_S, listening, readable

if TYPE_CHECKING:
    import selectors
    from collections.abc import Callable, Iterator

    from tests.support.namespaces import Namespace

PORT = 53


@dataclass
class NameServer:
    """What a server knows.

    Attributes:
        records: By name and type: time to live, and values.
        asked: Which names it was asked for, in turn.
        truncates: Whether it sends everybody from UDP to TCP.
        silent: Whether it answers nobody.
        holds: Whether it keeps its answers to itself until `release`.
        delay_s: How long it takes to answer.
    """

    records: dict[tuple[str, str], tuple[int, list[str]]]
    asked: list[str] = field(default_factory=list)
    truncates: bool = False
    silent: bool = False
    holds: bool = False
    delay_s: float = 0.0
    _held: list[Callable[[], object]] = field(default_factory=list)
    _late: list[threading.Timer] = field(default_factory=list)

    def release(self) -> None:
        """Send the answers that are held, and hold none any more."""
        self.holds = False
        while self._held:
            self._held.pop()()

    def send(self, answer: Callable[[], object]) -> None:
        """Send an answer now, or when it is time."""
        if self.holds:
            self._held.append(answer)
        elif self.delay_s:
            self._late.append(threading.Timer(self.delay_s, answer))
            self._late[-1].start()
        else:
            answer()

    def finish(self) -> None:
        """Wait until all that was late is sent."""
        for each in self._late:
            each.join()

    def answer(self, wire: bytes, *, packet: bool) -> bytes:
        """Return the answer to a question, with the aliases that lead to it."""
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), question.rdtype.name
        self.asked.append(name)
        name = name.lower()
        answer = dns.message.make_response(query)
        if self.truncates and packet:
            answer.flags |= dns.flags.TC
            return answer.to_wire()
        while (alias := self.records.get((name, "CNAME"))) is not None and len(answer.answer) < 20:
            answer.answer.append(_rrset(name, alias, "CNAME"))
            name = alias[1][0].removesuffix(".")
        if (found := self.records.get((name, kind))) is not None:
            answer.answer.append(_rrset(name, found, kind))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer.to_wire(max_size=0xFFFF)


@contextlib.contextmanager
def serving_names(namespace: Namespace, address: str, server: NameServer) -> Iterator[None]:
    """Serve names at an address of a namespace within the block."""
    packets = namespace.run(lambda: listening(address, PORT, socket.SOCK_DGRAM))
    listener = namespace.run(lambda: listening(address, PORT))
    reading, writing = socket.socketpair()
    selector = readable(packets, listener, reading)
    thread = threading.Thread(target=_serve, args=(server, selector, packets, listener, reading))
    thread.start()
    try:
        yield
    finally:
        writing.close()
        thread.join()
        server.finish()
        for each in (selector, reading, packets, listener):
            each.close()


def _serve(
    server: NameServer,
    selector: selectors.BaseSelector,
    packets: socket.socket,
    listener: socket.socket,
    until: socket.socket,
) -> None:
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if until in ready:
            return
        if packets in ready:
            wire, who = packets.recvfrom(4_096)
            if not server.silent:
                answer = server.answer(wire, packet=True)
                server.send(partial(packets.sendto, answer, who))
        if listener in ready:
            _converse(server, listener)


def _converse(server: NameServer, listener: socket.socket) -> None:
    with listener.accept()[0] as accepted, accepted.makefile("rb") as stream:
        accepted.settimeout(DEADLINE_S)
        (length,) = struct.unpack("!H", stream.read(2))
        wire = server.answer(stream.read(length), packet=False)
        accepted.sendall(struct.pack("!H", len(wire)) + wire)


def _rrset(name: str, record: tuple[int, list[str]], kind: str) -> dns.rrset.RRset:
    ttl, values = record
    return dns.rrset.from_text_list(dns.name.from_text(name), ttl, "IN", kind, values)
