"""What can be seen has the names that are declared, in code, dashboard and alerts."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections import Counter

import pytest

import forkd.service
from forkd.model.sandbox import SandboxState
from forkd.model.snapshot import SnapshotStatus
from forkd.service.use_case import DECLARED, UseCase
from forkd.telemetry import names
from tests.support.docs import ROOT


def declared() -> list[str]:
    """Return the name of every use case of every component."""
    found = {}
    for module in pkgutil.walk_packages(forkd.service.__path__, "forkd.service."):
        for _, component in inspect.getmembers(
            importlib.import_module(module.name), inspect.isclass
        ):
            for method in vars(component).values():
                if isinstance(use_case := getattr(method, DECLARED, None), UseCase):
                    found[method.__qualname__] = use_case.name
    return list(found.values())


def test_the_names_of_operations_are_those_of_the_use_cases() -> None:
    assert Counter(declared()) == Counter(names.OPERATION_NAMES - {names.EXEC})


def test_metrics_are_named_by_the_conventions() -> None:
    for each in names.ALL:
        assert re.fullmatch(r"(forkd|process)_[a-z_]+", each.name), each
        assert (each.kind is names.Kind.COUNTER) == each.name.endswith("_total"), each
        assert each.kind is not names.Kind.HISTOGRAM or each.name.endswith("_seconds"), each
        assert each.meaning.endswith("."), each
        assert not {"id", "sandbox", "tag", "tenant", "token"} & set(each.labels), each


# Dashboard and alerts

RULES = (ROOT / "packaging/prometheus/forkd.rules.yml").read_text(encoding="utf-8")
DASHBOARD = (ROOT / "packaging/grafana/forkd.json").read_text(encoding="utf-8")

EXPRESSION = re.compile(r"^( +)expr: (?:\|\n((?:\1  .*\n)+)|(.+))", re.MULTILINE)
SELECTOR = re.compile(r"([a-z_]+)\{([^}]*)\}")
MATCHER = re.compile(r'([a-z_]+)(?:=~|!~|!=|=)"([^"]*)"')
CLAUSE = re.compile(r"\b(by|without|on|ignoring)\s*\(([^)]*)\)")
WORDS = {"up", "and", "or", "unless", "bool", "offset", "label_values", "instance"}

SCRAPED = {
    name
    for each in names.ALL
    for name in (
        [f"{each.name}_{ending}" for ending in ("bucket", "sum", "count")]
        if each.kind is names.Kind.HISTOGRAM
        else [each.name]
    )
}
"""Every name that a query can ask for."""

TARGETS = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of the buckets of a histogram."""

VALUES = {
    "operation": names.OPERATION_NAMES,
    "state": {*SandboxState, "running", "waiting"},
    "status": set(SnapshotStatus),
    "folder": {"state", "tops"},
    "kind": {"http", "websocket"},
}
"""What labels can be, but for `result`."""


def expressions() -> list[str]:
    """Return every query there is."""
    rules = [one or many for _, many, one in EXPRESSION.findall(RULES)]
    dashboard = json.loads(DASHBOARD)
    panels = [each["expr"] for panel in dashboard["panels"] for each in panel.get("targets", ())]
    variables = [
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if each["type"] == "query"
    ]
    return rules + panels + variables


def named_in(expression: str) -> set[str]:
    """Return the metrics that a query names."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", CLAUSE.sub(" ", expression))
    functions = set(re.findall(r"\b([a-z_]\w*)\s*\(", bare))
    return set(re.findall(r"\b[a-z_]\w*", bare)) - functions - WORDS


def test_there_are_queries_to_check() -> None:
    assert len(EXPRESSION.findall(RULES)) == RULES.count("- alert:") == 7
    assert named_in('sum by (le) (rate(a_bucket{x="y"}[5m])) / b_total > 1') == {
        "a_bucket",
        "b_total",
    }


@pytest.mark.parametrize("expression", expressions())
def test_every_query_names_metrics_and_labels_that_exist(expression: str) -> None:
    assert named_in(expression) <= SCRAPED
    labels = {
        name: {*each.labels, *TARGETS}
        for each in names.ALL
        for name in (each.name, *(f"{each.name}_{end}" for end in ("bucket", "sum", "count")))
    }
    for name, matchers in SELECTOR.findall(expression):
        for label, value in MATCHER.findall(matchers):
            assert label in labels.get(name, TARGETS), (name, label)
            if label in VALUES:
                assert set(value.split("|")) <= VALUES[label], value


def test_every_clause_names_labels_that_exist() -> None:
    known = {label for each in names.ALL for label in each.labels} | TARGETS
    clauses = [by for each in expressions() for _, by in CLAUSE.findall(each)]

    assert {label.strip() for by in clauses for label in by.split(",")} <= known


def test_the_dashboard_shows_every_metric_of_ours() -> None:
    shown = set[str]().union(*map(named_in, expressions()))
    ours = [each.name for each in names.OURS]

    assert [each for each in ours if not any(name.startswith(each) for name in shown)] == []
