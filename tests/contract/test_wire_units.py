"""A time in seconds has one spelling over the API: `_secs`."""

from __future__ import annotations

import json
from pathlib import Path

DOCUMENT = json.loads(
    (Path(__file__).parents[2] / "protocol/rest/openapi-v2.json").read_text(encoding="utf-8")
)

PUBLISHED = {"ExecExit.duration_s", "ExecResult.duration_s", "HostInfo.uptime_s", "Pong.uptime_s"}
"""Members of answers that had another one before there was a rule; nothing is ever renamed."""

RATE = "_mib_s"
"""Ends what is no time but an amount a second."""


def test_a_time_in_seconds_ends_with_secs() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    members = {f"{kind}.{each}" for kind in schemas for each in schemas[kind].get("properties", {})}
    asked = {
        parameter["name"]
        for path in DOCUMENT["paths"].values()
        for operation in path.values()
        for parameter in operation.get("parameters", [])
    }

    named = {each for each in members | asked if each.endswith(("_s", "_seconds"))}
    assert {each for each in named if not each.endswith(RATE)} == PUBLISHED
