"""Files inside a sandbox.  Contents are streamed both ways and never whole in memory."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from forkd.daemon import convert
from forkd.daemon.bodies import takes_body, takes_upload
from forkd.daemon.routes import CallerOf, GuestsOf, IdOf, bytes_as, router
from forkd.daemon.streaming import Stream
from forkd.model.caller import Scope
from forkd.wire import v2_files

routes = router("files")

BYTES = "application/octet-stream"
TAR = "application/x-tar"
_BODY = bytes_as(BYTES)
_ARCHIVE = bytes_as(TAR)


@routes.get(
    "/v2/sandboxes/{id}/files",
    operation_id="read_file",
    response_class=Response,
    responses={200: _BODY},
)
async def read_file(
    sandbox: IdOf, query: Annotated[v2_files.FileRead, Query()], caller: CallerOf, guests: GuestsOf
) -> Response:
    """Return a file's bytes; `X-File-Size` and `X-File-Mode` describe the file as opened."""
    reader = await guests.read_file(
        caller, sandbox, query.path, offset=query.offset, length=query.length
    )
    headers = {"X-File-Size": str(reader.size_bytes), "X-File-Mode": f"{reader.mode:04o}"}
    return Stream(reader, owned=reader, media_type=BYTES, headers=headers)


@routes.put(
    "/v2/sandboxes/{id}/files",
    operation_id="write_file",
    openapi_extra={"requestBody": {**_BODY, "required": True}},
)
@takes_upload(Scope.RUN)
async def write_file(
    sandbox: IdOf,
    query: Annotated[v2_files.FileWrite, Query()],
    request: Request,
    caller: CallerOf,
    guests: GuestsOf,
) -> v2_files.FileWritten:
    """Write the request's body to a file: whole, or not at all."""
    written = await guests.write_file(
        caller,
        sandbox,
        query.path,
        request.stream(),
        mode=query.mode,
        make_parents=query.make_parents,
        user=query.user,
    )
    return v2_files.FileWritten(bytes=written)


@routes.get(
    "/v2/sandboxes/{id}/files/archive",
    operation_id="read_archive",
    response_class=Response,
    responses={200: _ARCHIVE},
)
async def read_archive(
    sandbox: IdOf, query: Annotated[v2_files.FilePath, Query()], caller: CallerOf, guests: GuestsOf
) -> Response:
    """Return a file or a folder, with all that is in it, as a tar archive."""
    reader = await guests.read_archive(caller, sandbox, query.path)
    return Stream(reader, owned=reader, media_type=TAR)


@routes.put(
    "/v2/sandboxes/{id}/files/archive",
    operation_id="write_archive",
    openapi_extra={"requestBody": {**_ARCHIVE, "required": True}},
)
@takes_upload(Scope.RUN)
async def write_archive(
    sandbox: IdOf,
    query: Annotated[v2_files.ArchiveWrite, Query()],
    request: Request,
    caller: CallerOf,
    guests: GuestsOf,
) -> v2_files.ArchiveWritten:
    """Make a tree of a tar archive; what cannot be made is left out and listed."""
    result = await guests.write_archive(
        caller,
        sandbox,
        query.path,
        request.stream(),
        user=query.user,
        keep_owner=query.keep_owner,
    )
    return convert.archive_written(result)


@routes.delete("/v2/sandboxes/{id}/files", operation_id="remove_file", status_code=204)
async def remove_file(
    sandbox: IdOf,
    query: Annotated[v2_files.FileRemove, Query()],
    caller: CallerOf,
    guests: GuestsOf,
) -> None:
    """Remove a file, an empty folder, or with `recursive` a whole one."""
    await guests.remove(caller, sandbox, query.path, recursive=query.recursive)


@routes.get("/v2/sandboxes/{id}/files/stat", operation_id="stat_file")
async def stat_file(
    sandbox: IdOf, query: Annotated[v2_files.FilePath, Query()], caller: CallerOf, guests: GuestsOf
) -> v2_files.FileEntry:
    """Describe one file; symbolic links are not followed."""
    return convert.file_entry(await guests.stat(caller, sandbox, query.path))


@routes.get("/v2/sandboxes/{id}/files/list", operation_id="list_files")
async def list_files(
    sandbox: IdOf, query: Annotated[v2_files.FilePath, Query()], caller: CallerOf, guests: GuestsOf
) -> v2_files.FileList:
    """List a folder, by name."""
    entries = await guests.list_dir(caller, sandbox, query.path)
    return v2_files.FileList(entries=[convert.file_entry(each) for each in entries])


@routes.post("/v2/sandboxes/{id}/files/mkdir", operation_id="make_dir", status_code=204)
@takes_body(Scope.RUN)
async def make_dir(
    sandbox: IdOf, body: v2_files.MakeDir, caller: CallerOf, guests: GuestsOf
) -> None:
    """Make a folder."""
    await guests.make_dir(
        caller, sandbox, body.path, parents=body.parents, mode=body.mode, user=body.user
    )


@routes.post("/v2/sandboxes/{id}/files/move", operation_id="move_file", status_code=204)
@takes_body(Scope.RUN)
async def move_file(sandbox: IdOf, body: v2_files.Move, caller: CallerOf, guests: GuestsOf) -> None:
    """Rename a file or a folder within the sandbox."""
    await guests.move(caller, sandbox, body.source, body.target)
