"""Connections of the egress proxy to the world: straight there, or by the operator's proxy.

Where a connection goes is always an address that the packet filter has allowed: the operator's
proxy is asked for that, and never for a name, which it might resolve to something else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from forkd.errors import HostError, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

CONNECT_S = 10.0
"""How long a connection may take, and how long its handshake."""

BUFFER_BYTES = 64 * 1024
"""How much of either direction of a connection is kept at once."""

_HEAD_END = b"\r\n\r\n"
_OK = 2

log = logging.getLogger(__name__)


class Stream(NamedTuple):
    """A connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def finish(self) -> None:
        """End it in order, once all is sent.

        Raises:
            OSError: The peer is lost, or takes nothing for too long.
        """
        self.writer.close()
        async with asyncio.timeout(CONNECT_S):
            await self.writer.wait_closed()

    def abort(self) -> None:
        """End it at once; what was not sent is dropped."""
        self.writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Via:
    """The operator's proxy.

    Attributes:
        host: Where it listens.
        port: On which port.
        credentials: `user:password`; None for none.
        bypassed: What is reached without it, as in `NO_PROXY`: names with all below them,
            addresses, networks, or `*`.
    """

    host: str
    port: int
    credentials: str | None = field(default=None, repr=False)
    bypassed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, url: str, no_proxy: str = "") -> Via:
        """Return what the URL of a proxy and a list of exceptions say.

        Raises:
            InvalidRequest: The URL is no `http://[user:password@]host[:port]`.
        """
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port or 80
        except ValueError:
            raise _no_proxy_url() from None
        if parts.scheme != "http" or not parts.hostname or parts.path not in {"", "/"}:
            raise _no_proxy_url()
        credentials = None
        if parts.username is not None:
            credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        return cls(parts.hostname, port, credentials, parse_no_proxy(no_proxy))

    def bypasses(self, name: str | None, address: str) -> bool:
        """Whether a host is reached without the proxy.

        Args:
            name: Its name in lower case, if that is known.
            address: Its address.
        """
        return any(_is_meant(each, name, address) for each in self.bypassed)


def parse_no_proxy(text: str) -> tuple[str, ...]:
    """Return the entries of `NO_PROXY`."""
    return tuple(each.strip().lower() for each in text.split(",") if each.strip())


def _no_proxy_url() -> InvalidRequest:
    return InvalidRequest(
        "the egress proxy must be http://host:port, with user:password@ before the host if it "
        "asks for that",
        field="egress_proxy",
    )


def _is_meant(entry: str, name: str | None, address: str) -> bool:
    if entry == "*":
        return True
    with contextlib.suppress(ValueError):
        return ip_address(address) in ip_network(entry.strip("[]"), strict=False)
    domain = entry.removeprefix("*").removeprefix(".")
    return name is not None and (name == domain or name.endswith(f".{domain}"))


class Upstreams:
    """Makes connections to the world.

    Args:
        via: The operator's proxy; None to go straight.
        ca_file: Certificates that are trusted beside those that this host trusts; None for none.
    """

    def __init__(self, via: Via | None = None, ca_file: Path | None = None) -> None:
        self._via = via
        self._ca_file = ca_file
        self._trust: ssl.SSLContext | None = None

    @property
    def leads_all(self) -> bool:
        """Whether everything goes by the operator's proxy."""
        return self._via is not None

    async def connect(self, address: str, port: int, name: str | None) -> Stream:
        """Return a connection to an address.

        Args:
            address: Which.
            port: Which.
            name: Of whom, if that is known: the operator may have some reached straight.

        Raises:
            HostError: There is none; the message is for the guest.
        """
        via = self._via
        if via is None or via.bypasses(name, address):
            return await _open(address, port, f"{name or address}:{port}")
        proxy = f"the host's proxy, {via.host}:{via.port},"
        stream = await _open(via.host, via.port, proxy)
        try:
            await _ask(stream, via, address, port, proxy)
        except BaseException:
            stream.abort()
            raise
        return stream

    async def secure(self, stream: Stream, name: str) -> None:
        """Speak TLS with a server that proves to be `name`.

        Raises:
            HostError: It does not; the message is for the guest.
        """
        if self._trust is None:
            self._trust = await asyncio.to_thread(self._load_trust)
        try:
            await stream.writer.start_tls(
                self._trust, server_hostname=name, ssl_handshake_timeout=CONNECT_S
            )
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message or "it cannot be verified"
            raise HostError(f"the certificate of {name} is not valid: {reason}") from None
        except (OSError, ssl.SSLError, EOFError, ValueError) as error:  # or no name to verify
            raise HostError(f"no TLS with {name}: {type(error).__name__}") from None

    def _load_trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.set_alpn_protocols(["http/1.1"])
        if self._ca_file is not None:
            try:
                context.load_verify_locations(self._ca_file)
            except (OSError, ssl.SSLError) as error:
                reason = f"cannot read certificates of {self._ca_file}: {error}"
                log.warning("egress proxy trusts nobody more", extra={"error": reason})
                raise HostError("the host cannot read its certificates; see its log") from None
        return context


async def _open(host: str, port: int, whom: str) -> Stream:
    try:
        async with asyncio.timeout(CONNECT_S):
            return Stream(*await asyncio.open_connection(host, port, limit=BUFFER_BYTES))
    except TimeoutError:
        raise HostError(f"{whom} did not answer within {CONNECT_S:g} s") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise HostError(f"{whom} cannot be reached: {reason}") from None


async def _ask(stream: Stream, via: Via, address: str, port: int, proxy: str) -> None:
    """Have a proxy connect us."""
    authority = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}"]
    if via.credentials is not None:
        encoded = base64.b64encode(via.credentials.encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {encoded}")
    try:
        async with asyncio.timeout(CONNECT_S):
            stream.writer.write("\r\n".join(lines).encode() + _HEAD_END)
            await stream.writer.drain()
            head = await stream.reader.readuntil(_HEAD_END)
    except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError) as error:
        raise HostError(f"{proxy} did not answer: {type(error).__name__}") from None
    status = head.split(b" ", 2)[1:2]
    if not status or not status[0].isdigit() or int(status[0]) // 100 != _OK:
        said = head.splitlines()[0][:80].decode("latin-1")
        raise HostError(f"{proxy} does not lead to {authority}: {said!r}")
