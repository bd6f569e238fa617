"""What can be seen has the names that are declared, in code, dashboard and alerts."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections import Counter

import forkd.service
from forkd.service.use_case import DECLARED, UseCase
from forkd.telemetry import names


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
