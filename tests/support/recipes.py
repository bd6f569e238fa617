"""Whatever a path may name in place of a recipe."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from forkd.images.recipe import RECIPE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NO_RECIPES = [
    pytest.param(b"name = ", "is not TOML", id="cut-short"),
    pytest.param(b"\xff", "is not UTF-8", id="not-text"),
    pytest.param(b"#" * (RECIPE_BYTES_MAX + 1), "is larger than", id="one-byte-too-large"),
    pytest.param(b"x = " + b"[" * 5_000 + b"]" * 5_000, "nested too deeply", id="deep-arrays"),
    pytest.param(b"x = " + b"{x=" * 5_000 + b"1" + b"}" * 5_000, "nested too deeply", id="deep"),
    pytest.param(b".".join([b"x"] * 202) + b" = 1", "more than 200 dots", id="deep-keys"),
    pytest.param(b".".join([b"x"] * 201) + b" = 1", "unknown key", id="deepest-keys"),
    pytest.param(b"x = " + b"9" * 5_000, "is not TOML", id="a-number-of-5000-digits"),
    pytest.param(b"", "recipe key 'name'", id="empty"),
]
"""Contents of a recipe's file, and what is said of them."""

NO_NAMES = ["nul\0byte", "x" * 300, "/".join(["deep"] * 1_000), "file\udcff"]
"""Names that no file has, and some that none can have."""


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


NO_FILES: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "FIFO": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
"""What makes something at a path that is no file, by what it is called."""
