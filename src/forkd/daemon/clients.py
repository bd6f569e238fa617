"""What clients may take of the daemon: connections, requests, time, descriptors and memory.

The Unix socket and TCP have limits of their own.  So strangers at the port, who need no token to
open connections, cannot take from the local operator what it takes to end a sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass

UNIX_CONNECTIONS_MAX = 2_048
"""Most connections at once over the Unix socket."""

UNIX_REQUESTS_MAX = 1_024
"""Most requests at once over the Unix socket, WebSockets and streams of events aside."""

UNIX_WEBSOCKETS_MAX = 512
"""Most WebSockets at once over the Unix socket."""

UNIX_EVENTS_MAX = 512
"""Most streams of events at once over the Unix socket."""

TCP_CONNECTIONS_MAX = 1_280
"""Most connections at once over TCP, those of clients without a token included."""

TCP_STRANGERS_MAX = TCP_CONNECTIONS_MAX // 8
"""Most connections of one address over TCP that have not shown a valid token; of IPv6 a /64 counts
as one address."""

TCP_REQUESTS_MAX = 512
"""Most requests at once over TCP, WebSockets and streams of events aside; two SDK clients make as
many at most."""

TCP_WEBSOCKETS_MAX = 256
"""Most WebSockets at once over TCP."""

TCP_EVENTS_MAX = 512
"""Most streams of events at once over TCP."""

EVENTS_PATH = "/v2/events"
"""Where streams of events are, which last and so do not count among the requests."""

UNIX_DESCRIPTORS_SHARE_MAX = 7 / 8
"""The Unix socket takes no connection while more than this share of all descriptors is in use.

The rest is a reserve: adopting, forking and ending sandboxes opens descriptors too.
"""

TCP_DESCRIPTORS_SHARE_MAX = 3 / 4
"""TCP takes no connection from here on, so that what is left goes to the Unix socket first."""

LINGERING_MAX = 64
"""Most refused connections that are kept open so that their clients can read why."""

LINGER_TIMEOUT_S = 1.0
"""Time that a refused client has to read why."""

FIRST_HEADER_TIMEOUT_S = 10.0
"""Time from a connection until the header of its first request is complete."""

HEADER_TIMEOUT_S = 10.0
"""Time from the first byte of a later header until it is complete."""

BODY_TIMEOUT_S = 30.0
"""Time from one piece of a body, or its header, until the next, while we wait for it."""

READ_TIMEOUT_S = 60.0
"""Time in which a client must have read most of what waits for it, or it is cut off."""

LOGIN_DELAY_S = 0.25
"""How long the first failed log-in that is not answered at once waits for its answer."""

HEADER_BYTES_MAX = 16 * 1024
"""Header of a request: its first line and its fields."""

RETRY_AFTER_S = 1
"""When a client that found everything taken should ask again: requests are short."""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What the clients of one address may take.

    Attributes:
        connections_max: Connections at once.
        requests_max: Requests at once, WebSockets and streams of events aside.
        websockets_max: WebSockets at once.
        events_max: Streams of events at once.
        descriptors_share_max: No connection is taken beyond this share of all descriptors.
        strangers_max: Connections of one address without a valid token; None if nobody needs one.
        first_header_timeout_s: From a connection until its first header is complete.
        header_timeout_s: From the first byte of a later header until it is complete.
        body_timeout_s: From one piece of a body until the next.
        read_timeout_s: Within which a client must read what waits for it.
        linger_timeout_s: Within which a refused client can read why.
        login_delay_s: How long the first failed log-in waits that is not answered at once.
    """

    connections_max: int
    requests_max: int
    websockets_max: int
    events_max: int
    descriptors_share_max: float
    strangers_max: int | None = None
    first_header_timeout_s: float = FIRST_HEADER_TIMEOUT_S
    header_timeout_s: float = HEADER_TIMEOUT_S
    body_timeout_s: float = BODY_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S
    linger_timeout_s: float = LINGER_TIMEOUT_S
    login_delay_s: float = LOGIN_DELAY_S


UNIX = ClientLimits(
    UNIX_CONNECTIONS_MAX,
    UNIX_REQUESTS_MAX,
    UNIX_WEBSOCKETS_MAX,
    UNIX_EVENTS_MAX,
    UNIX_DESCRIPTORS_SHARE_MAX,
)
TCP = ClientLimits(
    TCP_CONNECTIONS_MAX,
    TCP_REQUESTS_MAX,
    TCP_WEBSOCKETS_MAX,
    TCP_EVENTS_MAX,
    TCP_DESCRIPTORS_SHARE_MAX,
    TCP_STRANGERS_MAX,
)
