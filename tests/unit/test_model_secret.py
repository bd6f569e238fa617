"""What a secret may be, and for which hosts it is."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.model.caller import Tenant
from forkd.model.network import parse_policy
from forkd.model.sandbox import BranchOptions, ForkOptions
from forkd.model.secret import Secret, SecretRequest, SecretValue, parse_hosts

GOOD = "a good value"
HOSTS = parse_hosts(["api.example.com"])
LONGEST = limits.SECRET_VALUE_BYTES_MAX


def request(name: str = "token", value: str = GOOD, **members: object) -> SecretRequest:
    given = {"hosts": HOSTS, **members}
    return SecretRequest(name, SecretValue(value), **given)  # type: ignore[arg-type]  # what a test gives


@pytest.mark.parametrize(
    "value",
    [
        "x" * (limits.SECRET_VALUE_BYTES_MIN - 1),
        "x" * (LONGEST + 1),
        "value\r\nX-Injected: 1",
        "value with\nline break",
        "value with \x00 in it",
        "value\twith a tab",
        "value with ümlaut",
        "value with \ud800 in it",
        " begins with a space",
        "ends with a space ",
        "",
    ],
)
def test_a_value_that_could_end_a_header_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(value=value)
    assert caught.value.context["field"] == "value"
    assert len(value) < 5 or value not in str(caught.value)


@pytest.mark.parametrize("length", [limits.SECRET_VALUE_BYTES_MIN, LONGEST])
def test_a_value_has_from_so_many_bytes_to_so_many(length: int) -> None:
    assert request(value="x" * length).value.reveal() == "x" * length


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"name": "Upper"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"hosts": ()}, "hosts"),
        ({"hosts": HOSTS * (limits.SECRET_HOSTS_MAX + 1)}, "hosts"),
        ({"header": ""}, "header"),
        ({"header": "X" * (limits.SECRET_HEADER_CHARS_MAX + 1)}, "header"),
        ({"header": "X-A\r\nX-B"}, "header"),
        ({"header": "X A"}, "header"),
        ({"header": "Host"}, "header"),
        ({"header": "transfer-encoding"}, "header"),
        ({"env": "1ST"}, "env"),
        ({"env": "A=B"}, "env"),
        ({"env": "A" * 65}, "env"),
    ],
)
def test_what_is_no_secret_is_one_error_of_its_field(
    members: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(**members)  # type: ignore[arg-type]  # what a test gives
    assert caught.value.context["field"] == field
    assert GOOD not in str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "192.0.2.1", "2001:db8::1", "internet", "a..example.com", "exa mple.com",
     "https://example.com", "example.com/path", "example.com:0", "example.com:1-3", "a:443/udp",
     "example.com:443/tcp", "*", "*."],
)  # fmt: skip
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_hosts([host])
    assert caught.value.context["field"] == "hosts"


@pytest.mark.parametrize(
    ("hosts", "name", "port", "expected"),
    [
        (["api.example.com"], "api.example.com", 443, True),
        (["API.Example.COM."], "api.example.com", 443, True),
        (["api.example.com"], "api.example.com", 8443, False),
        (["api.example.com"], "x.api.example.com", 443, False),
        (["api.example.com"], "xapi.example.com", 443, False),
        (["*.example.com:8443"], "a.b.example.com", 8443, True),
        (["*.example.com"], "example.com", 443, False),
        (["a.example.com", "b.example.com:1,2"], "b.example.com", 2, True),
    ],
)
def test_a_secret_is_for_its_hosts_and_ports(
    hosts: list[str],
    name: str,
    port: int,
    expected: bool,  # noqa: FBT001 - a table
) -> None:
    made = Secret("t", Tenant("t"), parse_hosts(hosts), "A", None, datetime.now(UTC))
    assert made.is_for(name, port) is expected


def test_a_value_does_not_show_itself() -> None:
    made = request()
    assert GOOD not in f"{made} {made!r} {made.value!s} {[made.value]}"


INTERNET = parse_policy("internet")


@pytest.mark.parametrize(
    ("names", "network"),
    [
        (("a",), None),
        (tuple(f"a{n}" for n in range(limits.SECRETS_PER_SANDBOX_MAX + 1)), INTERNET),
        (("a", "a"), INTERNET),
        (("A b",), INTERNET),
    ],
)
def test_a_fork_uses_secrets_that_can_be(names: tuple[str, ...], network: None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ForkOptions(secrets=names, network=network)
    assert caught.value.context["field"] == "secrets"


def test_as_many_secrets_as_may_be_used_can_be() -> None:
    names = tuple(f"a{n}" for n in range(limits.SECRETS_PER_SANDBOX_MAX))
    assert ForkOptions(secrets=names, network=INTERNET).secrets == names
    assert not hasattr(BranchOptions(), "secrets"), "a branch has those of its source"
