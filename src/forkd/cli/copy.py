"""`forkd cp`: files and folders between this host and a sandbox.

What comes out of a sandbox is hostile.  Names that would leave the target are refused, links are
left out and said to be, and only the nine permission bits are kept.  A file appears under its
name when it is whole.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import EXIT_ERROR, Json, shared
from forkd.errors import HostError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.sdk import Client, Sandbox
    from forkd.wire.v2_files import FileEntry

READ_BYTES = 256 * 1024
PERMISSIONS = 0o777


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("cp")(copy)


@dataclass
class Copied:
    """What was copied, and what was left out."""

    files: int = 0
    bytes: int = 0
    skipped: list[str] = field(default_factory=list)


def copy(
    source: Annotated[str, typer.Argument(help="PATH or ID:/PATH", show_default=False)],
    target: Annotated[str, typer.Argument(help="ID:/PATH or PATH", show_default=False)],
    *,
    json: Json = False,
) -> None:
    """Copy a file or a folder between this host and a sandbox."""
    copied = Copied()
    with shared.client(as_json=json) as client:
        match _remote(client, source), _remote(client, target):
            case (None, (sandbox, path)):
                _upload(sandbox, Path(source), _into_remote(sandbox, path, source), copied)
            case ((sandbox, path), None):
                name = PurePosixPath(path).name
                _download(sandbox, path, _into_local(Path(target), name), copied)
            case _:
                raise InvalidRequest(
                    "one of the two must be in a sandbox: ID:/PATH", field="target"
                )
    if json:
        render.document({"files": copied.files, "bytes": copied.bytes, "skipped": copied.skipped})
    for each in copied.skipped:
        render.note(f"left out: {each}")
    if copied.skipped:
        raise typer.Exit(EXIT_ERROR)


def _remote(client: Client, text: str) -> tuple[Sandbox, str] | None:
    """Return the sandbox and the path that `text` names; None if it names a file of this host."""
    id_, colon, path = text.partition(":")
    if not colon or "/" in id_:
        return None
    if not path.startswith("/"):
        raise InvalidRequest(f"a path in a sandbox is absolute, not {path!r}", field="path")
    return client.sandboxes.get(id_), path


def _into_remote(sandbox: Sandbox, path: str, source: str) -> PurePosixPath:
    """Return the path to write: below `path` if that is a folder."""
    try:
        is_folder = sandbox.files.stat(path).kind == "directory"
    except NotFound:
        is_folder = path.endswith("/")
    return PurePosixPath(path, Path(source).resolve().name) if is_folder else PurePosixPath(path)


def _into_local(target: Path, name: str) -> Path:
    return target / name if target.is_dir() else target


def _upload(sandbox: Sandbox, source: Path, target: PurePosixPath, copied: Copied) -> None:
    try:
        found = source.stat() if copied.files == 0 else source.lstat()
        if stat.S_ISDIR(found.st_mode):
            sandbox.files.make_dir(str(target), parents=True)
            for each in sorted(source.iterdir()):
                _upload_below(sandbox, each, target / each.name, copied)
        elif stat.S_ISREG(found.st_mode):
            mode = found.st_mode & PERMISSIONS
            written = sandbox.files.write(
                str(target), _pieces(source), mode=mode, make_parents=True
            )
            copied.files, copied.bytes = copied.files + 1, copied.bytes + written
        else:
            copied.skipped.append(str(source))
    except FileNotFoundError as error:
        raise NotFound(f"{source}: no such file", field="source") from error
    except OSError as error:
        raise HostError(f"{source}: {error.strerror}") from error


def _upload_below(sandbox: Sandbox, source: Path, target: PurePosixPath, copied: Copied) -> None:
    if source.is_symlink():
        copied.skipped.append(str(source))
    else:
        _upload(sandbox, source, target, copied)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


def _download(sandbox: Sandbox, source: str, target: Path, copied: Copied) -> None:
    _download_entry(sandbox, sandbox.files.stat(source), source, target, copied)


def _download_entry(
    sandbox: Sandbox, entry: FileEntry, source: str, target: Path, copied: Copied
) -> None:
    try:
        if entry.kind == "directory":
            target.mkdir(exist_ok=True)
            for each in sandbox.files.list(source):
                inner = str(PurePosixPath(source, _safe(each.name)))
                _download_entry(sandbox, each, inner, target / each.name, copied)
        elif entry.kind == "file":
            copied.bytes += _download_file(sandbox, source, target, entry.mode & PERMISSIONS)
            copied.files += 1
        else:
            copied.skipped.append(source)
    except OSError as error:
        raise HostError(f"{target}: {error.strerror}") from error


def _safe(name: str) -> str:
    """Return a name that a guest says is in a folder, if it can be."""
    if name in {"", ".", ".."} or "/" in name or "\0" in name:
        raise InvalidRequest(f"the sandbox names a file {name!r}, which is no file name")
    return name


def _download_file(sandbox: Sandbox, source: str, target: Path, mode: int) -> int:
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as aside:
        try:
            with sandbox.files.open(source) as pieces:
                for piece in pieces:
                    aside.write(piece)
            aside.flush()
            os.fchmod(aside.fileno(), mode)
            Path(aside.name).replace(target)
            return aside.tell()
        except BaseException:
            Path(aside.name).unlink(missing_ok=True)
            raise
