"""`forkd cp`: files and folders between this host and a sandbox.

A tree goes as one archive (`forkd.sdk._archive`); where the agent in the sandbox is too old for
that, entry by entry and without its links.  What comes out of a sandbox is hostile: names that
would leave the target are refused, and only the nine permission bits are kept unless told
otherwise.  A file appears under its name when it is whole.
"""

from __future__ import annotations

import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from forkd.cli import render
from forkd.cli.context import EXIT_ERROR, shared
from forkd.cli.options import Json
from forkd.errors import Conflict, InvalidRequest, NotFound
from forkd.sdk import _archive as archive
from forkd.sdk import _local as local
from forkd.sdk._archive import PERMISSIONS, Copied

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.cli.help_text import Commands
    from forkd.sdk import Client, Sandbox
    from forkd.wire.v2_files import FileEntry

READ_BYTES = 256 * 1024

ARCHIVE_BYTES_MIN = 1 << 20
"""Smallest file that goes as an archive: it may have holes."""


def register(app: Commands) -> None:
    """Add the command of this file."""
    app.command("cp")(copy)


@dataclass(frozen=True)
class Terms:
    """How things are copied.

    Attributes:
        user: Owner of what is made new in the sandbox; None for the image's user.
        exact: Keep owners, and the bits that change the user.
    """

    user: str | None
    exact: bool


def copy(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="PATH of this host, or SANDBOX:/PATH.")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="SANDBOX:/PATH, or PATH of this host.")
    ],
    *,
    user: Annotated[
        str | None,
        typer.Option(
            metavar="USER",
            help="Owner of new files in the sandbox: a name, or UID[:GID] (the image's user "
            "unless set).",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--archive",
            "-a",
            help="Keep owners (by number) and special bits such as set-user-ID.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Copy files and folders between this host and a sandbox.

    Links are copied as links.  What cannot be copied is left out and named, and the exit code is 1.

    Examples:
      forkd cp data.csv sb-7q66th9abcde:/tmp/
      forkd cp sb-7q66th9abcde:/root/results ./results
    """
    copied, terms = Copied(), Terms(user, exact)
    with shared.client(as_json=json) as client:
        match _remote(client, source), _remote(client, target):
            case (None, (sandbox, path)):
                _upload(sandbox, Path(source), _into_remote(sandbox, path, source), copied, terms)
            case ((sandbox, path), None):
                name = PurePosixPath(path).name
                _download(sandbox, path, _into_local(Path(target), name), copied, terms)
            case _:
                raise InvalidRequest(
                    "one of SOURCE and TARGET must be in a sandbox: SANDBOX:/PATH", field="target"
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


def _upload(
    sandbox: Sandbox, source: Path, target: PurePosixPath, copied: Copied, terms: Terms
) -> None:
    """Copy what is at `source`; a link there is followed."""
    found = local.status_of(source)
    with local.reading(source):
        if stat.S_ISDIR(found.st_mode):
            _upload_archive(sandbox, source, target, copied, terms)
        elif terms.exact or _has_holes(found):
            _upload_archive(sandbox, source, target, copied, terms, name=target.name)
        else:
            _upload_file(sandbox, source, found, target, copied, terms)


def _has_holes(found: os.stat_result) -> bool:
    return found.st_size >= ARCHIVE_BYTES_MIN and found.st_blocks * 512 < found.st_size


def _upload_archive(  # noqa: PLR0913, PLR0917 - as `_upload`
    sandbox: Sandbox,
    source: Path,
    target: PurePosixPath,
    copied: Copied,
    terms: Terms,
    name: str | None = None,
) -> None:
    folder = str(target if name is None else target.parent)
    made = Copied()
    try:
        result = sandbox.files.write_archive(
            folder,
            archive.pack(source, made, name=name, exact=terms.exact),
            user=terms.user,
            keep_owner=terms.exact,
        )
    except Conflict as error:
        _refuse_unless_old(error, terms)
        _upload_entry(sandbox, source, target, copied)
        return
    copied.files, copied.bytes = made.files, made.bytes
    copied.skipped += made.skipped
    copied.written(result)


def _refuse_unless_old(error: Conflict, terms: Terms) -> None:
    """Return if an agent is too old for archives, and nothing was asked that needs one."""
    too_old = error.context.get("guest_code") == "invalid_request"
    if not too_old or terms.exact or terms.user is not None:
        raise error


def _upload_file(  # noqa: PLR0913, PLR0917 - as `_upload`
    sandbox: Sandbox,
    source: Path,
    found: os.stat_result,
    target: PurePosixPath,
    copied: Copied,
    terms: Terms,
) -> None:
    copied.bytes += sandbox.files.write(
        str(target),
        _pieces(source),
        mode=found.st_mode & PERMISSIONS,
        make_parents=True,
        user=terms.user,
    )
    copied.files += 1


def _upload_entry(sandbox: Sandbox, source: Path, target: PurePosixPath, copied: Copied) -> None:
    found = source.stat() if copied.files == 0 else source.lstat()
    if stat.S_ISDIR(found.st_mode):
        sandbox.files.make_dir(str(target), parents=True)
        for each in sorted(source.iterdir()):
            _upload_below(sandbox, each, target / each.name, copied)
    elif stat.S_ISREG(found.st_mode):
        _upload_file(sandbox, source, found, target, copied, Terms(None, exact=False))
    else:
        copied.skip(str(source), "a device, a pipe or a socket")


def _upload_below(sandbox: Sandbox, source: Path, target: PurePosixPath, copied: Copied) -> None:
    if source.is_symlink():
        copied.skip(str(source), "a link, for which the sandbox's agent is too old")
        return
    try:
        _upload_entry(sandbox, source, target, copied)
    except (OSError, InvalidRequest, Conflict, NotFound) as error:
        copied.skip(str(source), error)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            yield data


def _download(sandbox: Sandbox, source: str, target: Path, copied: Copied, terms: Terms) -> None:
    """Copy what is at `source`; a link there is followed."""
    entry = sandbox.files.stat(source)
    if entry.kind == "other":
        raise local.neither(source)
    with local.writing(target):
        if entry.kind == "file" and entry.size_bytes < ARCHIVE_BYTES_MIN and not terms.exact:
            copied.bytes += _download_file(sandbox, source, target, entry.mode & PERMISSIONS)
            copied.files += 1
            return
        try:
            with sandbox.files.open_archive(source) as pieces:
                archive.unpack(pieces, target, copied, exact=terms.exact)
        except Conflict as error:
            _refuse_unless_old(error, terms)
            _download_entry(sandbox, entry, source, target, copied)


def _download_entry(
    sandbox: Sandbox, entry: FileEntry, source: str, target: Path, copied: Copied
) -> None:
    if entry.kind == "directory":
        target.mkdir(exist_ok=True)
        for each in sandbox.files.list(source):
            try:
                inner = str(PurePosixPath(source, _safe(each.name)))
                _download_entry(sandbox, each, inner, target / each.name, copied)
            except (OSError, InvalidRequest, Conflict, NotFound) as error:
                copied.skip(f"{source}/{each.name}", error)
    elif entry.kind == "file":
        copied.bytes += _download_file(sandbox, source, target, entry.mode & PERMISSIONS)
        copied.files += 1
    else:
        copied.skip(source, "neither a file nor a folder")


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
