"""Debian packages that `make deb` has built, and others made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from tests.support.docs import ROOT


def built_for(mark: str) -> Path:
    """Return the newest package for a release of Debian.

    Args:
        mark: The end of its version, as `deb12`.
    """
    found = (ROOT / "build/deb").glob(f"forkd_*+{mark}_*.deb")
    return max(found, key=lambda path: path.stat().st_mtime)


def another_version(package: Path, version: str, folder: Path) -> Path:
    """Write the same package under another version into a folder, uncompressed."""
    path = folder / f"forkd_{version}_amd64.deb"
    with tempfile.TemporaryDirectory(prefix="fk-deb-", dir=folder) as name:
        tree = Path(name, "tree")
        subprocess.run(["dpkg-deb", "-R", package, tree], check=True)  # noqa: S603, S607 - dpkg's
        control = tree / "DEBIAN/control"
        text = re.sub(
            r"^Version: .*$", f"Version: {version}", control.read_text(), flags=re.MULTILINE
        )
        control.write_text(text)
        subprocess.run(  # noqa: S603 - dpkg's
            ["dpkg-deb", "--root-owner-group", "-Znone", "-b", tree, path],  # noqa: S607 - likewise
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return path
