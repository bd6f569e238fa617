"""The Python of the documentation does on real machines what its pages say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from forkd.sdk import _defaults
from tests.support.docs import ROOT, blocks, load_example, load_program, page_id, pages, run_python
from tests.support.real_daemon import daemon_of
from tests.support.real_host import REAL_IN_SOAK, TAG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.real_host import RealHost

pytestmark = [*REAL_IN_SOAK, pytest.mark.timeout(600)]

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/quickstart.md",
    ROOT / "docs/tutorial/first-forks.md",
    ROOT / "docs/howto/use-the-sdk.md",
    ROOT / "docs/howto/run-tasks-in-forks.md",
    ROOT / "docs/howto/move-from-e2b.md",
    ROOT / "docs/howto/move-from-forkd.md",
]

REPLACED = {'"numpy"': f'"{TAG}"', ", 100)": ", 10)"}
"""The snapshot that is baked here; and fewer children, since a hundred are the demo's business."""


@pytest.fixture(autouse=True)
def _connections_end_with_the_program() -> Iterator[None]:
    """Close what `Sandbox(…)` without a client has opened, as the end of a program does."""
    yield
    _defaults.close_all()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
async def test_the_python_of_a_page_runs_on_real_machines(
    page: Path, real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        await asyncio.to_thread(run_python, page, replaced=REPLACED)


MACHINE = "python machine"
"""Blocks that a daemon in memory cannot run: their programs need files and a shell."""


@pytest.mark.parametrize("page", [each for each in pages() if blocks(each, MACHINE)], ids=page_id)
async def test_the_python_that_needs_a_machine_runs_on_one(
    page: Path, real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        await asyncio.to_thread(run_python, page, info=MACHINE, replaced=REPLACED)


EXAMPLES: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "tool_loop": lambda _: (),
    "best_of_n": lambda _: (),
    "episodes": lambda _: (),
    "database_per_test": lambda _: (),
    "parallel_tests": lambda folder: (folder, "python3"),
}
"""The programs in examples/, and what their `main` is given."""

RESULTS: dict[str, Callable[[Any], bool]] = {
    "tool_loop": lambda answer: answer == "The largest number is 3.",
    "best_of_n": lambda scores: scores[0] == scores[1],
    "episodes": lambda ends: ends["always right"] == 5,
    "database_per_test": lambda rows: rows == 1000,
    "parallel_tests": lambda passed: passed == {"test_bad.py": False, "test_good.py": True},
}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_an_example_does_on_real_machines_what_it_shows(
    name: str, real_host: RealHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_good.py").write_text("assert 1 + 1 == 2\n")
    (tmp_path / "test_bad.py").write_text("assert 1 + 1 == 3\n")
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        main = load_example(name, replaced=REPLACED)["main"]
        result = await asyncio.to_thread(main, *EXAMPLES[name](tmp_path))

    assert RESULTS[name](result)


PROGRAMS: dict[str, Callable[[Any], bool]] = {
    "coding-agent-fork": lambda diff: "+    return '-'.join(title.lower().split())" in diff,
    "speculative-agent": lambda won: won[1][0] == "turn parts around" and won[1][1] < won[0][1],
}
"""The programs of recipes, and what their `main` returns."""


@pytest.mark.parametrize("name", PROGRAMS)
async def test_the_program_of_a_recipe_does_on_real_machines_what_its_page_says(
    name: str, real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        main = load_program(ROOT / "recipes" / name / "run.py")["main"]
        result = await asyncio.to_thread(main, str(TAG))

    assert PROGRAMS[name](result)


async def test_an_agent_over_mcp_does_on_real_machines_what_its_page_says(
    real_host: RealHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_of(real_host) as url:
        monkeypatch.setenv("FORKD_URL", url)
        main = load_program(ROOT / "recipes" / "mcp-agent" / "run.py")["main"]
        ended = await main(str(TAG))

    assert ended == {"scores": [1, 3, 5], "kept": 3723}
