"""Ask a registry which image a tag names now."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, ownership, process
from forkd.images.apart import BUILDER_PATHS
from forkd.images.registries import explained, flags, resolve_command

if TYPE_CHECKING:
    from forkd.images.apart import Cells
    from forkd.images.steps import Build

RESOLVE_TIMEOUT_S = 120.0
"""How long a registry may take to say which image a tag names."""


def resolve(reference: str, build: Build, cells: Cells | None) -> str:
    """Return the digest that an image of a registry has now.

    Args:
        reference: Which image.
        build: What it is a part of; it knows what the operator says of registries.
        cells: Where the registry is asked; None for this very process.

    Raises:
        NotFound: The registry has no such image.
        BuildError: It does not answer, or not to us.
    """
    build.tell("resolve", f"asking for {reference}")
    try:
        manifest = _ask(reference, build, cells)
    except BuildError as error:
        raise explained(reference, error) from error
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"


def _ask(reference: str, build: Build, cells: Cells | None) -> bytes:
    registries = build.registries
    insecure, auth_file = registries.is_insecure(reference), registries.auth_file
    if cells is None:
        command = resolve_command(reference, flags(insecure=insecure, auth_file=auth_file))
        return build.run(command, timeout_s=RESOLVE_TIMEOUT_S).stdout
    with cells() as cell, files.scratch_folder("forkd-resolve-") as folder:
        if auth_file is not None:
            copied = folder / "auth.json"
            files.copy_sparse(auth_file, copied)
            ownership.give(copied, cell.uid)
            auth_file = copied
        asked = resolve_command(reference, flags(insecure=insecure, auth_file=auth_file))
        read = BUILDER_PATHS if auth_file is None else (*BUILDER_PATHS, auth_file)
        command = cell.command(asked, read=read, network=True)
        environment = process.plain_environment() | {"HOME": "/tmp"}  # noqa: S108 - the cell's
        return build.run(command, timeout_s=RESOLVE_TIMEOUT_S, env=environment).stdout
