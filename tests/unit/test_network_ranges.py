"""Rules become ranges that do not overlap, and what is not public needs a rule of its own."""

from __future__ import annotations

import random
from dataclasses import replace
from ipaddress import ip_address

import pytest

from forkd.errors import InvalidRequest
from forkd.model.network import AddressRule, NetworkPolicy, Protocol
from forkd.network.plan import Plan
from forkd.network.ranges import PIECES_MAX, Piece, check, is_public, permits, pieces

PLAN = Plan()


def of(*rules: str) -> tuple[AddressRule, ...]:
    return NetworkPolicy().with_rules(rules).addresses


def allows(found: tuple[Piece, ...], address: str, protocol: Protocol, port: int) -> int:
    """Return how many pieces allow something."""
    number = int(ip_address(address))
    return sum(
        each.version == ip_address(address).version
        and each.span.first <= number <= each.span.last
        and each.protocol is protocol
        and (each.ports is None or each.ports.first <= port <= each.ports.last)
        for each in found
    )


def test_overlapping_rules_become_pieces_that_do_not_overlap() -> None:
    dice = random.Random(7)  # noqa: S311 - no secret
    rules = [
        f"192.{dice.choice((0, 1))}.0.0/{dice.choice((15, 16))}".replace(
            "192.1.0.0/15", "192.1.0.0/16"
        )
        + f":{dice.randint(1, 40)}-{dice.randint(40, 80)}/{dice.choice(('tcp', 'udp'))}"
        for _ in range(40)
    ]
    chosen = of(*rules)
    found = pieces(chosen)

    for _ in range(500):
        address = f"192.{dice.choice((0, 1))}.{dice.randint(3, 255)}.{dice.randint(0, 255)}"
        if not is_public(ip_address(address)):
            continue
        protocol, port = dice.choice((Protocol.TCP, Protocol.UDP)), dice.randint(1, 90)
        expected = any(
            ip_address(address) in rule.network
            and protocol in rule.protocols
            and any(each.first <= port <= each.last for each in rule.ports)
            for rule in chosen
        )
        assert allows(found, address, protocol, port) == int(expected)


@pytest.mark.parametrize(
    ("rule", "reached", "refused"),
    [
        ("0.0.0.0/0", ("203.0.113.1", "9.255.255.255"), ("10.0.0.1", "169.254.169.254")),
        ("10.0.0.0/8", ("10.0.0.1",), ("11.0.0.1",)),
        ("169.254.169.254", ("169.254.169.254",), ("169.254.169.253",)),
        ("8.0.0.0/6", ("8.0.0.1", "11.255.255.255"), ("10.0.0.1",)),
        ("::/0", ("2001:db8::1",), ("fd00::1", "fe80::1", "::1", "64:ff9b::a00:1", "2002:a00::1")),
        ("fc00::/7", ("fd00::1",), ("fe80::1",)),
    ],
)
def test_a_wide_rule_means_what_is_public_of_it(
    rule: str, reached: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    found = pieces(of(rule))

    assert all(allows(found, address, Protocol.TCP, 80) == 1 for address in reached)
    assert not any(allows(found, address, Protocol.TCP, 80) for address in refused)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("203.0.113.1", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("0.1.2.3", False),
        ("168.63.129.16", False),
        ("168.63.129.17", True),
        ("2001:db8::1", True),
        ("2606:4700::1", True),
        ("::1", False),
        ("::ffff:10.0.0.1", False),
        ("fd00::1", False),
        ("fe80::1", False),
        ("ff02::1", False),
        ("2002:0a00:0001::", False),
    ],
)
def test_what_is_public(address: str, public: bool) -> None:  # noqa: FBT001 - a table
    assert is_public(ip_address(address)) is public


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("127.0.0.1:8080", "127.0.0.1:8080: no sandbox reaches the host's loopback"),
        ("127.0.0.0/8", "127.0.0.0/8: no sandbox reaches the host's loopback"),
        ("0.0.0.1", "0.0.0.1: no sandbox reaches the host's loopback"),
        ("[::1]:80", "[::1]:80: no sandbox reaches the host's loopback"),
        ("[::ffff:7f00:1]", "[::ffff:7f00:1]: no sandbox reaches the host's loopback"),
        ("10.200.3.4/tcp", "10.200.3.4/tcp: sandboxes' links have the addresses 10.200.0.0/16 and"),
        ("10.200.0.0/16", "10.200.0.0/16: sandboxes' links"),
        ("[fd66:6b64:ac8::2]", "[fd66:6b64:ac8::2]: sandboxes' links"),
    ],
)
def test_a_rule_for_what_no_sandbox_reaches_is_refused_by_its_name(rule: str, said: str) -> None:
    policy = NetworkPolicy().with_rules(("example.com", rule))

    with pytest.raises(InvalidRequest) as refused:
        check(policy, (PLAN.pool, PLAN.pool_v6))

    assert str(refused.value).startswith(f"network: {said}")
    assert "`host` allows" in str(refused.value)
    assert refused.value.context["field"] == "network"


@pytest.mark.parametrize("rule", ["10.0.0.0/8", "0.0.0.0/0", "[::/0]", "[fd00::/8]", "10.201.0.0"])
def test_a_rule_that_only_holds_such_addresses_beside_others_is_fine(rule: str) -> None:
    check(NetworkPolicy().with_rules((rule,)), (PLAN.pool, PLAN.pool_v6))


@pytest.mark.parametrize(
    ("rules", "address", "port", "permitted"),
    [
        (("internet",), "203.0.113.1", 443, True),
        (("internet",), "168.63.129.16", 80, False),
        (("internet",), "10.0.0.1", 443, False),
        (("10.1.0.0/16:80-90/tcp",), "10.1.2.3", 85, True),
        (("10.1.0.0/16:80-90/tcp",), "10.1.2.3", 91, False),
        (("10.1.0.0/16:80-90/udp",), "10.1.2.3", 85, False),
        (("[fd00:1::]",), "fd00:1::", 1, True),
        (("example.com",), "203.0.113.1", 443, False),
    ],
)
def test_what_a_policy_permits_by_itself(
    rules: tuple[str, ...],
    address: str,
    port: int,
    permitted: bool,  # noqa: FBT001 - a table
) -> None:
    policy = NetworkPolicy().with_rules(tuple(r for r in rules if r != "internet"))
    policy = replace(policy, internet="internet" in rules)

    assert permits(policy, ip_address(address), Protocol.TCP, port) is permitted


def test_rules_that_overlap_in_too_many_ways_are_refused_quickly() -> None:
    ports = ",".join(f"{port * 3 + 1}" for port in range(16))
    wide = [f"0.0.0.0/0:{','.join(str(i * 48 + j * 3 + 1) for j in range(16))}" for i in range(250)]
    narrow = [f"192.0.2.{number}:{ports}" for number in range(250)]

    with pytest.raises(InvalidRequest, match=str(PIECES_MAX)) as refused:
        pieces(of(*wide, *narrow))

    assert refused.value.context["field"] == "network"
