"""What the MCP server has beside tools: pictures, resources and prompts."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import pytest
from mcp.shared.exceptions import MCPError

from forkd import limits
from tests.functional.test_mcp import beside, call, spawned

if TYPE_CHECKING:
    from tests.support.service_host import FakeHost

pytestmark = pytest.mark.timeout(120)

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40_000)


async def test_a_picture_is_shown_and_not_told(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, served):
        box = await spawned(client)
        put = await served.http.put(
            f"/v2/sandboxes/{box}/files", params={"path": "/plot.png"}, content=PNG
        )
        assert put.status_code == 200

        answer = await client.call_tool("read_file", {"sandbox_id": box, "path": "/plot.png"})

        said, picture = answer.structured_content, answer.content[1]
        assert (said["encoding"], said["content"], said["size_bytes"]) == ("picture", "", len(PNG))
        assert picture.type == "image"
        assert picture.mime_type == "image/png"
        assert base64.b64decode(picture.data) == PNG
        part = await call(client, "read_file", sandbox_id=box, path="/plot.png", offset=1)
        assert part["encoding"] == "base64"


async def test_pictures_that_code_shows_are_shown(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        made = await spawned(client)
        for shown, kinds in ((PNG, ["text", "image"]), (b"no picture", ["text"])):
            code = f"class Chart:\n    def _repr_png_(self): return {shown!r}\nChart()"
            answer = await client.call_tool("eval_code", {"sandbox_id": made, "code": code})
            assert [each.type for each in answer.content] == kinds
            assert answer.structured_content["pictures"] == len(kinds) - 1
            assert "Chart object" in answer.structured_content["result"]


async def test_a_picture_beyond_the_limit_is_read_in_parts(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, served):
        box = await spawned(client)
        large = PNG + bytes(limits.MCP_PICTURE_BYTES_MAX + 1 - len(PNG))
        where = {"path": "/large.png"}
        await served.http.put(f"/v2/sandboxes/{box}/files", params=where, content=large)

        part = await call(client, "read_file", sandbox_id=box, path="/large.png")

        assert (part["encoding"], part["next_offset"]) == ("base64", limits.MCP_READ_BYTES_DEFAULT)


async def test_consoles_and_files_are_resources(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, served):
        box = await spawned(client)
        await call(client, "write_file", sandbox_id=box, path="/notes/a b.txt", content="ä")
        await served.http.put(
            f"/v2/sandboxes/{box}/files", params={"path": "/plot.png"}, content=PNG
        )

        (listed,) = (await client.list_resources()).resources
        assert listed.uri == f"forkd://sandboxes/{box}/console"
        shapes = [
            each.uri_template
            for each in (await client.list_resource_templates()).resource_templates
        ]
        assert shapes == [
            "forkd://sandboxes/{sandbox_id}/console",
            "forkd://sandboxes/{sandbox_id}/files/{+path}",
        ]
        (console,) = (await client.read_resource(listed.uri)).contents
        assert console.mime_type == "text/plain"
        (text,) = (
            await client.read_resource(f"forkd://sandboxes/{box}/files/notes/a%20b.txt")
        ).contents
        assert getattr(text, "text", None) == "ä"
        (blob,) = (await client.read_resource(f"forkd://sandboxes/{box}/files/plot.png")).contents
        assert (blob.mime_type, base64.b64decode(getattr(blob, "blob", ""))) == ("image/png", PNG)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("file:///etc/passwd", "is no resource"),
        ("forkd://sandboxes/{box}/memory", "is no resource"),
        ("forkd://sandboxes/{box}/files/none", "not_found"),
        ("forkd://sandboxes/sb-none/console", "[not_found]"),
        ("forkd://sandboxes/{box}/files/long", "the tool read_file reads it in parts"),
    ],
)
async def test_what_is_no_resource_is_an_error(fake_host: FakeHost, uri: str, said: str) -> None:
    async with beside(fake_host) as (client, served):
        box = await spawned(client)
        long = bytes(limits.MCP_RESOURCE_BYTES_MAX + 1)
        where = {"path": "/long"}
        await served.http.put(f"/v2/sandboxes/{box}/files", params=where, content=long)

        with pytest.raises(MCPError) as caught:
            await client.read_resource(uri.format(box=box))

        assert said in str(caught.value)


async def test_prompts_say_what_to_do_with_their_arguments(fake_host: FakeHost) -> None:
    async with beside(fake_host) as (client, _):
        prompts = {each.name: each for each in (await client.list_prompts()).prompts}
        assert {*prompts} == {"run_in_sandbox", "try_several_ways", "prepare_environment"}

        given = {"problem": "sort {it}", "sandbox_id": "sb-1", "check": "pytest -q"}
        (message,) = (await client.get_prompt("try_several_ways", given)).messages
        said = getattr(message.content, "text", "")
        assert "in 3 different ways: sort {it}" in said
        assert "check in each: pytest -q" in said
        with pytest.raises(MCPError, match="is without problem"):
            await client.get_prompt("try_several_ways", {"sandbox_id": "x", "check": "y"})
        with pytest.raises(MCPError, match="has no colour; it takes job, snapshot"):
            await client.get_prompt("run_in_sandbox", {"job": "x", "colour": "red"})
        with pytest.raises(MCPError, match="Unknown prompt: rm"):
            await client.get_prompt("rm", {})
