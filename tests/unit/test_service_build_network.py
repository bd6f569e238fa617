"""What builds may download from, as an operator says it, and where proxies are."""

from __future__ import annotations

import pytest

from forkd.errors import InvalidRequest
from forkd.service.build_network import parse, proxies_of


def test_rules_are_those_of_sandboxes_with_spaces_between() -> None:
    policy = parse("internet mirror.example.com:80  10.1.2.0/24:80,443/tcp")

    assert policy is not None
    assert policy.rules() == ("internet", "10.1.2.0/24:80,443/tcp", "mirror.example.com:80")


def test_any_is_no_policy() -> None:
    assert parse(" any ") is None


@pytest.mark.parametrize(
    "text", ["none", "*.example.com:80", "10.0.0.0/33", "internet 10.1.2.3:99999", "internet none"]
)
def test_what_builds_cannot_have_is_refused_by_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^build_network: ") as refused:
        parse(text)

    assert refused.value.context["field"] == "build_network"


@pytest.mark.parametrize(
    ("variables", "places"),
    [
        ({"https_proxy": "http://user:word@proxy.corp:3128"}, (("proxy.corp", 3128),)),
        ({"HTTP_PROXY": "proxy.corp:8080"}, (("proxy.corp", 8080),)),
        ({"ALL_PROXY": "socks5h://[2001:db8::1]"}, (("2001:db8::1", 1080),)),
        ({"http_proxy": "http://a", "HTTPS_PROXY": "http://a"}, (("a", 80),)),
        ({"NO_PROXY": "http://a", "https_proxy": ""}, ()),
        ({"https_proxy": "http://a:port"}, ()),
        ({"https_proxy": "http://["}, ()),
    ],
)
def test_proxies_are_where_the_environment_says(
    variables: dict[str, str], places: tuple[tuple[str, int], ...]
) -> None:
    assert proxies_of(variables) == places
