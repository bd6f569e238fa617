"""`forkd port`, and `-p` of `forkd run`: ports of this host that go to ports in a sandbox."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import sleep
from typing import TYPE_CHECKING, Annotated, Self

import typer

from forkd.cli import render
from forkd.cli.context import shared
from forkd.cli.options import Id, Json
from forkd.errors import InvalidRequest, NotFound
from forkd.limits import FORWARDS_MAX, PORT_MAX

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from forkd.cli.help_text import Commands
    from forkd.errors import ForkdError
    from forkd.sdk import Forward, Sandbox

LOOPBACK = "127.0.0.1"

AGAIN_S = 1.0
"""How often to look whether the sandbox has ended."""

EXAMPLES = "8080:80, 127.0.0.1:8080:80, or 8000 for the same port on both"

_MAPPING = re.compile(
    r"(?:(?P<address>\[[^\]]*\]|[^:\[\]]*):(?=[^:]*:))?(?:(?P<host>[0-9]*):)?(?P<guest>[0-9]+)"
)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port of this host, and the port in the sandbox that it goes to.

    Attributes:
        host: The address to listen on.
        host_port: The port to listen on; 0 for a free one.
        guest_port: The port in the sandbox.
    """

    host: str
    host_port: int
    guest_port: int


def mapping(text: str) -> Mapping:
    """Return what `[[ADDRESS:]HOST:]GUEST` says."""
    found = _MAPPING.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a port mapping; write HOST:GUEST: {EXAMPLES}")
    guest = found["guest"]
    host = guest if found["host"] is None else found["host"] or "0"  # as docker has it
    for port, least in ((host, 0), (guest, 1)):
        if len(port) > len(str(PORT_MAX)) or not least <= int(port) <= PORT_MAX:
            raise typer.BadParameter(
                f"{text!r} has {port}, which is no port: ports are {least} to {PORT_MAX}"
            )
    address = (found["address"] or LOOPBACK).strip("[]")
    return Mapping(address, int(host), int(guest))


Publish = Annotated[
    list[Mapping] | None,
    typer.Option(
        "--publish",
        "-p",
        metavar="HOST:GUEST",
        parser=mapping,
        help="Forward a port of this host to a port in the sandbox while the command runs.",
    ),
]


def register(app: Commands) -> None:
    """Add the command of this file."""
    app.command()(port)


def port(
    sandbox: Id,
    ports: Annotated[
        list[Mapping],
        typer.Argument(
            metavar="HOST:GUEST",
            parser=mapping,
            help="A port of this host and one in the sandbox. HOST is 0 for a free port; "
            "ADDRESS:HOST:GUEST listens on another address than 127.0.0.1; GUEST alone is the "
            "same port on both.",
        ),
    ],
    *,
    json: Json = False,
) -> None:
    """Forward ports of this host to ports in a sandbox until Ctrl-C.

    The forwarding ends when the sandbox ends, too.  The program in the sandbox listens on
    127.0.0.1, ::1 or all addresses; it may begin to listen later.

    Examples:
      forkd port sb-7q66th9abcde 8080:80
      forkd port sb-7q66th9abcde 5432 0:8000
      forkd port sb-7q66th9abcde 0.0.0.0:8080:80
    """
    with shared.client(as_json=json) as client, Listeners(ports) as listeners:
        found = client.sandboxes.get(sandbox)
        with listeners.forwarding(found) as forwards:
            if json:
                render.document([_as_json(each) for each in forwards])
            else:
                for each in forwards:
                    typer.echo(_shown(each))
            why = _until_ended(found)
    render.note(f"{found.id} has ended: {why}")


def _until_ended(sandbox: Sandbox) -> str:
    """Return why a sandbox ended, once it has."""
    try:
        while (info := sandbox.refresh()).condition != "exited":
            sleep(AGAIN_S)
    except NotFound:
        return "deleted"
    return info.exit_reason or info.status


class Listeners:
    """Ports of this host that listen, before there is a sandbox; closed at the end of the block.

    Args:
        mappings: Which, and where they go.

    Raises:
        InvalidRequest: There are too many, or one cannot be listened on.
        Conflict: Another program has one.
    """

    def __init__(self, mappings: Sequence[Mapping] | None) -> None:
        self._mappings = tuple(mappings or ())
        self._sockets: list[socket.socket] = []
        if len(self._mappings) > FORWARDS_MAX:
            raise InvalidRequest(
                f"{len(self._mappings)} ports are more than one command forwards: {FORWARDS_MAX}"
            )

    def __enter__(self) -> Self:
        from forkd.sdk._forwarding import listen  # noqa: PLC0415 - most runs forward nothing

        with ExitStack() as stack:
            stack.callback(self._close)
            for each in self._mappings:
                self._sockets.append(listen(each.host, each.host_port))
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for each in self._sockets:
            each.close()

    @contextmanager
    def forwarding(self, sandbox: Sandbox) -> Iterator[list[Forward]]:
        """Forward to a sandbox as long as the block lasts."""
        said: list[str] = []

        def note(error: ForkdError) -> None:
            """Say what refuses connections, once for as long as it is the same."""
            if said != [str(error)]:
                said[:] = [str(error)]
                render.note(f"forkd: a connection failed: {error}")

        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    sandbox.forward(each.guest_port, listener=listener, on_error=note)
                )
                for each, listener in zip(self._mappings, self._sockets, strict=True)
            ]

    @contextmanager
    def noted(self, sandbox: Sandbox) -> Iterator[None]:
        """Forward to a sandbox as long as the block lasts, and say so on standard error."""
        if not self._mappings:
            yield
            return
        with self.forwarding(sandbox) as forwards:
            for each in forwards:
                render.note(f"forwarding {_shown(each)}")
            yield


def _shown(forward: Forward) -> str:
    return f"{forward.address} -> {forward.guest_port}"


def _as_json(forward: Forward) -> dict[str, str | int]:
    return {"host": forward.host, "host_port": forward.port, "guest_port": forward.guest_port}
