"""A guest's files in memory, for the fakes: what the agent answers, and why it refuses.

A file is a name with its contents; a folder is a name that ends with a slash.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import PurePosixPath
from typing import Any

from forkd.model.files import ArchiveResult

Members = dict[str, Any]

FOLDERS = ("/", "/etc/", "/root/", "/tmp/")
"""What every root file system has."""


class Refused(Exception):
    """An operation that the agent answers with an ERROR."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FileTree:
    """Works on `files`, which whoever made it keeps."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def read(self, path: str) -> bytes:
        """Return what is in a file."""
        if self._is_folder(path):
            raise Refused("is_a_directory", f"{path} is a directory")
        if path not in self._files:
            raise Refused("not_found", f"{path}: no such file or directory")
        return self._files[path]

    def check_place(self, path: str, *, make_parents: bool) -> None:
        """Return if something can be put under `path`, or make it so."""
        folders = map(str, PurePosixPath(path).parents)
        above = [each for each in folders if not self._is_folder(each)]
        if above and not make_parents:
            raise Refused("not_found", f"{above[0]}: no such file or directory")
        for each in above:
            if each in self._files:
                raise Refused("not_a_directory", f"{each} is no directory")
            self._files[f"{each}/"] = b""

    def write(self, path: str, data: bytes) -> None:
        """Put a file under a path that was checked."""
        self._files[path] = data

    def make_dir(self, path: str, *, parents: bool) -> None:
        """Make a folder."""
        if self._is_folder(path) and parents:
            return
        if self._is_folder(path) or path in self._files:
            raise Refused("exists", f"{path} exists")
        self.check_place(path, make_parents=parents)
        self._files[f"{path}/"] = b""

    def move(self, source: str, target: str) -> None:
        """Rename a file."""
        data = self.read(source)
        self.check_place(target, make_parents=False)
        del self._files[source]
        self._files[target] = data

    def remove(self, path: str, *, recursive: bool) -> None:
        """Remove a file or a folder."""
        if not self._is_folder(path):
            self.read(path)
            del self._files[path]
            return
        inside = [name for name in self._files if name.startswith(f"{path}/")]
        if inside != [f"{path}/"] and not recursive:
            raise Refused("not_empty", f"{path} is not empty")
        for name in inside:
            del self._files[name]

    def list_dir(self, path: str) -> list[Members]:
        """Return what is in a folder, by name."""
        if not self._is_folder(path):
            self.read(path)
            raise Refused("not_a_directory", f"{path} is no directory")
        below = f"{path.rstrip('/')}/"
        every = {name for name in (*FOLDERS, *self._files) if name.startswith(below)}
        names = {name.removeprefix(below).partition("/")[0] for name in every - {below}}
        return [self.entry(f"{below}{name}") for name in sorted(names)]

    def pack(self, path: str) -> bytes:
        """Return a file or a folder as a tar archive."""
        archive = io.BytesIO()
        below = f"{path.rstrip('/')}/"
        with tarfile.open(fileobj=archive, mode="w") as tar:
            if self._is_folder(path):
                inside = sorted(name for name in self._files if name.startswith(below))
                names = [below, *(name for name in inside if name != below)]
            else:
                names, below = [path], f"{PurePosixPath(path).parent}/"
                self.read(path)
            for name in names:
                member = tarfile.TarInfo(name.removeprefix(below).rstrip("/") or ".")
                member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
                member.mode = 0o755 if member.isdir() else 0o644
                contents = self._files.get(name, b"")
                member.size = len(contents)
                tar.addfile(member, io.BytesIO(contents))
        return archive.getvalue()

    def unpack(self, path: str, data: bytes) -> ArchiveResult:
        """Make a tree of an archive; links are left out."""
        entries, size, skipped = 0, 0, []
        self.make_dir(path, parents=True)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                place = str(PurePosixPath(path, member.name))
                if place.startswith("/proc/"):
                    skipped.append((member.name, "a file of the kernel's"))
                    continue
                if member.isdir():
                    self.make_dir(place, parents=True)
                elif member.isreg() and (contents := tar.extractfile(member)) is not None:
                    self.check_place(place, make_parents=True)
                    self.write(place, contents.read())
                    size += member.size
                else:
                    skipped.append((member.name, "not a file"))
                    continue
                entries += 1
        return ArchiveResult(entries, size, tuple(skipped))

    def entry(self, path: str) -> Members:
        """Return what the agent says of a file or a folder."""
        folder = self._is_folder(path)
        return {
            "name": PurePosixPath(path).name or "/",
            "kind": "directory" if folder else "file",
            "size_bytes": 4096 if folder else len(self.read(path)),
            "mode": 0o755 if folder else 0o644,
            "uid": 0,
            "gid": 0,
            "modified_at_ns": 1_700_000_000_000_000_000,
        }

    def _is_folder(self, path: str) -> bool:
        name = f"{path.rstrip('/')}/"
        return name in FOLDERS or name in self._files
