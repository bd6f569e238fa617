"""Networks of sandboxes from outside: over REST, by the SDK, by `forkd network`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.errors import Conflict, InvalidRequest
from tests.support.fake_service import some_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    daemon.service.stored = some_snapshots("warm")
    with Client(daemon.url) as client:
        yield client


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (True, ["host"]),
        (False, None),
        (None, None),
        ("none", None),
        ("internet", ["internet"]),
        (["example.com:443", "192.0.2.0/24"], ["192.0.2.0/24", "example.com:443"]),
        ("deny-all", []),
    ],
)
def test_a_fork_has_the_network_that_it_asked_for(
    client: Client,
    given: bool | str | list[str] | None,  # noqa: FBT001 - a table
    rules: list[str] | None,
) -> None:
    (made,) = client.fork("warm", network=given)

    assert made.info.network == rules
    assert (made.info.guest_addr_v6 is None) == (rules is None)


@pytest.mark.parametrize(
    "given",
    [5, [5], "10.0.0.1/8", ["none", "internet"], [f"a{n}.example.com" for n in range(10_000)]],
)
def test_a_malformed_policy_is_one_error_of_its_field(
    client: Client, given: str | list[str]
) -> None:
    for refused in (
        lambda: client.fork("warm", network=given),
        lambda: client.fork("warm", network="internet")[0].network.change(given),
    ):
        with pytest.raises(InvalidRequest) as caught:
            refused()
        assert caught.value.context["field"] == "network"
    assert len(client.sandboxes.list()) == 1


def test_egress_cannot_be_held_without_a_network(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.fork("warm", hold_egress=True)

    assert caught.value.context["field"] == "hold_egress"


def test_a_network_is_changed_while_its_sandbox_runs(client: Client) -> None:
    (made,) = client.fork("warm", network="deny-all")

    assert made.network.change(allow=["example.com"]).network == ["example.com"]
    assert made.network.change("internet", hold_egress=True).egress_held
    shown = made.network.status()

    assert (shown.network, shown.egress_held) == (["internet"], True)
    assert made.refresh().egress_held


def test_a_bandwidth_is_limited_at_a_fork_and_while_its_sandbox_runs(client: Client) -> None:
    (made,) = client.fork("warm", network="internet", bandwidth_limit_mbit=10)
    assert made.info.bandwidth_limit_mbit == 10
    assert made.set_limits(bandwidth_limit_mbit=20).bandwidth_limit_mbit == 20
    with pytest.raises(InvalidRequest, match="there is none to limit"):
        client.fork("warm", bandwidth_limit_mbit=10)


def test_a_sandbox_without_a_network_says_so(client: Client) -> None:
    (made,) = client.fork("warm")

    for ask in (made.network.status, lambda: made.network.change("internet")):
        with pytest.raises(Conflict, match="without a network"):
            ask()


def test_a_link_cannot_be_taken_from_a_running_sandbox(client: Client) -> None:
    (made,) = client.fork("warm", network="internet")

    with pytest.raises(InvalidRequest, match="deny-all"):
        made.network.change("none")


def test_the_command_line_shows_and_changes_a_network(
    client: Client, forkd: Callable[..., Ended]
) -> None:
    made = forkd("fork", "warm", "--network", "example.com:443", "--network", "192.0.2.1")
    id_ = made.out.strip()

    shown = forkd("network", id_)
    assert shown.out.split() == ["192.0.2.1", "example.com:443"]
    assert "10.200.0.2, by 10.200.0.1" in shown.err
    assert "fd66:6b64:ac8::2, by fd66:6b64:ac8::1" in shown.err
    assert "(nothing)" in forkd("network", id_, "--deny-all").out
    allowed = forkd("network", id_, "--allow", "internet", "--hold", "--json")
    assert allowed.document["network"] == ["internet"]
    assert allowed.document["egress_held"] is True
    assert "held" in forkd("network", id_).err
    assert forkd("network", id_, "--deny-all", "--set", "internet").code != 0
    assert client.sandboxes.get(id_).network.status().network == ["internet"]


def test_the_command_line_holds_the_egress_of_a_branch(
    client: Client, forkd: Callable[..., Ended]
) -> None:
    (source,) = client.fork("warm", network="internet")

    ended = forkd("branch", source.id, "--hold-egress", "--json")

    (sibling,) = ended.document["sandboxes"]
    assert sibling["egress_held"] is True
