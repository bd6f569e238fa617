"""Copy a project, and installed distributions, into a sandbox."""

from __future__ import annotations

import re
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from forkd.sdk import Sandbox

PROJECT_BYTES_MAX = 1024 * 1024 * 1024
"""Most bytes of a project that are copied into a sandbox."""

LEFT_OUT = {"__pycache__", "node_modules", "venv", "build", "dist"}
"""Folders of a project that are not copied, beside those that begin with a dot."""

PIECE_BYTES = 1024 * 1024
"""How much of an archive is sent at a time."""


def project_files(root: Path) -> Iterator[Path]:
    """Yield the files of a project, without environments, caches and what was built."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or path.is_file():
            yield path
        elif path.is_dir() and not _is_left_out(path):
            yield from project_files(path)


def _is_left_out(folder: Path) -> bool:
    name = folder.name
    return name[0] == "." or name in LEFT_OUT or (folder / "pyvenv.cfg").exists()


def distribution_files(names: Iterable[str]) -> Iterator[tuple[Path, str]]:
    """Yield the files of installed distributions and of what they need, and their relative paths.

    Raises:
        InvalidRequest: One is not installed.
    """
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise InvalidRequest(f"{name} is not installed here, so it cannot be sent") from error
        for file in found.files or ():
            path = Path(str(found.locate_file(file)))
            if ".." not in file.parts and file.suffix != ".pyc" and path.is_file():
                yield path, str(file)
        waiting += _needed(found.requires or ())


def _needed(requirements: Iterable[str]) -> Iterator[str]:
    """Yield the names of what is needed always, and is installed."""
    for each in requirements:
        text, _, marker = each.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", text)
        if match is None or "extra" in marker:
            continue
        if any(metadata.distributions(name=match[0])):  # what a marker rules out is not
            yield match[0]


def send(sandbox: Sandbox, files: Iterable[tuple[Path, str]], folder: str) -> None:
    """Make files in a folder of a sandbox.

    Raises:
        InvalidRequest: They are too large together, or one cannot be made.
    """
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path, name in files:
                tar.add(path, name, recursive=False)
        size = archive.tell()
        if size > PROJECT_BYTES_MAX:
            raise InvalidRequest(
                f"the files for {folder} have {size} bytes, more than the {PROJECT_BYTES_MAX} that "
                "are copied; put them into the snapshot, and name the folder with --forkd-path"
            )
        archive.seek(0)
        made = sandbox.files.write_archive(folder, iter(lambda: archive.read(PIECE_BYTES), b""))
    if made.skipped:
        first = made.skipped[0]
        raise InvalidRequest(f"{first.path} cannot be made in {folder}: {first.reason}")


def named(files: Iterable[Path], root: Path) -> Sequence[tuple[Path, str]]:
    """Return files with their paths below a folder."""
    return [(each, str(each.relative_to(root))) for each in files]
