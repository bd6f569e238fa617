"""Which tap and which addresses a sandbox gets.

Every tap is a network of its own, a /30 with the host at one end and the guest
at the other, so that no two sandboxes share a link.  Everything follows from a
slot's index, which is all that has to be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import TYPE_CHECKING

from forkd.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

PREFIX_LENGTH = 30
"""Prefix length of one link: a network of two ends."""

TAP_PREFIX_MAX = 8
"""Longest prefix of tap names; names have at most 15 characters."""

POOL = IPv4Network("10.200.0.0/16")
"""Where addresses come from unless settings say otherwise: 16,384 links."""

PREFIX_LENGTH_V6 = 64
"""Prefix length of one link's IPv6 network."""

_PRIVATE_V6 = 0xFD66_6B64 << 96
"""What our IPv6 addresses begin with (RFC 4193); the IPv4 network of the link follows."""

_SLOT_ADDRESSES = 1 << (32 - PREFIX_LENGTH)


@dataclass(frozen=True, slots=True)
class Slot:
    """One link between the host and a sandbox.

    Attributes:
        index: Its place in the pool.
        tap_index: Whose tap it has: its own, unless it took over the addresses of another.
        tap: Name of the host's end.
        mac: Hardware address of the guest's end.
        host: Address of the host's end.
        guest: Address of the guest's end.
        host_v6: IPv6 address of the host's end.
        guest_v6: IPv6 address of the guest's end.
        ipv6: Whether the link has its IPv6 addresses.
    """

    index: int
    tap_index: int
    tap: str
    mac: str
    host: str
    guest: str
    host_v6: str
    guest_v6: str
    ipv6: bool = True

    def only_v4(self) -> Slot:
        """Return the link without its IPv6 addresses."""
        return replace(self, ipv6=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """All links that there can be.

    Attributes:
        pool: Where addresses come from, /16 to /30.
        tap_prefix: What the names of our taps begin with.
        ipv6: Whether links have IPv6 addresses.
    """

    pool: IPv4Network = POOL
    tap_prefix: str = "fk"
    ipv6: bool = True

    @property
    def slots(self) -> int:
        """How many links there can be at once."""
        return self.pool.num_addresses // _SLOT_ADDRESSES

    @property
    def pool_v6(self) -> IPv6Network:
        """Where IPv6 addresses come from: it follows from `pool`."""
        first = _PRIVATE_V6 + (int(self.pool.network_address) << 64)
        return IPv6Network((first, 32 + self.pool.prefixlen))

    def holds(self, address: IPv4Address | IPv6Address) -> bool:
        """Whether an address is one of our links', whichever."""
        return address in (self.pool if address.version == 4 else self.pool_v6)  # noqa: PLR2004 - IPv4

    def slot(self, index: int, tap_index: int | None = None) -> Slot:
        """Return the link at `index`, 0 to `slots` - 1.

        Args:
            index: Whose addresses it has.
            tap_index: Whose tap it has, if not that of `index`: a link that took over the
                addresses of another keeps its tap.
        """
        # Numbers until the end: a fork makes one of these for each child.
        first = int(self.pool.network_address) + index * _SLOT_ADDRESSES
        first_v6 = _PRIVATE_V6 + (first << 64)
        tap_index = index if tap_index is None else tap_index
        return Slot(
            index=index,
            tap_index=tap_index,
            tap=f"{self.tap_prefix}{tap_index:04x}",
            mac=f"02:66:6b:00:{index >> 8:02x}:{index & 0xFF:02x}",
            host=str(IPv4Address(first + 1)),
            guest=str(IPv4Address(first + 2)),
            host_v6=str(IPv6Address(first_v6 + 1)),
            guest_v6=str(IPv6Address(first_v6 + 2)),
            ipv6=self.ipv6,
        )

    def free(self, count: int, taken: Collection[int]) -> tuple[int, ...]:
        """Return `count` indices that are not in `taken`, lowest first.

        Raises:
            CapacityError: There are not so many.
        """
        found = tuple(self._first_free(count, taken))
        if len(found) < count:
            raise CapacityError(
                f"no more than {self.slots} sandboxes can have a network at once", asked=count
            )
        return found

    def is_ours(self, link: str) -> bool:
        """Whether a link's name is one that this plan gives."""
        digits = link.removeprefix(self.tap_prefix)
        if digits == link or len(digits) != len("ffff"):
            return False
        return all(digit in "0123456789abcdef" for digit in digits)

    def _first_free(self, count: int, taken: Collection[int]) -> Iterator[int]:
        for index in range(self.slots):
            if count == 0:
                return
            if index not in taken:
                count -= 1
                yield index
