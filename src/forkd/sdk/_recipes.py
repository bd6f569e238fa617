"""A recipe's folder as the archive that is uploaded of it.

A local recipe is a folder with a `recipe.toml`, or a TOML file.  The archive has all that is in
that folder, and the TOML file as `recipe.toml`.  It says nothing of owners and times, so that the
same files always make the same archive: the daemon, which names it by its digest, may have it.
"""

from __future__ import annotations

import contextlib
import stat
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, NotFound
from forkd.limits import RECIPE_ENTRIES_MAX, RECIPE_UPLOAD_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from os import PathLike

RECIPE_FILE = "recipe.toml"
UPLOADED = "sha256:"
"""Begins a reference to a recipe that was uploaded."""

READ_BYTES = 1024 * 1024
_BLOCK = tarfile.BLOCKSIZE


def find_local(recipe: str | PathLike[str]) -> Path | None:
    """Return the TOML file of a recipe of this host; None for one that the daemon is to find.

    A path object, and a text that leads to a recipe here, are of this host.  A name, an absolute
    path that leads to none, and a reference to an upload are the daemon's.

    Raises:
        NotFound: It can only be a path of this host, and there is no recipe.
    """
    path = Path(recipe)
    if not (isinstance(recipe, str) and recipe.startswith(UPLOADED)):
        for file in (path, path / RECIPE_FILE):
            if file.suffix == ".toml" and _is_file(file):
                return file.absolute()
    if isinstance(recipe, str) and (path.is_absolute() or "/" not in recipe):
        return None
    raise NotFound(f"no recipe at {path}: no TOML file, and no folder with a {RECIPE_FILE}")


def find_local_base(file: Path) -> tuple[str, Path] | None:
    """Return what a recipe says of its base, and the base's TOML file, if that is a folder here.

    Raises:
        NotFound: There is no recipe in that folder.
        InvalidRequest: That base has such a base itself.
    """
    said = _folder_of_base(file)
    if said is None:
        return None
    try:
        base = find_local(file.parent / said)
    except NotFound as error:
        raise NotFound(f"the base of {file}: {error}") from None
    if base is None:
        raise NotFound(f"the base of {file}: no recipe at {file.parent / said}")
    if (again := _folder_of_base(base)) is not None:
        raise InvalidRequest(
            f"the base of a recipe has no base itself, but {base} has {again!r}", field="image.base"
        )
    return said, base


def _folder_of_base(file: Path) -> str | None:
    """Return the relative path that a recipe names as its base; None if it names none."""
    try:
        image = tomllib.loads(file.read_text(encoding="utf-8")).get("image")
    except (OSError, ValueError):
        return None  # whoever reads it next says so
    base = image.get("base") if isinstance(image, dict) else None
    named = isinstance(base, str) and "/" in base and not base.startswith(("/", UPLOADED))
    return str(base) if named else None


def _with_base(file: Path, said: str, reference: str) -> bytes:
    """Return a recipe's text with another base.

    Raises:
        InvalidRequest: What it says of its base is not in there exactly once.
    """
    text = file.read_text(encoding="utf-8")
    quoted = [each for each in (f'"{said}"', f"'{said}'") if each in text]
    if text.count(said) != 1 or not quoted:
        raise InvalidRequest(
            f"{file} has to say its base {said!r} once, as it is and between quotes",
            field="image.base",
        )
    return text.replace(quoted[0], f'"{reference}"').encode()


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no file can have such a name
        return False


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of an archive; `text` is what it holds if no file does."""

    path: Path
    header: bytes
    size_bytes: int
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Archive:
    """The archive of a recipe, which is read as it is sent.

    Attributes:
        name: The folder's, for messages.
        size_bytes: Its length.
    """

    name: str
    size_bytes: int
    _entries: tuple[_Entry, ...]

    @classmethod
    def of(cls, file: Path, base: tuple[str, str] | None = None) -> Archive:
        """Return the archive of the recipe whose TOML file this is.

        Args:
            file: The TOML file.
            base: What it says of its base, and what is said in its place; None for nothing.

        Raises:
            InvalidRequest: Its folder cannot be read, holds too much, or what no archive may hold.
        """
        with _readable("recipe"):
            folder = file.parent
            named = ((path, path.relative_to(folder).as_posix()) for path in _walk(folder))
            text = None if base is None else _text_entry(_with_base(file, *base), RECIPE_FILE)
            entries = (
                text
                if path == file and text is not None
                else _entry(path, RECIPE_FILE if path == file else name)
                for path, name in named
                if name != RECIPE_FILE or path == file  # the one that was chosen has its name
            )
            return cls._with(entries, folder, "recipe", ": give the recipe a folder of its own")

    @classmethod
    def with_text(cls, text: bytes, path: Path, name: str) -> Archive:
        """Return the archive of a recipe of this text, beside which a file or folder is.

        Args:
            text: The recipe.
            path: What goes along.
            name: What it is called in the archive.

        Raises:
            InvalidRequest: As `of`.
        """
        with _readable("image"):
            inner = _walk(path) if path.is_dir() else ()
            entries = (
                _text_entry(text, RECIPE_FILE),
                _entry(path, name),
                *(_entry(each, f"{name}/{each.relative_to(path).as_posix()}") for each in inner),
            )
            return cls._with(entries, path, "image", "; push it to a registry instead")

    @classmethod
    def of_parts(
        cls, text: bytes, texts: Mapping[str, bytes], files: Mapping[str, Path]
    ) -> Archive:
        """Return the archive of a recipe of this text, and what goes along.

        Args:
            text: The recipe.
            texts: Files by their names in the archive.
            files: Files and folders of this host, likewise.

        Raises:
            InvalidRequest: As `of`.
        """

        def entries() -> Iterator[_Entry]:
            yield _text_entry(text, RECIPE_FILE)
            for name, said in texts.items():
                yield _text_entry(said, name)
            for name, path in files.items():
                yield _entry(path, name)
                for each in _walk(path) if path.is_dir() else ():
                    yield _entry(each, f"{name}/{each.relative_to(path).as_posix()}")

        with _readable("image"):
            return cls._with(entries(), Path("image"), "image", ": add less of this host")

    @classmethod
    def _with(cls, entries: Iterable[_Entry], of: Path, field: str, way_out: str) -> Archive:
        kept, size = [], 0
        for entry in entries:
            kept.append(entry)
            size += len(entry.header) + _padded(entry.size_bytes)
            if len(kept) > RECIPE_ENTRIES_MAX or size > RECIPE_UPLOAD_BYTES_MAX:
                raise InvalidRequest(
                    f"{of} holds more than {RECIPE_ENTRIES_MAX} files or "
                    f"{RECIPE_UPLOAD_BYTES_MAX} bytes{way_out}",
                    field=field,
                )
        return cls(of.name, size + 2 * _BLOCK, tuple(kept))

    def pieces(self) -> Iterator[bytes]:
        """Give the archive's bytes.

        Raises:
            InvalidRequest: A file cannot be read, or changed meanwhile.
        """
        for entry in self._entries:
            yield entry.header
            if entry.text:
                yield entry.text.ljust(_padded(entry.size_bytes), b"\0")
            elif entry.size_bytes:
                yield from _contents(entry)
        yield bytes(2 * _BLOCK)


def _walk(folder: Path) -> Iterator[Path]:
    """Give all that is in a folder, each after the folder that it is in, always in one order."""
    for each in sorted(folder.iterdir()):
        yield each
        if each.is_dir() and not each.is_symlink():
            yield from _walk(each)


@contextlib.contextmanager
def _readable(field: str) -> Iterator[None]:
    """Have what cannot be read within the block be one error."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {error.filename}: {error.strerror}", field=field
        ) from error


def _text_entry(text: bytes, name: str) -> _Entry:
    header = tarfile.TarInfo(name)
    header.mode, header.size = 0o644, len(text)
    return _Entry(
        Path(name), header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict"), len(text), text
    )


def _entry(path: Path, name: str) -> _Entry:
    status = path.lstat()
    header = tarfile.TarInfo(name)
    header.mode = 0o755 if status.st_mode & stat.S_IXUSR else 0o644
    if stat.S_ISREG(status.st_mode):
        header.size = status.st_size
    elif stat.S_ISDIR(status.st_mode):
        header.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(status.st_mode):
        header.type, header.linkname = tarfile.SYMTYPE, str(path.readlink())
    else:
        raise InvalidRequest(
            f"{path} is no file, folder or link: a recipe's folder holds nothing else",
            field="recipe",
        )
    try:
        encoded = header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
    except ValueError as error:
        raise InvalidRequest(f"{path} cannot be uploaded: {error}", field="recipe") from error
    return _Entry(path, encoded, header.size)


def _contents(entry: _Entry) -> Iterator[bytes]:
    """Give the bytes of a file, as many as its header says."""
    left = entry.size_bytes
    try:
        with entry.path.open("rb") as file:
            while left and (data := file.read(min(left, READ_BYTES))):
                left -= len(data)
                yield data
    except OSError as error:
        raise InvalidRequest(
            f"cannot read {entry.path}: {error.strerror}", field="recipe"
        ) from error
    if left:
        raise InvalidRequest(f"{entry.path} became shorter while it was read", field="recipe")
    yield bytes(_padded(entry.size_bytes) - entry.size_bytes)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
