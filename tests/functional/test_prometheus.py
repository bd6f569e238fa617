"""A Prometheus server scrapes a daemon over TCP and evaluates the alerts that we ship."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fake_daemon import FakeDaemon
from tests.support.prometheus import SHIPPED, configuration, promtool, running, until_answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.needs("prometheus")

RULES_TEST = SHIPPED / "forkd.rules.test.yml"

OF_THE_HOST = "ForkdDiskNearlyFull"
"""An alert about the disk on which the tests run, which may be so full."""


async def test_a_server_scrapes_a_daemon_and_evaluates_the_rules(
    fake_host: FakeHost, tmp_path: Path
) -> None:
    (folder := tmp_path / "prometheus").mkdir()
    with FakeDaemon(fake_host, tcp=True) as daemon:
        asked = {"name": "prometheus", "scopes": ["metrics"]}
        made = daemon.http.post("/v2/tokens", json=asked)
        assert made.status_code == 201, made.text
        target = daemon.tcp_url.removeprefix("http://")
        config = configuration(folder, target, made.json()["token"])
        promtool("check", "config", config)
        async with running(config) as prometheus:
            targets = await until_answer(prometheus, "/targets", both_up)
            assert {each["lastError"] for each in targets["activeTargets"]} == {""}
            rules = await until_answer(prometheus, "/rules", evaluated)
            raised = {each["name"] for each in rules_of(rules) if each["state"] != "inactive"}
            assert raised <= {OF_THE_HOST}
            query = "/query?query=forkd_sandboxes{job='forkd',state='running'}"
            found = await until_answer(prometheus, query, lambda data: data["result"])
            assert found["result"][0]["value"][1] == "0"

            os.kill(daemon.pid, signal.SIGTERM)
            daemon.until_ended()
            await until_answer(prometheus, "/rules", down)
    assert fake_host.left_over() == []


def both_up(data: Any) -> bool:  # noqa: ANN401 - JSON
    return [each["health"] for each in data["activeTargets"]] == ["up", "up"]


def rules_of(data: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - JSON
    return [rule for group in data["groups"] for rule in group["rules"]]


def evaluated(data: Any) -> bool:  # noqa: ANN401 - JSON
    rules = rules_of(data)
    return len(rules) == 7 and all(each["health"] == "ok" for each in rules)


def down(data: Any) -> bool:  # noqa: ANN401 - JSON
    return {each["name"] for each in rules_of(data) if each["state"] != "inactive"} == {"ForkdDown"}


def test_every_alert_is_raised_when_it_should_be_and_only_then() -> None:
    said = promtool("test", "rules", RULES_TEST)

    rules = (SHIPPED / "forkd.rules.yml").read_text(encoding="utf-8")
    tested = RULES_TEST.read_text(encoding="utf-8")
    alerts = [line.split()[-1] for line in rules.splitlines() if "- alert:" in line]
    assert [each for each in alerts if f'alertname="{each}"' not in tested] == []
    assert "SUCCESS" in said
