"""The packages of a root file system are read from dpkg's own records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.images.debian import installed_packages

if TYPE_CHECKING:
    from pathlib import Path

STATUS = """Package: bash
Status: install ok installed
Depends: base-files (>= 2.1.12)
Version: 5.2.15-2+b13

Package: gone
Status: deinstall ok config-files
Version: 1.0
"""


def test_installed_packages_are_listed_with_their_versions(tmp_path: Path) -> None:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)

    assert installed_packages(tmp_path) == {"bash": "5.2.15-2+b13"}


def test_another_system_has_none(tmp_path: Path) -> None:
    assert installed_packages(tmp_path) == {}
