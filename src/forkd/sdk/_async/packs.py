"""Packs of snapshots: as bytes, and in registries and on servers."""

from __future__ import annotations

import tempfile
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from forkd.sdk._parallel import async_apart, async_aside
from forkd.sdk._requests import explicit
from forkd.sdk._sharing import DEFAULT_KEY, Steps, check_installed, pushed
from forkd.wire.v2_packs import Unpacked

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
    from os import PathLike
    from typing import BinaryIO

    from forkd.sdk._async.http import AsyncHttp
    from forkd.sdk._sharing import Pushed
    from forkd.wire.v2 import ProgressEvent


class AsyncPacks:
    """What the snapshots of a daemon can do with packs."""

    _http: AsyncHttp

    @asynccontextmanager
    async def pack(self, tag: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Pack a snapshot and all that it depends on: gives an iterator of an unsigned pack.

        Raises:
            Conflict: It is being written.
            StoreError: Something of it is missing or damaged.
        """
        path = f"/v2/snapshots/{self._http.quoted(tag)}/pack"
        async with self._http.streamed(path) as answer:
            yield answer.aiter_bytes()

    async def unpack(
        self,
        tag: str,
        contents: bytes | AsyncIterable[bytes],
        *,
        trusted: Sequence[bytes] = (),
        allow_unsigned: bool = False,
    ) -> Unpacked:
        """Take a pack: all of it, or nothing.

        Args:
            tag: What its head is called here.
            contents: The pack; an iterable is sent as it comes.
            trusted: Public keys, of 32 bytes each, whose signature is believed.
            allow_unsigned: Accept the pack regardless of its signature, or of none.

        Raises:
            PackError: It is damaged, hostile, unsigned or not trusted.
            Conflict: Another snapshot has the name.
        """
        query = {
            "trusted": ",".join(key.hex() for key in trusted),
            "allow_unsigned": allow_unsigned or None,
        }
        path = f"/v2/snapshots/{self._http.quoted(tag)}/pack"
        return await self._http.call(
            Unpacked, "PUT", path, query=query, content=contents, timeout_s=None
        )

    @explicit
    async def push(  # noqa: PLR0913 - one for each member
        self,
        tag: str,
        target: str,
        *,
        version: str | None = None,
        key: str | None = DEFAULT_KEY,
        cosign_key: str | PathLike[str] | None = None,
        plain_http: bool = False,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> Pushed:
        """Pack a snapshot, sign the pack and upload it to a registry or a server.

        This process uploads it, from a temporary file, with the credentials of docker or podman
        for a registry, and with `FORKD_PACKS_TOKEN` for a server.  A registry is sent only the
        layers that it lacks.

        Args:
            tag: The snapshot.
            target: `REGISTRY/NAME:TAG`, or the URL of a file or of a folder, which ends with `/`.
            version: Version in the folder; the next one unless set.
            key: Name of the secret key that signs, as of `forkd key ls`; None does not sign.
            cosign_key: File with a secret key in PEM, to sign as cosign does in a registry.
            plain_http: Ask the registry without TLS, though it is not on this host.
            on_progress: Called with each step, as it comes.

        Raises:
            NotFound: There is no such snapshot or key.
            InvalidRequest: An argument is malformed, or not for that kind of target.
            Denied: The registry or the server wants other credentials.
            TransportError: It cannot be reached, or failed.
            HostError: The extra `packs` is not installed.
        """
        check_installed()
        from forkd.packs import sharing  # noqa: PLC0415 - slow to load, and an extra

        place = sharing.push_target(
            tag, target, version=version, cosign_key=cosign_key, plain_http=plain_http
        )
        secret = None if key is None else sharing.secret_key(key)
        file: BinaryIO
        with tempfile.TemporaryFile() as file:
            packing = Steps(on_progress, "pack", f"packing {tag}")
            async with self.pack(tag) as pieces:
                async for piece in pieces:
                    await async_aside(partial(file.write, piece))
                    packing.add(len(piece))
            head = await async_aside(partial(sharing.signed_in, file, secret))
            pushing = Steps(on_progress, "push", f"pushing {place}")
            async with async_apart(place.upload(file, head)) as progress:
                # The file is closed first if this is cancelled, which ends the upload.
                with file:
                    async for done in progress:
                        if not isinstance(done, int):
                            return pushed(head, done)
                        pushing.reach(done, packing.size)
        raise AssertionError("an upload ends with what it stored")

    @explicit
    async def pull(  # noqa: PLR0913 - one for each member
        self,
        source: str,
        tag: str | None = None,
        *,
        folder: str | None = None,
        trusted: Sequence[bytes] | None = None,
        allow_unsigned: bool = False,
        cosign_key: str | PathLike[str] | None = None,
        plain_http: bool = False,
        on_progress: Callable[[ProgressEvent], object] | None = None,
    ) -> Unpacked:
        """Download a pack from a registry or a server and have the daemon take it.

        This process downloads it, as `push` uploads, and sends it on as it comes.

        Args:
            source: `REGISTRY/NAME:TAG`, `REGISTRY/NAME@DIGEST`, the URL of a file, or
                `FOLDER/NAME` or `FOLDER/NAME@VERSION` with the URL of a folder; with `folder`,
                `NAME` or `NAME@VERSION`.
            tag: What the snapshot is called here; its own name unless set.
            folder: URL of the folder that `source` is in; else `FORKD_PACKS_URL`.
            trusted: Public keys, of 32 bytes each, whose signature is believed; those of
                `forkd key ls` unless set.
            allow_unsigned: Accept the pack regardless of its signature, or of none.
            cosign_key: File with a public key in PEM; what a registry has without a cosign
                signature by it is refused.
            plain_http: Ask the registry without TLS, though it is not on this host.
            on_progress: Called with each step, as it comes.

        Raises:
            NotFound: There is no such pack.
            PackError: It is damaged, hostile, unsigned or not trusted.
            Conflict: Another snapshot has the name.
            InvalidRequest: An argument is malformed, or not for that kind of source.
            Denied: The registry or the server wants other credentials.
            TransportError: It cannot be reached, or failed.
            HostError: The extra `packs` is not installed.
        """
        check_installed()
        from forkd.packs import sharing  # noqa: PLC0415 - slow to load, and an extra

        place = sharing.pull_source(
            source, folder=folder, cosign_key=cosign_key, plain_http=plain_http
        )
        keys = sharing.trusted_keys() if trusted is None else list(trusted)
        download = sharing.download(place, keys, allow_unsigned=allow_unsigned)
        async with async_apart(download) as pieces:
            head = await anext(pieces)
            name = tag or place.name or sharing.tag_in(head)
            steps = Steps(on_progress, "unpack", f"unpacking {name}")
            contents = _told(head, pieces, steps)
            return await self.unpack(name, contents, trusted=keys, allow_unsigned=allow_unsigned)


async def _told(head: bytes, pieces: AsyncIterator[bytes], steps: Steps) -> AsyncIterator[bytes]:
    """Yield a pack, and say how far it has come."""
    yield head
    async for piece in pieces:
        steps.add(len(piece))
        yield piece
