"""Consoles and files of sandboxes as resources, for clients that attach them to a conversation."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    BlobResourceContents,
    ListResourcesResult,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    TextResourceContents,
)

from forkd.errors import ForkdError, InvalidRequest, NotFound
from forkd.limits import MCP_LISTED_MAX, MCP_RESOURCE_BYTES_MAX
from forkd.mcp.call import picture_type
from forkd.mcp.files import text_of
from forkd.sdk import AsyncSandbox

if TYPE_CHECKING:
    from forkd.sdk import AsyncClient

NOT_FOUND = -32002
"""Code of the protocol for a resource that does not exist."""

TEMPLATES = (
    ResourceTemplate(
        name="console",
        title="Console of a sandbox",
        uri_template="forkd://sandboxes/{sandbox_id}/console",
        description="What the kernel and the services of a sandbox have printed; the end of it.",
        mime_type="text/plain",
    ),
    ResourceTemplate(
        name="file",
        title="File in a sandbox",
        uri_template="forkd://sandboxes/{sandbox_id}/files/{+path}",
        description="A file, by its absolute path without the first slash.",
    ),
)
"""What can be read."""


async def listed(daemon: AsyncClient) -> ListResourcesResult:
    """Return the consoles of the sandboxes that there are; files are too many to be listed."""
    try:
        found = await daemon.sandboxes.list()
    except ForkdError as error:
        raise MCPError(INVALID_PARAMS, f"{error} [{error.code}]") from None
    return ListResourcesResult(
        resources=[
            Resource(
                name=f"console-{each.id}",
                title=f"Console of {each.info.name or each.id}",
                uri=f"forkd://sandboxes/{each.id}/console",
                mime_type="text/plain",
            )
            for each in found[:MCP_LISTED_MAX]
        ]
    )


async def read(daemon: AsyncClient, uri: str) -> ReadResourceResult:
    """Return a resource.

    Raises:
        MCPError: There is none, or the daemon refused.
    """
    try:
        sandbox_id, kind, path = _parsed(uri)
        sandbox = await AsyncSandbox.connect(sandbox_id, client=daemon)
        if kind == "console":
            data = (await sandbox.logs())[-MCP_RESOURCE_BYTES_MAX:]
            text = data.decode(errors="replace")
            said = TextResourceContents(uri=uri, text=text, mime_type="text/plain")
            return ReadResourceResult(contents=[said])
        size = (await sandbox.files.stat(path)).size_bytes
        if size > MCP_RESOURCE_BYTES_MAX:
            raise InvalidRequest(
                f"{path} has {size} bytes, and a resource at most {MCP_RESOURCE_BYTES_MAX}: the "
                "tool read_file reads it in parts"
            )
        return ReadResourceResult(contents=[_contents(uri, await sandbox.files.read(path))])
    except NotFound as error:
        raise MCPError(NOT_FOUND, f"{error} [{error.code}]") from None
    except ForkdError as error:
        raise MCPError(INVALID_PARAMS, f"{error} [{error.code}]") from None


def _parsed(uri: str) -> tuple[str, str, str]:
    """Return the sandbox, what of it, and the path that a URI names.

    Raises:
        NotFound: It names nothing of ours.
    """
    parts = urlsplit(uri)
    sandbox, _, rest = parts.path.removeprefix("/").partition("/")
    kind, _, path = rest.partition("/")
    ours = parts.scheme == "forkd" and parts.netloc == "sandboxes" and sandbox
    if not ours or (kind, bool(path)) not in {("console", False), ("files", True)}:
        raise NotFound(f"{uri[:200]} is no resource; resources/templates/list has their shapes")
    return unquote(sandbox), kind, "/" + unquote(path)


def _contents(uri: str, data: bytes) -> TextResourceContents | BlobResourceContents:
    text = text_of(data)
    if text is not None:
        return TextResourceContents(uri=uri, text=text, mime_type="text/plain")
    kind = picture_type(data) or "application/octet-stream"
    return BlobResourceContents(uri=uri, blob=base64.b64encode(data).decode(), mime_type=kind)
