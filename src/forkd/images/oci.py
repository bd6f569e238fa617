"""Unpack an OCI image into a root file system, with what it says of environment and user.

    oci = "folder" or "folder:tag"   an OCI layout, as `skopeo copy` makes
    oci = "image.tar"                an OCI archive, or what `docker save` writes
    oci = "name:tag"                 a registry's image, where the network allows
    oci = "docker-archive:image.tar" any of these said outright: oci:, oci-archive:,
                                     docker-archive:, docker://

Two programs of ours do it: one copies a registry's image into a layout, and has the network; one
unpacks, and has none.  Every digest is compared, and nothing of the image is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from forkd.errors import BuildError
from forkd.host import files, process
from forkd.images import children, stored, unpacking
from forkd.images.manifests import CONFIG_BYTES_MAX, OciConfig, parse_config
from forkd.images.namespace import run_as_root
from forkd.images.registries import Access
from forkd.images.rootfs import MOUNT_POINTS, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from forkd.images.steps import Build


FETCH_TIMEOUT_S = 1_800.0
UNPACK_TIMEOUT_S = 1_800.0

LAYERS_PER_DISK_MAX = 4
"""How many times the size of the disk all layers together may unpack to.

Layers replace and remove each other's files, so their sum may well exceed what is left in
the end; but a few kilobytes of hostile layer can say that they are terabytes.
"""

_SCHEMES = ("oci:", "oci-archive:", "docker-archive:", "docker:")


@dataclass(frozen=True, slots=True)
class OciReference:
    """Where an OCI image is.

    Attributes:
        transport: The kind of place: `docker` for a registry, or as of `forkd.images.stored`.
        rest: The place: a path, perhaps with `:tag`, or `//` and a registry's reference.
        path: The file or folder to which `rest` leads; None for a registry.
        shown: What it is called to people, if it is a copy of what they know.
        insecure: Whether its registry is asked without TLS.
        auth_file: Credentials for its registry; None for none.
    """

    transport: str
    rest: str
    path: Path | None
    shown: str | None = None
    insecure: bool = False
    auth_file: Path | None = None

    @property
    def tag(self) -> str:
        """Which image of a file or a folder; empty if that is not said."""
        return "" if self.path is None else self.rest.removeprefix(f"{self.path}").removeprefix(":")

    def __str__(self) -> str:
        return self.shown or f"{self.transport}:{self.rest}"


def parse_reference(text: str, folder: Path) -> OciReference:
    """Return where `text` leads; paths are relative to `folder`.

    Raises:
        BuildError: It names a file that is missing or no image archive.
    """
    for scheme in _SCHEMES:
        if text.startswith(scheme):
            return _explicit(scheme.removesuffix(":"), text.removeprefix(scheme), folder)
    path = folder / text
    layout = folder / text.partition(":")[0] / "oci-layout"
    if files.is_folder(path) or files.is_file(layout):
        return _explicit("oci", text, folder)
    if files.is_file(path):
        return OciReference(stored.archive_kind(path), str(path), path)
    if text.startswith(("/", ".")) or text.endswith((".tar", ".tar.gz")):
        raise BuildError(f"no OCI image at {path}", path=str(path))
    return OciReference("docker", f"//{text}", None)


def local_paths(text: str) -> tuple[str, ...]:
    """Return all that `parse_reference` might take for a path; none for a registry's reference."""
    for scheme in _SCHEMES:
        if text.startswith(scheme):
            path = text.removeprefix(scheme).partition(":")[0]
            return () if scheme == "docker:" else (path,)
    return (text, text.partition(":")[0])


def _explicit(transport: str, rest: str, folder: Path) -> OciReference:
    if transport == "docker":
        return OciReference(transport, f"//{rest.removeprefix('//')}", None)
    name, colon, tag = rest.partition(":")
    path = folder / name
    if not files.is_there(path):
        raise BuildError(f"no OCI image at {path}", path=str(path))
    return OciReference(transport, f"{path}{colon}{tag}", path)


def build_oci(
    source: OciReference, bundle: Path, build: Build, *, disk_bytes: int
) -> tuple[Path, OciConfig, int]:
    """Unpack the image at `source`, meant for a disk of this size, below the folder `bundle`.

    Returns:
        Its root file system, a folder in `bundle`; its settings; and the bytes of all its layers.

    Raises:
        NotFound: Its registry does not have it.
        BuildError: It is out of reach, damaged, not for x86-64 Linux, or unpacks to more
            than `LAYERS_PER_DISK_MAX` disks.
    """
    bytes_max = LAYERS_PER_DISK_MAX * disk_bytes
    kind, path, tag = source.transport, source.path, source.tag
    if path is None:
        kind, path, tag = stored.LAYOUT, bundle / "layout", ""
        _fetch(source, path, build, bytes_max)
    build.tell("packages", f"unpacking {source}", 0.5)
    unpacked = bundle / "unpacked"
    args = children.command("unpack", "--bytes-max", str(bytes_max), kind, path, tag, unpacked)

    def start(hear: Callable[[str], None]) -> None:
        run_as_root(args, build, timeout_s=UNPACK_TIMEOUT_S, on_line=hear)

    try:
        layers_bytes = int(children.told(build, start)["bytes"])
    except BuildError as error:
        raise BuildError(f"cannot unpack the image {source}: {error}", **error.context) from error
    said = files.read_regular(unpacked / unpacking.CONFIG_NAME, CONFIG_BYTES_MAX)
    folder = unpacked / unpacking.ROOTFS_NAME
    for name in MOUNT_POINTS:
        make_folder(folder, PurePosixPath("/") / name)
    build.tell("packages", "image unpacked", 1.0)
    return folder, parse_config(said), layers_bytes


def _fetch(source: OciReference, layout: Path, build: Build, bytes_max: int) -> None:
    """Copy a registry's image into a layout."""
    reference = source.rest.removeprefix("//")
    build.tell("packages", f"fetching {reference}", 0.0)
    options = Access(source.insecure, source.auth_file).options()
    limit = ("--bytes-max", str(bytes_max))
    args = children.command("fetch", *options, *limit, reference, layout)

    def start(hear: Callable[[str], None]) -> None:
        environment = process.plain_environment()
        build.run(args, timeout_s=FETCH_TIMEOUT_S, env=environment, on_line=hear)

    children.told(build, start)
