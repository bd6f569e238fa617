"""Every module has its place among the others, and no imports lead in a circle."""

from __future__ import annotations

import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import grimp
import pytest

if TYPE_CHECKING:
    from grimp import ImportGraph

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    """The imports of all modules, those for type checkers included."""
    return grimp.build_graph("forkd", exclude_type_checking_imports=False, cache_dir=None)


def test_each_package_has_a_contract_that_names_all_its_modules(graph: ImportGraph) -> None:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]
    exhaustive = {
        package
        for contract in contracts
        if contract.get("exhaustive")
        for package in contract["containers"]
    }

    assert {each for each in graph.modules if graph.find_children(each)} == exhaustive


def test_no_contract_has_exceptions() -> None:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["contracts"]

    assert [each["name"] for each in contracts if "ignore_imports" in each] == []
    assert [each["name"] for each in contracts if "exhaustive_ignores" in each] == []


def test_no_imports_lead_in_a_circle(graph: ImportGraph) -> None:
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}

    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" < ".join(error.args[1]))
