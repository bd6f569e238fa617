"""A Debian package whose maintainer script is hostile, and a cell that builds find it in."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd import programs
from forkd.host.cells import Cell
from forkd.limits import BUILD_UIDS_DEFAULT
from forkd.service.cells import Cells
from forkd.service.jail import UidRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from forkd.images import apart

NAME = "forkd-hostile"
CONTROL = f"Package: {NAME}\nVersion: 1\nArchitecture: all\nMaintainer: T <t@example.com>\n"
CONTROL += "Description: a package that tries to leave\n"
SCRIPT = Path(__file__).parents[1] / "guest" / "postinst.pl"

REPORT = "/var/lib/forkd-hostile"

WITH_ARCHIVE = """#!/bin/sh
exec /usr/bin/mmdebstrap --setup-hook='echo "deb [trusted=yes] copy:{archive} ./" \
    > "$1/etc/apt/sources.list.d/hostile.list"' "$@"
"""
"""Stands before mmdebstrap in a cell, and has it know one more archive."""


def write_archive(folder: Path, words: Mapping[str, object]) -> Path:
    """Make an archive with the package; `words` are what its script is told."""
    script = SCRIPT.read_text(encoding="utf-8")
    for name, value in words.items():
        script = script.replace(f"@{name}@", str(value))
    tree = folder / "tree" / "DEBIAN"
    tree.mkdir(parents=True)
    (tree / "control").write_text(CONTROL)
    (tree / "postinst").write_text(script)
    (tree / "postinst").chmod(0o755)
    archive = folder / "archive"
    archive.mkdir()
    package = archive / f"{NAME}.deb"
    subprocess.run(  # noqa: S603 - our own arguments
        ["/usr/bin/dpkg-deb", "--root-owner-group", "-b", str(tree.parent), str(package)],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    data = package.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    more = f"Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {digest}\n"
    (archive / "Packages").write_text(CONTROL + more)
    return archive


@dataclass(frozen=True, slots=True)
class _Showing(Cell):
    """A cell that shows one more folder."""

    shown: tuple[Path, ...] = ()

    def command(
        self,
        args: Sequence[str | Path],
        *,
        read: Iterable[Path] = (),
        write: Iterable[Path] = (),
        network: bool = False,
    ) -> list[str | Path]:
        """Return the words that run a program in it."""
        return Cell.command(self, args, read=(*read, *self.shown), write=write, network=network)


def cells(*shown: Path) -> apart.Cells:
    """Return cells of this host's own users, in which there are `shown`, too."""

    builds = Cells(programs.find(programs.VMM), UidRange.parse(BUILD_UIDS_DEFAULT), None, None)

    @contextlib.contextmanager
    def one() -> Iterator[Cell]:
        with builds.build() as cell:
            yield _Showing(cell.vmm, cell.uid, cell.uid_count, shown=shown)

    return one
