"""The build context: a folder of this host, without what `.dockerignore` leaves out.

It is looked at once, when the first COPY or ADD needs it.  Everything that is wrong is a
`ValueError`: the line of the Dockerfile is the caller's to add.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import stat
import tarfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.ignore import Ignore, glob

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PIECE_BYTES = 1024 * 1024

LARGEST_SHOWN = 3
"""How many of the largest things in a context an error names."""

_LZMA = (EOFError, zlib.error, tarfile.TarError, OSError)


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing in a context.

    Attributes:
        path: Where it is, below the context; empty for the context itself.
        kind: What it is.
        mode: Its permissions.
        size: How many bytes it has.
        target: Where it leads, if it is a link.
    """

    path: str
    kind: Literal["file", "folder", "link", "other"]
    mode: int
    size: int = 0
    target: str = ""


class Context:
    """A build context.

    Args:
        root: The folder.
        ignore: What is left out of it.
    """

    def __init__(self, root: Path, ignore: Ignore | None = None) -> None:
        self.root = root
        self._ignore = ignore or Ignore()
        self._found: dict[str, Entry] | None = None
        self._contents: dict[str, str] = {}

    def host_path(self, path: str) -> str:
        """Return where a thing is on this host."""
        return os.path.join(self.root, path)  # noqa: PTH118 - names need not be UTF-8

    def sources(self, said: str) -> list[Entry]:
        """Return what a source of COPY or ADD means, in order of names.

        Raises:
            ValueError: There is nothing of that name, or it is outside of the context.
        """
        if ".." in said.split("/"):
            raise ValueError(f"{said!r} leads out of the context; copy only what is in {self.root}")
        path = posixpath.normpath(said.lstrip("/") or ".")
        path = "" if path == "." else path
        if set(path) & set("*?["):
            try:
                regex = re.compile(glob(path, folders=False))
            except re.error as error:
                raise ValueError(f"{said!r} is no pattern: {error}") from error
            found = [each for name, each in self.entries.items() if name and regex.fullmatch(name)]
            if not found:
                raise ValueError(f"nothing in the context {self.root} matches {said!r}")
            return [self._followed(each.path, said) for each in found]
        return [self._followed(path, said)]

    def below(self, entry: Entry) -> Iterator[Entry]:
        """Yield what is in a folder, and below it, by path."""
        head = f"{entry.path}/" if entry.path else ""
        for path, each in self.entries.items():
            if path and path.startswith(head):
                yield each

    def digest(self, entry: Entry) -> str:
        """Return the digest of one thing: of what it is, its permissions and its contents.

        Raises:
            ValueError: It cannot be read, or is neither file, folder nor link.
        """
        if entry.kind == "other":
            raise ValueError(f"{entry.path!r} is neither a file, a folder nor a link")
        said = self.contents(entry) if entry.kind == "file" else entry.target
        return hashlib.sha256(os.fsencode(f"{entry.kind} {entry.mode:o} {said}")).hexdigest()

    def is_archive(self, entry: Entry) -> bool:
        """Whether a file is an archive that ADD unpacks: a tar file, compressed or not."""
        if entry.kind != "file" or entry.size == 0:
            return False
        try:
            with tarfile.open(self.host_path(entry.path)) as archive:
                return archive.next() is not None
        except _LZMA:
            return False

    @property
    def entries(self) -> dict[str, Entry]:
        """What is in the context, by path, itself included."""
        if self._found is None:
            try:
                self._found = dict(sorted(self._looked()))
            except OSError as error:
                raise ValueError(
                    f"cannot read the context: {error.filename or self.root}: {error.strerror}"
                ) from error
        return self._found

    def _looked(self) -> Iterator[tuple[str, Entry]]:
        yield "", Entry("", "folder", 0o755)
        count, size, largest = 0, 0, dict[str, int]()
        folders = [""]
        while folders:
            folder = folders.pop()
            with os.scandir(self.host_path(folder)) as found:
                for each in found:
                    path = posixpath.join(folder, each.name)
                    is_folder = each.is_dir(follow_symlinks=False)
                    if is_folder and not self._ignore.may_skip(path):
                        folders.append(path)
                    if self._ignore.rule(path) is not None:
                        continue
                    entry = _entry(path, each)
                    count, size = count + 1, size + entry.size
                    top = path.split("/", 1)[0]
                    largest[top] = largest.get(top, 0) + entry.size
                    self._check(count, size, largest)
                    yield path, entry

    def _check(self, count: int, size: int, largest: dict[str, int]) -> None:
        if count > limits.BUILD_CONTEXT_ENTRIES_MAX:
            what = f"more than {limits.BUILD_CONTEXT_ENTRIES_MAX} files"
        elif size > limits.BUILD_CONTEXT_BYTES_MAX:
            what = f"more than {limits.BUILD_CONTEXT_BYTES_MAX} bytes"
        else:
            return
        most = sorted(largest, key=lambda name: largest[name], reverse=True)[:LARGEST_SHOWN]
        raise ValueError(
            f"the context {self.root} holds {what}: leave out what is not copied with "
            f".dockerignore; much is in {', '.join(most)}"
        )

    def _followed(self, path: str, said: str) -> Entry:
        """Return what is at a path, links followed, as long as they stay in the context.

        Raises:
            ValueError: There is nothing, or it is outside.
        """
        root = os.path.realpath(self.root)
        real = os.path.realpath(self.host_path(path))
        if real != root and not real.startswith(f"{root}/"):
            raise ValueError(f"{said!r} is a link that leads out of the context {self.root}")
        inside = "" if real == root else real.removeprefix(f"{root}/")
        found = self.entries.get(inside)
        if found is not None:
            return found
        if any(each.startswith(f"{inside}/") for each in self.entries):
            return Entry(inside, "folder", 0o755)  # left out itself, but not all that is in it
        rule = self._ignore.rule(inside)
        if rule is not None and os.path.lexists(real):
            raise ValueError(
                f"{said!r} is left out by {self._ignore.file}:{rule.line} ({rule.text})"
            )
        raise ValueError(f"no {said!r} in the context {self.root}")

    def contents(self, entry: Entry) -> str:
        """Return the digest of the contents that a file had when it was first asked for.

        Raises:
            ValueError: It cannot be read.
        """
        if (known := self._contents.get(entry.path)) is not None:
            return known
        digest = hashlib.sha256()
        try:
            with open(self.host_path(entry.path), "rb") as file:  # noqa: PTH123 - as above
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
        except OSError as error:
            raise ValueError(f"cannot read {entry.path!r}: {error.strerror}") from error
        return self._contents.setdefault(entry.path, digest.hexdigest())


def _entry(path: str, found: os.DirEntry[str]) -> Entry:
    info = found.stat(follow_symlinks=False)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISREG(info.st_mode):
        return Entry(path, "file", mode, info.st_size)
    if stat.S_ISDIR(info.st_mode):
        return Entry(path, "folder", mode)
    if stat.S_ISLNK(info.st_mode):
        return Entry(path, "link", mode, target=os.readlink(found.path))  # noqa: PTH115 - as above
    return Entry(path, "other", mode)
