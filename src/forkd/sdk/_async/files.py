"""Files inside a sandbox."""

from __future__ import annotations

import posixpath
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from forkd.errors import EngineExited, ForkdError, InvalidRequest, NotFound, TransportError
from forkd.sdk._archive import Copied, packed
from forkd.sdk._local import neither
from forkd.sdk._parallel import async_unpacked
from forkd.sdk._requests import as_base64, build
from forkd.sdk._results import FileEntry, placed
from forkd.sdk._transport import async_pieces
from forkd.wire.text import is_utf8
from forkd.wire.v2 import SandboxInfo
from forkd.wire.v2_files import ArchiveWritten, FileList, FileWritten, MakeDir, Move

if TYPE_CHECKING:
    import builtins
    from collections.abc import AsyncIterable, AsyncIterator, Mapping
    from os import PathLike

    import httpx

    from forkd.sdk._async.http import AsyncHttp


class AsyncFiles:
    """The file system of one sandbox; paths are the guest's, and absolute."""

    def __init__(self, http: AsyncHttp, sandbox_path: str) -> None:
        self._http = http
        self._sandbox_path = sandbox_path
        self._path = f"{sandbox_path}/files"

    @overload
    async def read(self, path: str, *, format: Literal["bytes"] = "bytes") -> bytes: ...

    @overload
    async def read(self, path: str, *, format: Literal["text"]) -> str: ...

    async def read(self, path: str, *, format: Literal["bytes", "text"] = "bytes") -> bytes | str:  # noqa: A002 - E2B's name
        """Return a file's contents.

        Args:
            path: Which file.
            format: "bytes", or "text" for a file that is UTF-8.

        Raises:
            NotFound: There is no such file.
            InvalidRequest: The format is another one.
        """
        if format not in {"bytes", "text"}:
            raise InvalidRequest(f'format: is "bytes" or "text", not {format!r}', field="format")
        async with self._streamed(self._path, _where(path)) as answer:
            data = await answer.aread()
        return data.decode() if format == "text" else data

    async def read_text(self, path: str) -> str:
        """Return a file's contents, which must be UTF-8."""
        return (await self.read(path)).decode()

    @asynccontextmanager
    async def open(
        self, path: str, *, offset: int = 0, length: int | None = None
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a file for reading: gives an iterator of its bytes, in pieces.

        Args:
            path: Which file.
            offset: Where to begin, in bytes.
            length: How many bytes at most; None for all.
        """
        query = {**_where(path), "offset": offset or None, "length": length}
        async with self._streamed(self._path, query) as answer:
            yield answer.aiter_bytes()

    async def write(
        self,
        path: str,
        contents: bytes | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        make_parents: bool = False,
        user: str | None = None,
    ) -> int:
        """Write a file, whole or not at all; returns its length in bytes.

        Args:
            path: Where.
            contents: What; an iterable is sent as it comes, and may be larger than memory.
            mode: Permissions; those of the file that is replaced, else 0644, if None.
            make_parents: Make the folders above it that are missing.
            user: Owner of a new file and of new folders, a name or `uid[:gid]`; the image's user
                if None.  A file that is replaced keeps its owner.
        """
        query = {**_where(path), "mode": mode, "make_parents": make_parents or None, "user": user}
        data = contents.encode() if isinstance(contents, str) else contents
        written = await self._http.call(
            FileWritten, "PUT", self._path, query=query, content=data, timeout_s=None
        )
        return written.bytes

    @asynccontextmanager
    async def open_archive(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open a file or a folder for reading as a tar archive, in pieces."""
        async with self._streamed(f"{self._path}/archive", _where(path)) as answer:
            yield answer.aiter_bytes()

    async def write_archive(
        self,
        path: str,
        archive: bytes | AsyncIterable[bytes],
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> ArchiveWritten:
        """Make a tree of a tar archive; what cannot be made is left out and in the answer.

        Args:
            path: The folder in which it is made, which need not exist.
            archive: The archive, uncompressed; an iterable is sent as it comes.
            user: Owner of what is made new, as of `write`.
            keep_owner: Everything gets the owner that the archive says.
        """
        query = {**_where(path), "user": user, "keep_owner": keep_owner or None}
        return await self._http.call(
            ArchiveWritten,
            "PUT",
            f"{self._path}/archive",
            query=query,
            content=archive,
            timeout_s=None,
        )

    async def upload(
        self,
        source: str | PathLike[str],
        target: str,
        *,
        user: str | None = None,
        keep_owner: bool = False,
    ) -> Copied:
        """Copy a file, or a folder with all that is in it, from this host into the sandbox.

        What cannot be copied is left out, and is in the answer.  Links are copied as links.

        Args:
            source: Which file or folder; a link there is followed.
            target: What it is called in the sandbox.  A folder that exists keeps what it has; what
                has the same name is replaced.
            user: Owner of what is made new, as of `write`.
            keep_owner: Keep owners, by number, and the bits that change the user.

        Raises:
            NotFound: There is no `source`.
            HostError: It cannot be read.
            Conflict: The agent of the sandbox's snapshot is too old for this.
        """
        copied = Copied()
        folder, pieces = packed(source, target, copied, exact=keep_owner)
        made = await self.write_archive(
            folder, async_pieces(pieces), user=user, keep_owner=keep_owner
        )
        copied.written(made)
        return copied

    async def download(
        self, source: str, target: str | PathLike[str], *, keep_owner: bool = False
    ) -> Copied:
        """Copy a file, or a folder with all that is in it, from the sandbox to this host.

        What cannot be copied is left out, and is in the answer.  Nothing is written outside of
        `target`, whatever names and links the sandbox has.

        Args:
            source: Which file or folder in the sandbox; a link there is followed.
            target: What it is called on this host.  A folder that exists keeps what it has; what
                has the same name is replaced.
            keep_owner: Keep owners, by number, and the bits that change the user; needs root.

        Raises:
            NotFound: There is no `source`.
            InvalidRequest: It is neither a file nor a folder.
            HostError: `target` cannot be made, or there is no room.
            Conflict: The agent of the sandbox's snapshot is too old for this.
        """
        if (await self.stat(source)).kind == "other":
            raise neither(source)
        copied = Copied()
        async with self.open_archive(source) as pieces:
            await async_unpacked(pieces, target, copied, exact=keep_owner)
        return copied

    async def stat(self, path: str) -> FileEntry:
        """Return what a path is; symbolic links are not followed."""
        found = await self._http.call(FileEntry, "GET", f"{self._path}/stat", query=_where(path))
        return placed(found, path)

    async def get_info(self, path: str) -> FileEntry:
        """Return what `stat` does, under E2B's name."""
        return await self.stat(path)

    async def exists(self, path: str) -> bool:
        """Return whether there is anything at a path."""
        try:
            await self.stat(path)
        except NotFound as error:
            if "guest_code" not in error.context:  # it is the sandbox that does not exist
                raise
            return False
        return True

    async def list(self, path: str) -> builtins.list[FileEntry]:
        """Return what is in a folder, by name."""
        found = await self._http.call(FileList, "GET", f"{self._path}/list", query=_where(path))
        return [placed(each, posixpath.join(path, each.name)) for each in found.entries]

    async def make_dir(
        self,
        path: str,
        *,
        parents: bool = False,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        """Make a folder.

        Args:
            path: Where.
            parents: Make the folders above it that are missing; a folder that exists is fine.
            mode: Permissions; 0755 if None.
            user: Owner of what is made, a name or `uid[:gid]`; the image's user if None.
        """
        request = build(MakeDir, path=path, parents=parents, mode=mode, user=user)
        await self._http.send("POST", f"{self._path}/mkdir", body=request)

    async def move(self, source: str, target: str) -> None:
        """Rename a file or a folder."""
        request = build(Move, source=source, target=target)
        await self._http.send("POST", f"{self._path}/move", body=request)

    async def rename(self, old_path: str, new_path: str) -> None:
        """Do what `move` does, under E2B's name."""
        await self.move(old_path, new_path)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or a folder.

        Args:
            path: What.
            recursive: Remove a folder with all that is in it; else it must be empty.
        """
        query = {**_where(path), "recursive": recursive or None}
        await self._http.send("DELETE", self._path, query=query)

    @asynccontextmanager
    async def _streamed(self, path: str, query: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """Open an answer; one that breaks off because the sandbox ended says why it did."""
        try:
            async with self._http.streamed(path, query) as answer:
                yield answer
        except TransportError as error:
            raise await self._explained(error) from error

    async def _explained(self, error: TransportError) -> ForkdError:
        try:
            sandbox = await self._http.call(SandboxInfo, "GET", self._sandbox_path)
        except NotFound:
            return EngineExited("the sandbox has exited: deleted")
        except ForkdError:
            return error
        if sandbox.exit_reason is None:
            return error
        return EngineExited(f"sandbox {sandbox.id} has exited: {sandbox.exit_reason}")


def _where(path: str) -> dict[str, Any]:
    """Return the members of a query that say which path."""
    return {"path": path} if is_utf8(path) else {"path_b64": as_base64(path)}
