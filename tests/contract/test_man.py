"""Manual pages are ones that `man` has no complaint about, and have every command and setting."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from forkd.daemon.settings import Settings
from tools import gen_docs, gen_man

if TYPE_CHECKING:
    from pathlib import Path

PAGES = sorted(gen_man.outputs())


def read(path: Path) -> str:
    """Return a page as a person reads it, in lines that are long enough."""
    done = subprocess.run(  # noqa: S603 - man-db's
        ["man", "--warnings", "-P", "cat", "-l", path],  # noqa: S607 - as a reader types it
        env={
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "MANWIDTH": "2000",
            "MAN_KEEP_FORMATTING": "",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.needs("man")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_man_finds_nothing_wrong_with_a_page(path: Path) -> None:
    assert path.stem in read(path)


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is another reader of pages")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_mandoc_finds_no_error_in_a_page(path: Path) -> None:
    subprocess.run(["mandoc", "-T", "lint", "-W", "error", path], check=True)  # noqa: S603, S607 - as a reader types it


@pytest.mark.needs("man")
def test_every_command_and_setting_is_in_its_page() -> None:
    text = {path.name: read(path) for path in PAGES}

    assert [name for name in gen_docs.command_names() if name not in text["forkd.1"]] == []
    assert [name for name in Settings.model_fields if name not in text["forkd.toml.5"]] == []
    for name in ("serve", "uninstall", "config check", "host install-service"):
        assert f"forkd-daemon {name}" in text["forkd-daemon.8"]


def test_nothing_in_a_text_is_a_request_of_roff() -> None:
    assert gen_man.line(".so /etc/passwd") == "\\&.so /etc/passwd"
    assert gen_man.line("'a b") == "\\&'a b"
    assert gen_man.line(r"\-- `x`") == r"\e\-\- x"
