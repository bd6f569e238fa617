"""The reference written by hand has everything that the code has."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from forkd import errors
from forkd.cli.context import EXIT_CODES, exit_code
from forkd.daemon.settings import Settings, variable
from tests.support.docs import ROOT
from tools.gen import walk

if TYPE_CHECKING:
    from pathlib import Path

REFERENCE = ROOT / "docs/reference"
ERRORS = (REFERENCE / "errors.md").read_text(encoding="utf-8")
CONFIGURATION = (REFERENCE / "configuration.md").read_text(encoding="utf-8")

ALL = {each.code: each for each in walk(errors.ForkdError)}
DOCUMENTED = json.loads((ROOT / "protocol/rest/errors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("code", ALL)
def test_every_error_code_is_explained_with_its_status(code: str) -> None:
    kind = ALL[code]
    status = DOCUMENTED[code]["status"] or "none"

    row = f"| `{code}` | `{kind.__name__}` | {status} | {exit_code(kind('x'))} |"
    assert row in ERRORS


def test_no_error_code_is_explained_that_does_not_exist() -> None:
    first = ERRORS.partition("\n## ")[0]

    assert set(re.findall(r"^\| `(\w+)` \| `\w+` \|", first, re.MULTILINE)) == set(ALL)


def test_exit_statuses_are_those_of_the_command() -> None:
    assert set(EXIT_CODES.values()) == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("source", "heading"),
    [
        ("crates/proto/src/guest/reply.rs", "## What the agent says"),
        ("crates/proto/src/control/reply.rs", "## What a VMM says"),
    ],
)
def test_every_code_of_a_protocol_is_explained(source: str, heading: str) -> None:
    section = ERRORS.partition(heading)[2].partition("\n## ")[0]
    codes = variants(ROOT / source, "ErrorCode")

    assert codes
    assert [code for code in codes if f"`{code}`" not in section] == []


def variants(path: Path, name: str) -> list[str]:
    """Return the variants of a Rust enum, as serde writes them."""
    body = path.read_text(encoding="utf-8").partition(f"pub enum {name} {{")[2].partition("\n}")[0]
    found = re.findall(r"^    ([A-Z]\w*),?$", body, re.MULTILINE)
    return [re.sub(r"(?<!^)([A-Z])", r"_\1", each).lower() for each in found if each != "Unknown"]


def test_every_variable_of_the_environment_is_in_the_reference() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/forkd").rglob("*.py")
    )
    names = set(re.findall(r"\b(FORKD_[A-Z_]+|XDG_[A-Z_]+)\b", sources))

    assert {name for name in names if f"`{name}`" not in CONFIGURATION} == {
        name for name in names if name in EXPLAINED_ELSEWHERE
    }


EXPLAINED_ELSEWHERE = {"XDG_STATE_HOME"}
"""Named in the default of another."""


def test_no_variable_is_in_the_reference_that_nobody_reads() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/forkd").rglob("*.py")
    )
    row = re.compile(r"^\|(?: `[a-z0-9_]+` \|)? `(FORKD_[A-Z_]+)` \|", re.MULTILINE)
    named = set(row.findall(CONFIGURATION))
    settings = {variable(name) for name in Settings.model_fields}

    assert settings <= named
    assert {name for name in named - settings if name not in sources} == set()


def test_every_route_is_in_the_table() -> None:
    document = json.loads((ROOT / "protocol/rest/openapi-v2.json").read_text(encoding="utf-8"))
    page = (REFERENCE / "rest.md").read_text(encoding="utf-8")

    assert [path for path in document["paths"] if f"{path}`" not in page] == []
