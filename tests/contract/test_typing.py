"""Type checkers know every public name, and agree on what each call returns.

`make types` has mypy check the same file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forkd
from forkd import types

FOLDER = Path(__file__).parents[1] / "typing"


@pytest.mark.parametrize("name", [*forkd.__all__, *types.__all__])
def test_every_public_name_is_checked(name: str) -> None:
    text = (FOLDER / "every_name.py").read_text(encoding="utf-8")
    used = text.partition("\ndef first_lines")[2]

    assert re.search(rf"\b{name}\b", used)


def test_pyright_finds_nothing_to_complain_of() -> None:
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-m", "basedpyright", "-p", str(FOLDER)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 0, done.stdout
