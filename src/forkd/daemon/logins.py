"""Failed log-ins, slowed down for each address.

The answer to a request without a valid token waits, the longer the more there were from its
address.  Only so many wait at once.  While they do, nothing else from that address has its token
looked up: it is refused, right or wrong, so that nobody learns faster which token is valid.

An address may be shared by many.  So a token that has logged in from there lately keeps its place,
and neither waits nor is refused.  That says of a guess whether it is such a token, at once; so only
tokens that are too long to be guessed keep one.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import ipaddress
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

FREE = 3
"""How many failures are answered at once."""

DELAY_S_MAX = 8.0
"""How long one waits at most."""

WAITING_MAX = 4
"""How many failures of one address wait at the same time."""

FORGOTTEN_S = 300.0
"""How long after its last failure an address begins anew."""

IPV6_PREFIX_BITS = 64
"""What addresses of IPv6 have in common that count as one."""

ADDRESSES_MAX = 4_096
"""How many addresses are remembered; the one whose last failure is oldest is forgotten first."""

PLACES_MAX = 4_096
"""How many log-ins keep a place; the one that was used longest ago is forgotten first."""

PLACE_CHARS_MIN = 32
"""Shorter tokens keep no place: an operator may have chosen them.  Ours have 43 characters."""


@dataclass(slots=True)
class _Address:
    """The failures of one address."""

    failures: int = 0
    waiting: int = 0
    last_s: float = 0.0


class FailedLogins:
    """Slows down failed log-ins by where they come from.

    Args:
        delay_s: How long the first one waits that is not answered at once; twice as long each time.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._addresses: OrderedDict[str, _Address] = OrderedDict()
        self._key = secrets.token_bytes(32)
        self._places: OrderedDict[bytes, float] = OrderedDict()

    def check(self, address: str, secret: str) -> None:
        """Return if a token may be looked up that came from an address.

        Raises:
            CapacityError: As many log-ins of this address as may wait have failed, and the token
                has no place.
        """
        found = self._addresses.get(network_of(address))
        if (
            found is not None
            and found.waiting >= WAITING_MAX
            and not self._has_place(address, secret)
        ):
            self._note(address)
            raise _too_many()

    def note_success(self, address: str, secret: str) -> None:
        """Have a token that was valid keep its place among those of an address."""
        if len(secret) < PLACE_CHARS_MIN:
            return
        place = self._place(address, secret)
        self._places[place] = asyncio.get_running_loop().time()
        self._places.move_to_end(place)
        if len(self._places) > PLACES_MAX:
            self._places.popitem(last=False)

    def _has_place(self, address: str, secret: str) -> bool:
        used_s = self._places.get(self._place(address, secret))
        now_s = asyncio.get_running_loop().time()
        return used_s is not None and now_s - used_s <= FORGOTTEN_S

    def _place(self, address: str, secret: str) -> bytes:
        said = f"{network_of(address)} {secret}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(said, key=self._key, digest_size=32).digest()

    @contextlib.asynccontextmanager
    async def slowed_down(self, address: str) -> AsyncGenerator[None, None]:
        """Enter the block, which refuses a log-in, after a while.

        Raises:
            CapacityError: As many of this address wait as may.
        """
        found = self._note(address)
        if found.waiting >= WAITING_MAX:
            raise _too_many()
        wait_s = delay_s(found.failures, self._delay_s)
        if wait_s > 0:
            found.waiting += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                found.waiting -= 1
        yield

    def _note(self, address: str) -> _Address:
        now_s = asyncio.get_running_loop().time()
        address = network_of(address)
        found = self._addresses.pop(address, None) or _Address()
        if now_s - found.last_s > FORGOTTEN_S and not found.waiting:
            found.failures = 0
        found.failures += 1
        found.last_s = now_s
        self._addresses[address] = found
        if len(self._addresses) > ADDRESSES_MAX:
            self._addresses.popitem(last=False)
        return found


def _too_many() -> CapacityError:
    return CapacityError(
        "too many failed log-ins from this address; try again later",
        retry_after_s=int(DELAY_S_MAX),
    )


@functools.lru_cache(ADDRESSES_MAX)
def network_of(address: str) -> str:
    """Return what counts as one address: of IPv6 a /64, which any one host may have all of."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_PREFIX_BITS), strict=False))


def delay_s(failures: int, first_s: float) -> float:
    """Return how long the answer to a failure waits, of which there were so many."""
    if failures <= FREE:
        return 0.0
    doublings = min(failures - FREE - 1, 10)
    return min(first_s * 2.0**doublings, DELAY_S_MAX)
