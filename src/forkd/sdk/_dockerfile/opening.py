"""Find the files of a build: the Dockerfile, what it ignores, the folder that it copies from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import InvalidRequest, NotFound
from forkd.sdk._dockerfile import limits
from forkd.sdk._dockerfile.context import Context
from forkd.sdk._dockerfile.ignore import Ignore, parse_ignore
from forkd.sdk._dockerfile.plan import Wish
from forkd.sdk._dockerfile.stages import parse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

DOCKERFILE = "Dockerfile"
IGNORE_FILE = ".dockerignore"


def open_wish(
    context: str | PathLike[str],
    dockerfile: str | PathLike[str] | None,
    args: Mapping[str, str],
    target: str | None,
) -> Wish:
    """Return what is asked for, as files of this host say.

    Args:
        context: The folder that COPY and ADD take files from.
        dockerfile: The Dockerfile; None for `Dockerfile` in that folder.
        args: Build arguments.
        target: The stage; None for the last one.

    Raises:
        NotFound: There is no such folder or file.
        InvalidRequest: Something in them is wrong; file and line are named.
    """
    root = Path(context).expanduser()
    if not root.is_dir():
        what = "is no folder" if root.exists() else "does not exist"
        raise NotFound(f"the build context {context} {what}", path=str(context))
    file = root / DOCKERFILE if dockerfile is None else Path(dockerfile).expanduser()
    if not file.is_file():
        raise NotFound(f"there is no Dockerfile at {file}", path=str(file))
    said = parse(_text(file), str(dockerfile or DOCKERFILE))
    return Wish(said, args, target, Context(root.absolute(), _ignore(root, file)))


def is_dockerfile_folder(path: str | PathLike[str]) -> bool:
    """Whether a folder has a Dockerfile."""
    return (Path(path).expanduser() / DOCKERFILE).is_file()


def _ignore(root: Path, file: Path) -> Ignore:
    """Return what is left out: a Dockerfile may have a list of its own."""
    for path in (file.with_name(f"{file.name}{IGNORE_FILE}"), root / IGNORE_FILE):
        if path.is_file():
            return parse_ignore(_text(path), path.name)
    return Ignore()


def _text(path: Path) -> str:
    """Return what is in a file, as far as it is looked at."""
    try:
        with path.open("rb") as file:
            return file.read(limits.DOCKERFILE_BYTES_MAX + 1).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not UTF-8 text: {error}", field="dockerfile") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="dockerfile") from error
