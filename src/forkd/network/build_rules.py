"""What downloads of image builds may reach, as a table for nft(8); pure.

A build's programs are users of its own, and so are told from all others by their sockets:
no interface, namespace or resolver of their own is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.model.network import Protocol
from forkd.network.ranges import SPECIAL_V4, SPECIAL_V6

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forkd.model.network import AddressRule

_PREFIX = "forkd_build_"

_TABLE = """
table inet {name}
delete table inet {name}
table inet {name} {{
  chain output {{
    type filter hook output priority filter; policy accept;
    meta skuid {first}-{last} jump build
  }}
  chain build {{
{allowed}
{public}
    goto refuse
  }}
  chain refuse {{
    meta l4proto tcp reject with tcp reset
    reject with icmpx admin-prohibited
  }}
}}
"""

_PUBLIC = """\
    fib daddr type != unicast goto refuse
    ip daddr {{ {special_v4} }} goto refuse
    ip6 daddr {{ {special_v6} }} goto refuse
    accept"""


def table_name(first: int) -> str:
    """Return the name of the table for the build whose first user is `first`."""
    return f"{_PREFIX}{first}"


def put(first: int, count: int, allowed: Iterable[AddressRule], *, internet: bool) -> str:
    """Return the commands that confine the sockets of users, in place of what there is for them.

    Args:
        first: The first of the users.
        count: How many they are.
        allowed: What they may reach, of this host and of private ranges, too.
        internet: Whether they may reach all that is public, and is not this host.
    """
    special = {
        f"special_v{each}": ", ".join(map(str, networks))
        for each, networks in ((4, SPECIAL_V4), (6, SPECIAL_V6))
    }
    return _TABLE.format(
        name=table_name(first),
        first=first,
        last=first + count - 1,
        allowed="\n".join(f"    {line} accept" for rule in allowed for line in _lines(rule)),
        public=_PUBLIC.format(**special) if internet else "",
    )


def remove(first: int) -> str:
    """Return the commands that remove the table for the build whose first user is `first`."""
    return f"table inet {table_name(first)}\ndelete table inet {table_name(first)}\n"


def _lines(rule: AddressRule) -> Iterator[str]:
    family, icmp = ("ip", "icmp") if rule.network.version == 4 else ("ip6", "ipv6-icmp")  # noqa: PLR2004 - IPv4
    target = f"{family} daddr {rule.network}"
    ports = ", ".join(map(str, rule.ports))
    for protocol in rule.protocols:
        if protocol is Protocol.ICMP:
            yield f"{target} meta l4proto {icmp}"
        else:
            narrowed = f"{protocol} dport {{ {ports} }}" if ports else f"meta l4proto {protocol}"
            yield f"{target} {narrowed}"
