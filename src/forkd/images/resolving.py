"""Ask a registry which image a tag names now."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import cells as host_cells
from forkd.host import files, ownership, process
from forkd.images import children
from forkd.images.apart import BUILDER_PATHS
from forkd.images.manifests import is_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from forkd.images.apart import Cells
    from forkd.images.registries import Access
    from forkd.images.steps import Build

RESOLVE_TIMEOUT_S = 120.0
"""How long a registry may take to say which image a tag names."""


def resolve(reference: str, build: Build, cells: Cells | None) -> str:
    """Return the digest that an image of a registry has now.

    Args:
        reference: Which image.
        build: What it is a part of; it knows what the operator says of registries.
        cells: Where the registry is asked; None for a process without a cell.

    Raises:
        NotFound: The registry has no such image.
        BuildError: It does not answer, or not to us.
    """
    build.tell("resolve", f"asking for {reference}")
    access = build.registries.access(reference)
    if cells is None:
        return _asked(_command(reference, access), build, None)
    with cells() as cell, files.scratch_folder("forkd-resolve-") as folder:
        read: list[Path] = [*BUILDER_PATHS, *host_cells.python_paths()]
        if access.auth_file is not None:
            copied = folder / "auth.json"
            files.copy_sparse(access.auth_file, copied)
            ownership.give(copied, cell.uid)
            access = replace(access, auth_file=copied)
            read.append(copied)
        command = cell.command(_command(reference, access), read=read, network=True)
        environment = process.plain_environment() | {"HOME": "/tmp"}  # noqa: S108 - the cell's
        return _asked(command, build, environment)


def _command(reference: str, access: Access) -> tuple[str | Path, ...]:
    return children.command("resolve", *access.options(), reference)


def _asked(
    command: Sequence[str | Path], build: Build, environment: Mapping[str, str] | None
) -> str:
    def start(hear: Callable[[str], None]) -> None:
        build.run(command, timeout_s=RESOLVE_TIMEOUT_S, env=environment, on_line=hear)

    digest = children.told(build, start).get("digest")
    if not is_digest(digest):
        raise BuildError("what was asked for the image's digest has answered with something else")
    return str(digest)
