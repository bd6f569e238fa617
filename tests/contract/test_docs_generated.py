"""Pages that follow from the code are what the code makes."""

from __future__ import annotations

import re

import pytest

import forkd
from forkd import limits, types
from tests.contract.test_sdk_signatures import public_classes, public_functions
from tools import gen_docs, gen_limits, gen_python


def test_every_command_is_in_the_reference() -> None:
    page = gen_docs.commands_page()

    assert [each for each in gen_docs.command_names() if f"## `{each}`" not in page] == []


def test_every_limit_of_a_request_is_in_the_reference() -> None:
    page = gen_docs.limits_page()
    names = [name for name in vars(limits) if name.endswith(("_MAX", "_MIN"))]

    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_no_section_of_limits_is_empty() -> None:
    sections = gen_docs.limits_page().split("\n## ")[1:]

    assert [each.partition("\n")[0] for each in sections if "\n| `" not in each] == []


def test_both_names_of_a_switch_are_in_the_reference() -> None:
    page = gen_docs.commands_page()

    assert "| `--wait`, `--no-wait` |" in page
    assert "| `--hold`, `--release` |" in page


@pytest.mark.parametrize(
    ("name", "expression", "shown"),
    [
        ("BODY_BYTES_MAX", "2 * 1024 * 1024", "2 MiB"),
        ("BODY_BYTES_MAX", "65_550", "65,550"),
        ("FORK_COUNT_MAX", "10_000", "10,000"),
        ("TIMEOUT_MAX_S", "604_800.0", "7 days"),
        ("BOOT_TIMEOUT_S", "90.0", "90 s"),
        ("DRAIN_GRACE", "Duration::from_millis(200)", "200 ms"),
        ("RUNS_MAX", "OTHER / 2", "`OTHER / 2`"),
    ],
)
def test_a_value_is_shown_as_a_person_reads_it(name: str, expression: str, shown: str) -> None:
    (found,) = gen_docs._limit(name, expression, "", gen_docs.ROOT / "x.py")  # noqa: SLF001 - the seam

    assert found.value == shown


@pytest.mark.parametrize(
    ("name", "unit", "shown", "change"),
    [
        ("EXEC_TIMEOUT_S_MAX", "s", "7 days", "fixed"),
        ("EXEC_OUTPUT_BYTES_MAX", "bytes", "8 MiB", "fixed"),
        ("FORK_COUNT_MAX", "", "10,000", "fixed"),
        ("disk_limit_mib", "MiB", "10,240 MiB", "`--disk`, or `FORKD_DISK_LIMIT_MIB`"),
    ],
)
def test_a_limit_that_users_meet_is_the_codes(
    name: str, unit: str, shown: str, change: str
) -> None:
    option = "`--disk`, or" if name.islower() else "fixed"
    row = gen_limits.Met("", name, unit, option)

    assert (gen_limits.shown(row), gen_limits.change(row)) == (shown, change)


def test_the_limits_that_users_meet_are_few_and_each_can_be_looked_up() -> None:
    rows = [row for section in gen_limits.SECTIONS.values() for row in section]
    every = gen_docs.limits_page() + gen_docs.settings_table()
    named = [row.name for row in rows if not row.name.endswith(("_DEFAULT", "_KEPT_S"))]

    assert 25 <= len(rows) <= 45
    assert [name for name in named if name not in every and name.upper() not in every] == []


def test_options_that_change_a_limit_exist() -> None:
    page = gen_docs.commands_page()
    options = re.findall(r"`(--[a-z-]+)`", gen_limits.page())

    assert options
    assert [each for each in options if f"`{each}`" not in page] == []


PYTHON = gen_python.page()


@pytest.mark.parametrize(
    "name",
    [
        *(f"forkd.{each}" for each in forkd.__all__),
        *(f"forkd.types.{each}" for each in types.__all__),
    ],
)
def test_every_public_name_is_in_the_reference_of_the_sdk(name: str) -> None:
    last = name.rpartition(".")[2]

    assert (
        f"\n## {last}\n" in PYTHON
        or f"import {last.removeprefix('Async')}, {last}`" in PYTHON
        or f"| `{name}` |" in PYTHON
    )


def test_every_method_of_the_sdk_is_in_its_reference() -> None:
    methods = {
        f"{kind.__name__}.{name}"
        for kind in public_classes()
        for name, _ in public_functions(kind)
        if not name.startswith("_") and not kind.__name__.startswith("Async")
    }

    assert len(methods) > 100
    assert [each for each in methods if f"\n### {each}" not in PYTHON] == []


def test_the_code_of_a_docstring_is_a_block_of_code() -> None:
    """Somebody copies it, so its lines and their indents are those of the source."""

    def example() -> None:
        """Say how.  A sentence that names `<this>` and <that>.

            with a() as b:
                b()

        After it.

        Args:
            x: Which one, in a line
                that goes on.

        Raises:
            KeyError: There is none.
        """

    assert list(gen_python.rendered(example)) == [
        "Say how. A sentence that names `<this>` and &lt;that>.",
        "",
        "```python",
        "with a() as b:",
        "    b()",
        "```",
        "",
        "After it.",
        "",
        "Arguments:",
        "",
        "- `x`: Which one, in a line that goes on.",
        "",
        "Raises:",
        "",
        "- `KeyError`: There is none.",
    ]
