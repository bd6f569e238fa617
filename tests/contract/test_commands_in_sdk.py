"""Each command has a method of the SDK, or is about this host: docs/howto/use-the-sdk.md."""

from __future__ import annotations

import re

import forkd
from forkd import types
from forkd.cli.commands import LISTED
from tests.support.docs import ROOT

ROOTS: dict[str, type] = {
    "Sandbox": forkd.Sandbox,
    "client": forkd.Client,
    "sandbox": forkd.Sandbox,
    "sandboxes": forkd.Sandboxes,
}

MEMBERS: dict[tuple[type, str], type] = {
    (forkd.Client, "images"): types.Images,
    (forkd.Client, "recipes"): types.Recipes,
    (forkd.Client, "sandboxes"): types.SandboxCollection,
    (forkd.Client, "secrets"): types.Secrets,
    (forkd.Client, "snapshots"): types.Snapshots,
    (forkd.Client, "tenants"): types.Tenants,
    (forkd.Client, "tokens"): types.Tokens,
    (forkd.Sandbox, "files"): types.Files,
    (forkd.Sandbox, "network"): types.Network,
}
"""What attributes are that an object gets when it is made."""

SECTION = "## From commands to methods"


def page() -> str:
    text = (ROOT / "docs/howto/use-the-sdk.md").read_text(encoding="utf-8")
    return text.split(SECTION)[1].split("\n## ")[0]


def test_each_command_has_its_row_or_its_reason() -> None:
    rows = re.findall(r"^\| `forkd ([a-z]+)` \|", page(), re.MULTILINE)
    local = re.findall(r"`([a-z]+)`", page().split("|")[-1])
    assert sorted([*rows, *local]) == sorted(name for name, each in LISTED.items() if each.summary)


def test_each_method_that_is_named_is_there() -> None:
    named = re.findall(r"`([A-Za-z]+\.[a-z_.]+)`", page())
    methods = [each for each in named if each.split(".")[0] in ROOTS]
    assert methods
    for method in methods:
        first, *names = method.split(".")
        found: object = ROOTS[first]
        for name in names:
            inner = MEMBERS.get((found, name)) if isinstance(found, type) else None
            found = getattr(found, name, None) if inner is None else inner
            assert found is not None, method
