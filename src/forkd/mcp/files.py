"""Tools that read and write the files of a sandbox."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from forkd import limits
from forkd.errors import InvalidRequest
from forkd.mcp.call import Arguments, Call, Picture, Result, Toolbox, picture_type
from forkd.mcp.fields import Path, SandboxName
from forkd.mcp.output import whole_head
from forkd.wire.text import readable

if TYPE_CHECKING:
    from forkd.sdk import AsyncFiles

box = Toolbox()

Encoding = Literal["utf-8", "base64"]


class ReadFile(Arguments):
    """A part of a file."""

    sandbox_id: SandboxName
    path: Path
    offset: int = Field(default=0, ge=0, description="Where to begin, in bytes.")
    length: int = Field(
        default=limits.MCP_READ_BYTES_DEFAULT,
        ge=4,
        le=limits.MCP_READ_BYTES_MAX,
        description="How many bytes to read at most.",
    )


class FileContent(Result):
    """A part of a file."""

    content: str
    encoding: Literal["utf-8", "base64", "picture"] = Field(
        description="base64 for what is not text in UTF-8; picture for one that is shown beside."
    )
    size_bytes: int = Field(description="How long the whole file is.")
    next_offset: int | None = Field(description="The offset of the next part; null at the end.")


@box.tool(ReadFile, FileContent, reads=True)
async def read_file(call: Call, args: ReadFile) -> FileContent:
    """Read a file of a sandbox, or a part of it.

    A long file is read in parts: pass next_offset as offset to go on. This also reads the whole
    of a long output that exec_command or eval_code has kept. A picture (PNG, JPEG, GIF, WebP) is
    shown.
    """
    files = (await call.sandbox(args.sandbox_id)).files
    size = (await files.stat(args.path)).size_bytes
    data = await _part(files, args.path, args.offset, args.length)
    media_type = picture_type(data) if args.offset == 0 else None
    if media_type is not None and size <= limits.MCP_PICTURE_BYTES_MAX:
        shown = Picture(await _part(files, args.path, 0, size), media_type)
        return FileContent(
            content="", encoding="picture", size_bytes=size, next_offset=None
        ).with_pictures(shown)
    end = args.offset + len(data)
    whole = data if end >= size else whole_head(data)
    text = text_of(whole)
    end = end if text is None else args.offset + len(whole)
    return FileContent(
        content=base64.b64encode(data).decode() if text is None else text,
        encoding="base64" if text is None else "utf-8",
        size_bytes=size,
        next_offset=end if end < size else None,
    )


async def _part(files: AsyncFiles, path: str, offset: int, length: int) -> bytes:
    async with files.open(path, offset=offset, length=length) as pieces:
        return b"".join([piece async for piece in pieces])


def text_of(data: bytes) -> str | None:
    """Return the text that `data` is; None if it is none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


class WriteFile(Arguments):
    """A file to write."""

    sandbox_id: SandboxName
    path: Path
    content: str = Field(
        max_length=limits.MCP_WRITE_CHARS_MAX, description="All that is to be in the file."
    )
    encoding: Encoding = Field(default="utf-8", description="base64 for what is not text.")
    mode: int | None = Field(
        default=None,
        ge=0,
        le=limits.FILE_MODE_MAX,
        description="Permissions as a number, 493 for rwxr-xr-x; null for those it has, or 0644.",
    )


class FileWritten(Result):
    """A file that was written."""

    path: str
    bytes: int


@box.tool(WriteFile, FileWritten, destroys=True, repeatable=True)
async def write_file(call: Call, args: WriteFile) -> FileWritten:
    """Write a file in a sandbox, whole; folders above it are made, and a file there is replaced."""
    data = args.content.encode()
    if args.encoding == "base64":
        try:
            data = base64.b64decode(args.content, validate=True)
        except binascii.Error as error:
            raise InvalidRequest(f"content: is no base64: {error}", field="content") from None
    files = (await call.sandbox(args.sandbox_id)).files
    written = await files.write(args.path, data, mode=args.mode, make_parents=True)
    return FileWritten(path=args.path, bytes=written)


class ListFiles(Arguments):
    """A folder."""

    sandbox_id: SandboxName
    path: Path = Field(default="/", description="An absolute path of a folder in the sandbox.")


class File(Result):
    """A file, a folder or a link."""

    name: str
    kind: Literal["file", "directory", "symlink", "other"]
    size_bytes: int
    mode: str = Field(description="Permissions, in octal.")
    target: str | None = Field(description="Where a link leads.")


class FileListing(Result):
    """What is in a folder."""

    path: str
    entries: list[File] = Field(description="By name.")
    more: int = Field(description="How many others there are.")


@box.tool(ListFiles, FileListing, reads=True)
async def list_files(call: Call, args: ListFiles) -> FileListing:
    """List a folder of a sandbox: names, kinds and sizes."""
    found = await (await call.sandbox(args.sandbox_id)).files.list(args.path)
    return FileListing(
        path=args.path,
        entries=[
            File(
                name=readable(each.name),
                kind=each.kind,
                size_bytes=each.size_bytes,
                mode=f"{each.mode & limits.FILE_MODE_MAX:04o}",
                target=None if each.target is None else readable(each.target),
            )
            for each in found[: limits.MCP_LISTED_MAX]
        ],
        more=max(0, len(found) - limits.MCP_LISTED_MAX),
    )
