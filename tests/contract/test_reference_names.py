"""Our package has the names and parameters of the reference's Python package."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys

import pytest

import forkd
from tests.support.reference import CLIENTS

pytestmark = pytest.mark.needs("reference")

LIST = """
import inspect, json, forkd
def parameters(made):
    found = inspect.signature(made).parameters.values()
    return [[each.name, each.kind.name, repr(each.default)] for each in found]
said = {"all": forkd.__all__, "of": {}}
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
def theirs() -> dict[str, dict[str, list[list[str]]]]:
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-S", "-P", "-c", LIST],
        env={"PYTHONPATH": str(CLIENTS), "PATH": os.defpath},
        capture_output=True,
        check=True,
        timeout=60,
    )
    found: dict[str, dict[str, list[list[str]]]] = json.loads(done.stdout)
    return found


def test_all_its_names_are_ours(theirs: dict[str, dict[str, list[list[str]]]]) -> None:
    assert set(theirs["all"]) <= set(forkd.__all__)


def test_all_its_methods_have_the_same_parameters_here(
    theirs: dict[str, dict[str, list[list[str]]]],
) -> None:
    assert len(theirs["of"]) > 15
    for path, parameters in theirs["of"].items():
        if path in PARTLY:
            continue
        owner, _, member = path.partition(".")
        ours = inspect.signature(getattr(getattr(forkd, owner), member or "__init__")).parameters
        found = [[each.name, each.kind.name, repr(each.default)] for each in ours.values()]
        assert found == parameters, path
