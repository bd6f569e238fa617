"""Images of registries: what a tag means now, and a copy of one as a folder with an OCI layout."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

from forkd.errors import BuildError, InvalidRequest, NotFound
from forkd.host import folders
from forkd.images import manifests
from forkd.model.reference import parse_reference
from forkd.registry.client import Registry, digest_of
from forkd.registry.credentials import login_for
from forkd.registry.limits import LAYERS_AT_ONCE_MAX
from forkd.registry.session import Fault, Kind, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from forkd.images.manifests import Descriptor
    from forkd.images.registries import Access
    from forkd.model.reference import ImageReference

_AUTH_VARIABLE = "REGISTRY_AUTH_FILE"


def digest_now(reference: str, access: Access) -> str:
    """Return the digest of the manifest that an image has now; blocks.

    Args:
        reference: Which image.
        access: How its registry is asked.

    Raises:
        NotFound: The registry has no such image.
        BuildError: It does not answer, or not to us.
    """
    image = parse_reference(reference)
    with _opened(image, access) as registry:
        return registry.manifest(_which(image))[1]


def fetch(
    reference: str,
    access: Access,
    layout: Path,
    *,
    bytes_max: int,
    tell: Callable[[int, int], None],
) -> None:
    """Copy an image for Linux on amd64 into a new folder, as an OCI layout; blocks.

    Args:
        reference: Which image.
        access: As `digest_now`.
        layout: The folder.
        bytes_max: How much all its layers may hold together.
        tell: Is told how many bytes are there, and how many there will be.

    Raises:
        NotFound: The registry has no such image.
        BuildError: It does not answer, or not to us; or the image is damaged, was changed, holds
            too much, or is not for Linux on amd64.
    """
    image = parse_reference(reference)
    ended = threading.Event()
    with _opened(image, access, ended.wait) as registry:
        raw, _ = registry.manifest(_which(image))
        raw, manifest = manifests.resolve(raw, lambda found: registry.manifest(found.digest)[0])
        total = sum(layer.size for layer in manifest.layers)
        if total > manifests.stored_bytes_max(bytes_max):
            raise BuildError(f"the image's layers hold more than {bytes_max} bytes")
        blobs = layout / "blobs" / "sha256"
        folders.make(blobs)
        config = registry.blob(manifest.config.digest, manifest.config.size)
        manifests.parse_config(config)  # before much is fetched for nothing
        folders.write(blobs / _hex(manifest.config.digest), config)
        wanted = dict.fromkeys(manifest.layers)
        _fetch_all(registry, wanted, blobs, ended, lambda done: tell(done, total))
    _write_index(layout, raw)


class _Ended(Exception):
    """Another layer could not be had, so this one is not wanted."""


def _fetch_all(
    registry: Registry,
    layers: Iterable[Descriptor],
    blobs: Path,
    ended: threading.Event,
    tell: Callable[[int], None],
) -> None:
    """Write layers to a folder, some of them at once; `ended` is set once one cannot be had."""
    done, lock = 0, threading.Lock()

    def counted(pieces: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal done
        for piece in pieces:
            if ended.is_set():
                raise _Ended
            with lock:
                done += len(piece)
                tell(done)
            yield piece

    def write(layer: Descriptor) -> None:
        pieces = counted(registry.pieces(layer.digest, layer.size))
        folders.write_pieces(blobs / _hex(layer.digest), pieces)

    with ThreadPoolExecutor(LAYERS_AT_ONCE_MAX) as threads:
        written = [threads.submit(write, layer) for layer in layers]
        try:
            for each in as_completed(written):
                each.result()
        except BaseException:
            ended.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def explained(image: ImageReference, fault: Fault) -> BuildError | NotFound:
    """Return what went wrong with a registry in words that its users and its operator can act on.

    Args:
        image: What was asked for.
        fault: What went wrong.
    """
    shown, registry = str(image), image.registry
    match fault.kind:
        case Kind.MISSING:
            return NotFound(fault.text, image=shown)
        case Kind.REFUSED:
            said = (
                f"{registry} refuses {shown}: it does not exist there, or needs credentials, which "
                "the operator gives in FORKD_REGISTRY_AUTH_FILE"
            )
        case Kind.NO_TLS:
            said = (
                f"{registry} speaks plain HTTP, so {shown} was not fetched: the operator may allow "
                "that in FORKD_REGISTRIES_INSECURE"
            )
        case Kind.UNREACHABLE:
            said = f"{fault.text}; check the daemon's network, and FORKD_BUILD_NETWORK"
        case Kind.TLS:
            said = (
                f"{fault.text}; have this host trust who signed its certificate, or list "
                f"{registry} in FORKD_REGISTRIES_INSECURE"
            )
        case _:
            said = f"cannot fetch {shown}: {fault.text}"
    return BuildError(said, image=shown)


def _write_index(layout: Path, manifest: bytes) -> None:
    digest = digest_of(manifest)
    folders.write(layout / "blobs" / "sha256" / _hex(digest), manifest)
    described = {"mediaType": manifests.MANIFEST, "digest": digest, "size": len(manifest)}
    index = {"schemaVersion": 2, "manifests": [described]}
    folders.write(layout / "index.json", json.dumps(index).encode())


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _which(image: ImageReference) -> str:
    """Return what the registry is asked for."""
    return image.digest or image.tag or ""


def _opened(
    image: ImageReference, access: Access, wait: Callable[[float], object] = time.sleep
) -> Registry:
    login, file = None, access.auth_file
    try:
        if file is not None:
            login = login_for(image, {_AUTH_VARIABLE: str(file)})
    except InvalidRequest as error:
        raise BuildError(f"FORKD_REGISTRY_AUTH_FILE: {error}") from error
    return Registry(
        image,
        "image",
        manifests.ACCEPTED,
        login,
        trust=Trust.ANY if access.insecure else Trust.TLS,
        explain=lambda fault: explained(image, fault),
        wait=wait,
    )
