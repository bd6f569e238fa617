"""What `forkd.service.api` promises of ports, as tests like those beside."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from forkd.errors import Conflict, GuestError, InvalidRequest
from tests.support.callers import CALLER

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from tests.support.service_suite import Subject

LISTEN = """
import socket, struct, threading

listener = socket.create_server(("127.0.0.1", 0))


def serve(one):
    said = b""
    while piece := one.recv(65536):
        said += piece
        if said == b"reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
            return
    one.sendall(said.upper())
    one.close()


def accept():
    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


threading.Thread(target=accept, daemon=True).start()
listener.getsockname()[1]
"""
"""A program that answers what it was told, when it was told all of it, in capitals."""

CLOSED = """
import socket
with socket.create_server(("127.0.0.1", 0)) as unused:
    port = unused.getsockname()[1]
port
"""


class PortSuite:
    """Connections to programs that listen."""

    async def _port(self, subject: Subject, sandbox: SandboxId, code: str = LISTEN) -> int:
        port = await subject.value(sandbox, code)
        assert isinstance(port, int)
        return port

    async def test_a_program_that_listens_is_talked_to(self, subject: Subject) -> None:
        sandbox = await subject.one()
        port = await self._port(subject, sandbox)

        for text in (b"once", b"more" * 100_000):
            async with await subject.host.guests.connect(CALLER, sandbox, port) as session:
                await session.send(text)
                await session.send_end()
                await session.send_end()
                said = [each async for each in session]
                with pytest.raises(Conflict):
                    await session.send(b"late")
            await session.aclose()
            assert (b"".join(said), said[-1], said.count(b"")) == (text.upper(), b"", 1)

    async def test_a_port_where_nothing_listens_is_said_to_be_so(self, subject: Subject) -> None:
        sandbox = await subject.one()
        port = await self._port(subject, sandbox, CLOSED)

        with pytest.raises(Conflict, match=f"nothing listens on port {port} ") as refused:
            await subject.host.guests.connect(CALLER, sandbox, port)
        assert refused.value.context["guest_code"] == "refused"
        for wrong in (0, 65_536):
            with pytest.raises(InvalidRequest) as invalid:
                await subject.host.guests.connect(CALLER, sandbox, wrong)
            assert invalid.value.context["field"] == "port"

    async def test_a_program_that_resets_the_connection_is_an_error(self, subject: Subject) -> None:
        sandbox = await subject.one()
        port = await self._port(subject, sandbox)

        async with await subject.host.guests.connect(CALLER, sandbox, port) as session:
            await session.send(b"reset")
            with pytest.raises(GuestError):
                async with aclosing(aiter(session)) as said:  # type: ignore[type-var]  # it is a generator
                    await anext(said)
