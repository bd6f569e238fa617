"""The helper machine's images are those of the recipes that the selected tests bake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.machine.recipes import baked_by, runs_container_image
from tests.support.real_host import POSTGRESQL, RECIPE, RECIPES, SOAK_RECIPES, WARMED

REDIS = next(each for each in WARMED if each.name == "redis")


@pytest.mark.parametrize(
    ("names", "parameters", "more"),
    [
        ({}, {}, set()),
        ({"RECIPE": RECIPE, "OTHER": 3}, {"count": 4}, set()),
        ({"POSTGRESQL": POSTGRESQL}, {}, {POSTGRESQL}),
        ({}, {"host": "redis"}, {REDIS}),
        ({"FOLDERS": [POSTGRESQL]}, {"recipe": REDIS}, {REDIS}),
    ],
)
def test_a_test_bakes_what_its_module_or_a_parameter_names(
    names: dict[str, object], parameters: dict[str, object], more: set[object]
) -> None:
    callspec = SimpleNamespace(params=parameters) if parameters else None
    item = SimpleNamespace(module=SimpleNamespace(**names), callspec=callspec)

    assert baked_by(item) == {*RECIPES, *more}  # type: ignore[arg-type]  # as much as is looked at
    assert set(SOAK_RECIPES) >= {*RECIPES, *more}


@pytest.mark.parametrize(("fixtures", "runs"), [([], False), (["container_image", "bakes"], True)])
def test_a_test_runs_the_container_image_if_it_asks_for_it(
    fixtures: list[str], *, runs: bool
) -> None:
    item = SimpleNamespace(fixturenames=fixtures)

    assert runs_container_image(item) is runs  # type: ignore[arg-type]  # as much as is looked at
