"""Unpack an OCI image into a root file system, with what it says of environment and user.

    oci = "folder" or "folder:tag"   an OCI layout, as `skopeo copy` makes
    oci = "image.tar"                an OCI archive, or what `docker save` writes
    oci = "name:tag"                 a registry's image, where the network allows
    oci = "docker-archive:image.tar" any of these said outright: oci:, oci-archive:,
                                     docker-archive:, docker://

skopeo copies the image into a layout of our own and checks every digest; umoci unpacks the
layers.  Neither runs anything of the image, and umoci keeps `..` and symbolic links inside
the folder it unpacks to.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from forkd.errors import BuildError, HostError
from forkd.host import files
from forkd.images import registries
from forkd.images.namespace import run_as_root
from forkd.images.rootfs import MOUNT_POINTS, make_folder

if TYPE_CHECKING:
    from forkd.images.steps import Build


COPY_TIMEOUT_S = 1_800.0
UNPACK_TIMEOUT_S = 1_800.0

LAYERS_PER_DISK_MAX = 4
"""How many times the size of the disk all layers together may unpack to.

Layers replace and remove each other's files, so their sum may well exceed what is left in
the end; but a few kilobytes of hostile layer can say that they are terabytes.
"""

ENTRIES_MAX = 1_000_000
"""Most names in all layers of an image together."""

ENTRIES_SEARCHED_MAX = 100_000
"""Most entries of an archive looked at to tell which kind it is."""

_SCHEMES = ("oci:", "oci-archive:", "docker-archive:", "docker:")
_ARCHITECTURE = ("--override-os", "linux", "--override-arch", "amd64")
_STAGED = "staged"


@dataclass(frozen=True, slots=True)
class OciConfig:
    """What an OCI image says of the processes that run in it."""

    env: dict[str, str]
    cwd: str
    user: str
    entrypoint: tuple[str, ...] | None = None
    cmd: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class OciReference:
    """Where an OCI image is.

    Attributes:
        transport: The kind of place, as skopeo names it.
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
    def place(self) -> str:
        """It as skopeo takes it."""
        return f"{self.transport}:{self.rest}"

    def __str__(self) -> str:
        return self.shown or self.place


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
        return OciReference(_archive_kind(path), str(path), path)
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


def _archive_kind(path: Path) -> str:
    """Tell what `docker save` wrote from an OCI archive; newer ones are both."""
    found = set()
    try:
        with files.opened(path) as file, tarfile.open(fileobj=file) as archive:
            for count, member in enumerate(archive):
                name = member.name.removeprefix("./")
                if name == "manifest.json":
                    return "docker-archive"
                found.add(name)
                if count > ENTRIES_SEARCHED_MAX:
                    break
    except (tarfile.TarError, HostError, EOFError) as error:
        raise BuildError(f"{path} is no image archive: {error}", path=str(path)) from error
    if "index.json" in found:
        return "oci-archive"
    raise BuildError(f"{path} is no image archive: it has no index.json or manifest.json")


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
    layout = bundle / "layout"
    staged = f"oci:{layout}:{_STAGED}"
    build.tell("packages", f"copying {source}", 0.0)
    flags = registries.flags(insecure=source.insecure, auth_file=source.auth_file, prefix="src-")
    skopeo = ["skopeo", "--insecure-policy", *_ARCHITECTURE]
    try:
        build.run([*skopeo, "copy", "-q", *flags, source.place, staged], timeout_s=COPY_TIMEOUT_S)
    except BuildError as error:
        if source.path is None:
            raise registries.explained(source.rest, error) from error
        raise BuildError(f"cannot copy the image {source}: {error}", **error.context) from error
    inspected = build.run(
        ["skopeo", *_ARCHITECTURE, "inspect", "--config", staged], timeout_s=COPY_TIMEOUT_S
    )
    config = parse_config(inspected.stdout)
    build.tell("packages", "checking layers", 0.4)
    layers_bytes = check_layers(layout, bytes_max=LAYERS_PER_DISK_MAX * disk_bytes)
    build.tell("packages", "unpacking layers", 0.5)
    unpacked = bundle / "unpacked"
    unpack: list[str | Path] = ["umoci", "unpack", "--image", f"{layout}:{_STAGED}", unpacked]
    run_as_root(unpack, build, timeout_s=UNPACK_TIMEOUT_S)
    folder = unpacked / "rootfs"
    for name in MOUNT_POINTS:
        make_folder(folder, PurePosixPath("/") / name)
    build.tell("packages", "image unpacked", 1.0)
    return folder, config, layers_bytes


def check_layers(layout: Path, *, bytes_max: int, entries_max: int = ENTRIES_MAX) -> int:
    """Return how many bytes the layers of the one image in `layout` say they hold.

    Raises:
        BuildError: More than `bytes_max` bytes or `entries_max` names, or a damaged layer.
    """
    left_bytes, left_entries = bytes_max, entries_max
    try:
        for blob in _layers(layout):
            with files.opened(blob) as file, tarfile.open(fileobj=file, mode="r|*") as archive:
                for member in archive:
                    left_bytes -= member.size
                    left_entries -= 1
                    if left_bytes < 0:
                        raise BuildError(f"the image's layers hold more than {bytes_max} bytes")
                    if left_entries < 0:
                        raise BuildError(f"the image's layers hold more than {entries_max} names")
                    setattr(archive, "members", [])  # noqa: B010 - tarfile keeps them all, untyped
    except (tarfile.TarError, HostError, EOFError, zlib.error, ValueError, KeyError) as error:
        raise BuildError(f"a layer of the image is damaged: {error}") from error
    return bytes_max - left_bytes


def _layers(layout: Path) -> list[Path]:
    """Return the files of the layers in a layout that skopeo has written and checked."""
    index = json.loads(files.read_all(layout / "index.json"))
    manifest = json.loads(files.read_all(_blob(layout, index["manifests"][0])))
    return [_blob(layout, layer) for layer in manifest["layers"]]


def _blob(layout: Path, descriptor: dict[str, str]) -> Path:
    algorithm, _, digest = descriptor["digest"].partition(":")
    return layout / "blobs" / algorithm / digest


def parse_config(data: bytes) -> OciConfig:
    """Return what an image's configuration says.

    Raises:
        BuildError: It is no such configuration, or one for another machine.
    """
    try:
        document = json.loads(data)
        system, architecture = document["os"], document["architecture"]
        settings: dict[str, Any] = document.get("config") or {}
        env = dict(line.split("=", 1) for line in settings.get("Env") or [])
        program = [_program(settings.get(name)) for name in ("Entrypoint", "Cmd")]
        cwd, user = settings.get("WorkingDir") or "/", settings.get("User") or "root"
        config = OciConfig(env, cwd, user, *program)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"the image's configuration is damaged: {error}") from error
    if (system, architecture) != ("linux", "amd64"):
        raise BuildError(f"the image is for {system} on {architecture}, not linux on amd64")
    return config


def _program(words: object) -> tuple[str, ...] | None:
    """Return a program and its arguments; None for none.

    Raises:
        TypeError: It is something else.
    """
    if not words:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise TypeError("a program is a list of strings")
    return tuple(words)
