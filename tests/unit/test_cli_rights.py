"""`forkd tenant set` changes the quotas that are given, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from forkd import Client
from forkd.errors import InvalidRequest
from forkd.limits import QUOTA_MAX
from tests.support.daemon import TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.cli import Ended
    from tests.support.daemon import RunningDaemon

    Forkd = Callable[..., Ended]

ADMIN = {"Authorization": f"Bearer {TOKEN}"}

NONE = dict.fromkeys(
    ("sandboxes", "vcpus", "memory_mib", "disk_mib", "snapshot_mib", "forks_per_minute")
)


def test_a_quota_that_is_not_given_stays(forkd: Forkd) -> None:
    forkd("tenant", "set", "team", "--sandboxes", "200", "--memory", "64g")

    made = forkd("tenant", "set", "team", "--memory", "1g", "--vcpus", "0", "--json").document

    assert made["quotas"] == {**NONE, "sandboxes": 200, "memory_mib": 1024, "vcpus": 0}


def test_unlimited_lifts_a_limit(forkd: Forkd) -> None:
    forkd("tenant", "set", "team", "--sandboxes", "200", "--snapshots", "1g")

    options = ["--sandboxes", "unlimited", "--snapshots", "unlimited", "--disk", "0"]
    made = forkd("tenant", "set", "team", *options, "--json").document

    assert made["quotas"] == {**NONE, "disk_mib": 0}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "there is nothing to change: give a quota, such as --sandboxes 200"),
        (["--sandboxes", "many"], "--sandboxes: 'many' is not a quota; write a whole number, or"),
        (["--sandboxes", "-1"], "--sandboxes: '-1' is not a quota"),
        (["--vcpus", "²"], "--vcpus: '²' is not a quota"),
        (
            ["--vcpus", str(QUOTA_MAX + 1)],
            "--vcpus: 1.09951e+12 is out of range; it must be at most",
        ),
        (["--forks-per-minute", "9" * 5_000], "--forks-per-minute: 1e+18 is out of range"),
        (["--memory", "5 parsecs"], "--memory: '5 parsecs' is not a size"),
    ],
)
def test_a_quota_that_is_none_is_one_error_and_nothing_is_changed(
    forkd: Forkd, options: list[str], said: str
) -> None:
    forkd("tenant", "set", "team", "--disk", "7g")

    ended = forkd("tenant", "set", "team", *options)

    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert forkd("tenant", "ls", "--json").document[-1]["quotas"] == {**NONE, "disk_mib": 7168}


def test_the_sdk_changes_and_the_wire_tells_null_from_nothing(daemon: RunningDaemon) -> None:
    path = "/v2/tenants/team/quotas"
    with Client(daemon.url) as client, httpx.Client(base_url=daemon.tcp_url, headers=ADMIN) as http:
        client.tenants.set_quotas("team", sandboxes=3, vcpus=4)

        assert client.tenants.change_quotas("team", sandboxes="unlimited").quotas.vcpus == 4
        with pytest.raises(InvalidRequest, match="nothing to change"):
            client.tenants.change_quotas("team")
        changed = http.patch(path, json={"vcpus": None, "disk_mib": 5}).json()["quotas"]
        assert changed == {**NONE, "disk_mib": 5}
        assert http.put(path, json={"vcpus": 2}).json()["quotas"] == {**NONE, "vcpus": 2}
        assert http.patch(path, json={}).status_code == 400
