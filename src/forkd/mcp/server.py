"""The protocol: which tools there are, and calls of them.

A call runs as a task of its own.  When the client cancels it, or goes away, the task is cancelled
once and then waited for, so that it can let go of what it holds in the daemon: a program ends, a
bake is undone.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolResult,
    ImageContent,
    ListPromptsResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema

from forkd.errors import ForkdError
from forkd.mcp import resources
from forkd.mcp.call import Call
from forkd.mcp.prompts import PROMPTS, filled
from forkd.mcp.tools import TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextlib import AbstractAsyncContextManager

    from mcp.server.context import ServerRequestContext
    from mcp_types import (
        CallToolRequestParams,
        ContentBlock,
        GetPromptRequestParams,
        GetPromptResult,
        ListResourcesResult,
        PaginatedRequestParams,
        ReadResourceRequestParams,
        ReadResourceResult,
    )

    from forkd.mcp import call as calls
    from forkd.sdk import AsyncClient

T = TypeVar("T")

log = logging.getLogger(__name__)

MISFITS_MAX = 5
"""Most arguments that one error names."""

INSTRUCTIONS = """\
forkd runs Linux virtual machines (sandboxes) that are forked from snapshots in milliseconds.
1. spawn_sandboxes makes a sandbox; list_snapshots says from what.
2. exec_command and eval_code run programs and Python in it; read_file and write_file move files.
3. branch_sandbox copies it while it runs, to try several ways; promote_sandbox keeps the best,
   reset_sandbox goes back.
4. kill_sandbox when the work is done; sandboxes end by themselves after an hour.
"""


def make_server(
    version: str,
    client: Callable[[Any], AbstractAsyncContextManager[AsyncClient]],
    places: AbstractAsyncContextManager[object] | None = None,
) -> Server[Any]:
    """Return a server.

    Args:
        version: Of forkd.
        client: Opens the client of the daemon for a request; it is given what the transport says
            of the request, which is None over stdio.
        places: Entered by each call; None where the transport bounds how many there are.
    """
    if places is None:
        places = nullcontext()

    async def list_tools(
        _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=[described(each) for each in TOOLS.values()])

    async def call_tool(
        context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        tool = TOOLS.get(params.name)
        if tool is None:
            raise MCPError(
                INVALID_PARAMS,
                f"Unknown tool: {params.name[:200]}; tools/list has every tool of this server",
            )
        async with places, client(context.request) as daemon:
            asked = Call(daemon, context.session.report_progress)
            return await finished(answered(tool, asked, params.arguments or {}))

    async def list_resources(
        context: ServerRequestContext[Any, Any], _: PaginatedRequestParams | None
    ) -> ListResourcesResult:
        async with client(context.request) as daemon:
            return await finished(resources.listed(daemon))

    async def list_templates(
        _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListResourceTemplatesResult:
        return ListResourceTemplatesResult(resource_templates=list(resources.TEMPLATES))

    async def read_resource(
        context: ServerRequestContext[Any, Any], params: ReadResourceRequestParams
    ) -> ReadResourceResult:
        async with places, client(context.request) as daemon:
            return await finished(resources.read(daemon, str(params.uri)))

    async def list_prompts(
        _: ServerRequestContext[Any, Any], __: PaginatedRequestParams | None
    ) -> ListPromptsResult:
        return ListPromptsResult(prompts=[each.listed for each in PROMPTS.values()])

    async def get_prompt(
        _: ServerRequestContext[Any, Any], params: GetPromptRequestParams
    ) -> GetPromptResult:
        return filled(params.name, params.arguments or {})

    return Server(
        "forkd",
        version=version,
        title="forkd: microVM sandboxes",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


class Untitled(GenerateJsonSchema):
    """Leaves titles out, which would only repeat names: models pay for each word that they read."""

    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002 - of all
        """Return whether a member gets a title of its name."""
        return False


def described(tool: calls.Tool[Any, Any]) -> Tool:
    """Return a tool as clients list it."""
    return Tool(
        name=tool.name,
        title=tool.title,
        description=tool.description,
        input_schema=tool.arguments.model_json_schema(schema_generator=Untitled),
        output_schema=tool.result.model_json_schema(
            mode="serialization", schema_generator=Untitled
        ),
        annotations=ToolAnnotations(
            title=tool.title,
            read_only_hint=tool.reads,
            destructive_hint=tool.destroys,
            idempotent_hint=tool.repeatable,
            open_world_hint=False,
        ),
    )


async def answered(tool: calls.Tool[Any, Any], call: Call, given: dict[str, Any]) -> CallToolResult:
    """Return what a tool answers; its errors are answers, too, for the model to read."""
    try:
        arguments = tool.arguments.model_validate(given)
    except ValidationError as error:
        return failed(f"{tool.name}: {misfit(tool, error)}", "invalid_request")
    try:
        result = await tool.run(call, arguments)
    except ForkdError as error:
        return failed(str(error), error.code)
    except Exception as error:
        log.exception("tool %s crashed", tool.name)
        raise MCPError(
            INTERNAL_ERROR, f"{tool.name} failed for a reason of its own; the server's log has it"
        ) from error
    content: list[ContentBlock] = [TextContent(text=result.model_dump_json())]
    for picture in result.pictures_shown:
        data = base64.b64encode(picture.data).decode()
        content.append(ImageContent(data=data, mime_type=picture.media_type))
    return CallToolResult(content=content, structured_content=result.model_dump(mode="json"))


def failed(message: str, code: str) -> CallToolResult:
    """Return the answer of a call that an error of ours has ended."""
    said = TextContent(text=f"{message} [{code}]")
    return CallToolResult(content=[said], is_error=True)


def misfit(tool: calls.Tool[Any, Any], error: ValidationError) -> str:
    """Return which arguments do not fit a tool, and which it takes."""
    said = []
    for each in error.errors()[:MISFITS_MAX]:
        where = ".".join(str(part) for part in each["loc"] if not str(part).startswith("constr"))
        said.append(f"{where or 'arguments'}: {each['msg'][:200]}")
    return f"{'; '.join(said)}. It takes {', '.join(tool.arguments.model_fields) or 'nothing'}"


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives; one that is cancelled has let go of everything before this ends."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([task])
        raise
    return await task
