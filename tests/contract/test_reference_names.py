"""Our package has the names and parameters of the reference's Python package."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from typing import Any

import pytest

import forkd.compat
from forkd.sdk._endpoint import URL_DEFAULT
from tests.support.reference import CLIENTS

pytestmark = pytest.mark.needs("reference")

LIST = """
import inspect, json, forkd
def parameters(made):
    found = inspect.signature(made).parameters.values()
    return [[each.name, each.kind.name, repr(each.default)] for each in found]
said = {"all": forkd.__all__, "of": {}, "url": forkd.Controller().base_url}
for name in ("Sandbox", "Controller", "ControllerError", "CommandResult"):
    kind = getattr(forkd, name)
    said["of"][name] = parameters(kind.__init__)
    for member, made in vars(kind).items():
        if not member.startswith("_") and callable(made):
            said["of"][f"{name}.{member}"] = parameters(made)
print(json.dumps(said))
"""

PARTLY = {"Sandbox.create"}
"""Takes whatever the class takes, in both."""


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-S", "-P", "-c", LIST],
        env={"PYTHONPATH": str(CLIENTS), "PATH": os.defpath},
        capture_output=True,
        check=True,
        timeout=60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_all_its_names_are_ours(theirs: dict[str, Any]) -> None:
    assert set(theirs["all"]) <= set(forkd.__all__)
    assert set(theirs["all"]) <= {*forkd.compat.__all__, "__version__"}


def test_our_sandbox_takes_what_its_constructor_takes(theirs: dict[str, Any]) -> None:
    ours = inspect.signature(forkd.Sandbox).parameters

    for name, kind, _ in theirs["of"]["Sandbox"][1:]:
        assert ours[name].kind.name == kind
    positional = [name for name, each in ours.items() if each.kind.name != "KEYWORD_ONLY"]
    assert positional == ["tag", "target", "timeout"]


def test_its_default_address_is_ours(theirs: dict[str, Any]) -> None:
    assert theirs["url"] == URL_DEFAULT


def test_all_its_methods_have_the_same_parameters_here(
    theirs: dict[str, Any],
) -> None:
    assert len(theirs["of"]) > 15
    for path, parameters in theirs["of"].items():
        if path in PARTLY:
            continue
        owner, _, member = path.partition(".")
        kind = getattr(forkd.compat, owner)
        ours = inspect.signature(getattr(kind, member or "__init__")).parameters
        found = [[each.name, each.kind.name, repr(each.default)] for each in ours.values()]
        assert found == parameters, path
