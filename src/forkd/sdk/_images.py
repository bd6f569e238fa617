"""Images of this host, on their way to the daemon: each travels as a recipe that has it.

    layout, layout:tag          a folder with an OCI layout
    image.tar, image.tar.gz     an OCI archive, or what `docker save` writes
    oci:…, oci-archive:…, docker-archive:…   one of these, said outright
    folder, recipe.toml         a recipe

Anything else is the daemon's to find: an image of a registry, or a recipe there.
"""

from __future__ import annotations

import itertools
import re
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, NotFound
from forkd.sdk._recipes import RECIPE_FILE, UPLOADED, Archive

if TYPE_CHECKING:
    from os import PathLike

REGISTRY = "docker://"

LAYOUT_FILE = "oci-layout"

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")

SCHEMES = ("oci:", "oci-archive:", "docker-archive:")

ENTRIES_LOOKED_AT = 100_000
"""Most entries of an archive looked at to tell whether it is whole."""

_NO_NAME = re.compile(r"[^a-z0-9._-]+")
_NO_TEXT = re.compile(r"[^A-Za-z0-9._/:@-]")


@dataclass(frozen=True, slots=True)
class LocalImage:
    """An image of this host.

    Attributes:
        path: Its file or folder.
        scheme: What it was said to be, `oci:` say; empty if nothing was said.
        which: The image in it, with its colon; empty for the only one.
    """

    path: Path
    scheme: str = ""
    which: str = ""

    def archive(self) -> Archive:
        """Return the archive of a recipe that has this image.

        Raises:
            InvalidRequest: It is no image, is cut short, or is too large to upload.
        """
        if not self.path.is_dir():
            _check_archive(self.path)
        inside = "layout" if self.path.is_dir() else "image.tar"
        name = _NO_NAME.sub("-", _stem(self.path.name.lower()))[:64].strip("-._") or "image"
        text = (
            f'name = "{name}"\n\n[image]\noci = "{self.scheme}{inside}{self.which}"\n\n'
            '[warmup]\nruntime = "auto"\n'
        )
        return Archive.with_text(text.encode(), self.path, inside)


def find_local_image(image: str | PathLike[str]) -> LocalImage | Path | str:
    """Return the image of this host that is meant, a recipe's path, or what the daemon is to find.

    Raises:
        NotFound: It can only be a path of this host, and there is nothing.
        InvalidRequest: There is something that is no image.
    """
    if isinstance(image, str):
        if image.startswith((REGISTRY, UPLOADED)):
            return image
        for scheme in SCHEMES:
            if image.startswith(scheme):
                path, which = _split(image.removeprefix(scheme))
                _check_there(path, image)
                return LocalImage(path.absolute(), scheme, which)
    path, which = _split(str(image)) if isinstance(image, str) else (Path(image), "")
    if _is_layout(path):
        return LocalImage(path.absolute(), which=which)
    said = str(image)
    whole = Path(said).expanduser() if isinstance(image, str) else path
    if not isinstance(image, str) or said.startswith(("/", "./", "../", "~")) or _is_archive(said):
        _check_there(whole, said)
        return _found(whole)
    return said


def _found(path: Path) -> LocalImage | Path:
    if path.suffix == ".toml" or (path / RECIPE_FILE).is_file():
        return path
    if path.is_dir():
        raise InvalidRequest(
            f"{path} is no image: it has neither an {LAYOUT_FILE} nor a {RECIPE_FILE}",
            field="image",
        )
    return LocalImage(path.absolute())


def _split(text: str) -> tuple[Path, str]:
    """Return a path, and which image in it, with its colon."""
    name, colon, tag = text.partition(":")
    which = f"{colon}{tag}"
    if _NO_TEXT.search(which):
        raise InvalidRequest(f"image names none in {name}: {tag[:80]!r}", field="image")
    return Path(name).expanduser(), which


def _is_layout(path: Path) -> bool:
    try:
        return (path / LAYOUT_FILE).is_file()
    except OSError:  # no file can have such a name
        return False


def _is_archive(text: str) -> bool:
    return text.lower().endswith(ARCHIVE_SUFFIXES)


def _check_there(path: Path, said: str) -> None:
    try:
        found = path.exists()
    except OSError:
        found = False
    if not found:
        raise NotFound(f"no image at {said}: there is no such file or folder", path=said)


def _check_archive(path: Path) -> None:
    """Return if a file is an archive of an image to its end, as far as its headers say.

    Raises:
        InvalidRequest: It is none, or is cut short.
    """
    names = set()
    try:
        with tarfile.open(path) as archive:
            for member in itertools.islice(archive, ENTRIES_LOOKED_AT):
                names.add(member.name.removeprefix("./"))
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        # Where no way to open it works, the library lists all ways, a line for each.
        why = "it is empty, or no tar file" if "\n" in str(error) else error
        raise InvalidRequest(f"{path} is no image archive: {why}", field="image") from error
    if not names & {"index.json", "manifest.json"}:
        raise InvalidRequest(
            f"{path} is no image archive: it has no index.json or manifest.json", field="image"
        )


def _stem(name: str) -> str:
    for suffix in sorted(ARCHIVE_SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return name
