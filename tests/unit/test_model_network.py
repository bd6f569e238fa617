"""Policies are parsed as they are written, and what is wrong is one error of the field."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest
from forkd.limits import NETWORK_NAMES_MAX, NETWORK_PORTS_MAX, NETWORK_RULES_MAX
from forkd.model.network import HOST, NetworkPolicy, Protocol, parse_change, parse_policy

RULES = (
    "10.1.0.0/16:5432/tcp",
    "192.0.2.1",
    "192.0.2.0/24:53,8000-8999",
    "192.0.2.0/24/icmp",
    "[2001:db8::/32]:443",
    "[2001:db8::1]",
    "example.com:443",
    "*.debian.org:80,443/tcp",
    "_dmarc.example.com",
)


def test_a_policy_as_text_is_the_same_policy() -> None:
    policy = parse_policy(["internet", "host", *RULES])

    assert policy is not None
    assert policy.rules() == ("internet", "host", *RULES)
    assert NetworkPolicy().with_rules(policy.rules()) == policy


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (True, HOST),
        (False, None),
        ("none", None),
        (["none"], None),
        ("deny-all", NetworkPolicy()),
        ([], NetworkPolicy()),
        ("host", HOST),
        (["internet", "internet"], NetworkPolicy(internet=True)),
    ],
)
def test_words_stand_for_policies(
    given: bool | str | list[str],  # noqa: FBT001 - what clients send
    policy: NetworkPolicy | None,
) -> None:
    assert parse_policy(given) == policy


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("2001:db8::1", "[2001:db8::1]"),
        ("[2001:db8::]/32:443", "[2001:db8::/32]:443"),
        ("2001:db8::/32", "[2001:db8::/32]"),
        ("192.0.2.1/32", "192.0.2.1"),
        ("Example.COM.", "example.com"),
        ("192.0.2.1:443,80,443", "192.0.2.1:80,443"),
    ],
)
def test_a_rule_has_one_spelling(short: str, long: str) -> None:
    assert NetworkPolicy().with_rules((short,)).rules() == (long,)


@pytest.mark.parametrize(
    ("rule", "protocols"),
    [
        ("192.0.2.1", ("tcp", "udp", "icmp")),
        ("192.0.2.1:80", ("tcp", "udp")),
        ("192.0.2.1:80/udp", ("udp",)),
        ("192.0.2.1/icmp", ("icmp",)),
    ],
)
def test_without_ports_a_rule_allows_all_and_with_ports_what_has_them(
    rule: str, protocols: tuple[str, ...]
) -> None:
    (found,) = NetworkPolicy().with_rules((rule,)).addresses

    assert found.protocols == tuple(map(Protocol, protocols))


def test_a_name_is_that_name_and_a_star_is_every_name_below() -> None:
    policy = NetworkPolicy().with_rules(("example.com", "*.example.org"))

    allowed = ("example.com", "a.example.org", "a.b.example.org")
    assert all(policy.named(name) for name in allowed)
    refused = ("a.example.com", "example.org", "badexample.org", "example.com.evil.test")
    assert not any(policy.named(name) for name in refused)


@pytest.mark.parametrize(
    "given",
    [
        "",
        " ",
        "*",
        "*.",
        "localhost",
        "exa mple.com",
        "-a.com",
        "a..com",
        "bücher.example",
        "a" * 64 + ".com",
        "a." * 127 + "com",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "10.0.0",
        "256.1.1.1",
        "2001:db8::1/32",
        "[2001:db8::1",
        "[example.com]:443",
        "192.0.2.1:0",
        "192.0.2.1:65536",
        "192.0.2.1:9-3",
        "192.0.2.1:http",
        "192.0.2.1:",
        "192.0.2.1/sctp",
        "192.0.2.1:80/icmp",
        "example.com:1-1024",
        "https://example.com",
        "none,internet",
        ["none", "internet"],
        ["deny-all", "192.0.2.1"],
        "x" * 10_000,
    ],
)
def test_what_is_malformed_or_contradicts_itself_is_refused(given: str | list[str]) -> None:
    with pytest.raises(InvalidRequest, match="network") as refused:
        parse_policy(given)

    assert refused.value.context["field"] == "network"
    assert len(str(refused.value)) < 700


def test_a_policy_has_limits_of_which_one_more_is_refused() -> None:
    names = [f"n{number}.example.com" for number in range(NETWORK_NAMES_MAX + 1)]
    rules = [f"192.0.{number // 256}.{number % 256}" for number in range(NETWORK_RULES_MAX + 1)]
    ports = [str(number + 1) for number in range(NETWORK_PORTS_MAX + 1)]

    parse_policy(names[:-1])
    parse_policy(rules[:-1])
    parse_policy("192.0.2.1:" + ",".join(ports[:-1]))
    for given in (names, rules, ["192.0.2.1:" + ",".join(ports)], names * 40):
        with pytest.raises(InvalidRequest, match="at most"):
            parse_policy(given)


def test_a_change_replaces_or_adds_and_cannot_take_a_link_away() -> None:
    before = NetworkPolicy(host=True)

    assert parse_change(None, ["192.0.2.1"], hold=None).of(before).rules() == ("host", "192.0.2.1")
    assert parse_change("deny-all", [], hold=None).of(before) == NetworkPolicy()
    assert parse_change("internet", ["192.0.2.1"], hold=True).of(before).rules() == (
        "internet",
        "192.0.2.1",
    )
    for network, allow in (("none", []), (False, []), (None, ["none"]), (None, ["deny-all"])):
        with pytest.raises(InvalidRequest):
            parse_change(network, allow, hold=None)
