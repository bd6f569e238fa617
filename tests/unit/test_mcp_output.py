"""The output of a program: its head, its tail, and the file that has all of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from forkd.errors import CapacityError, ForkdError
from forkd.limits import MCP_OUTPUT_BYTES_MAX
from forkd.mcp.output import FOLDER, Output, whole_head, whole_tail

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.sdk import AsyncFiles


class Files:
    """The files of a sandbox, as far as an output needs them."""

    def __init__(self, error: ForkdError | None = None, *, stuck: bool = False) -> None:
        self.error = error
        self.stuck = stuck
        self.kept: dict[str, bytes] = {}

    async def make_dir(self, path: str, *, parents: bool) -> None:
        assert (path, parents) == (FOLDER, True)

    async def write(self, path: str, contents: AsyncIterator[bytes], **_: object) -> int:
        if self.stuck:
            await asyncio.Event().wait()
        self.kept[path] = b"".join([piece async for piece in contents if self.error is None])
        if self.error is not None:
            raise self.error
        return len(self.kept[path])

    async def list(self, _: str) -> list[Any]:
        return []


def output(files: Files, **options: float) -> Output:
    return Output(cast("AsyncFiles", files), "stdout", **options)


async def test_what_fits_is_whole_and_goes_to_no_file() -> None:
    files = Files()
    async with output(files) as out:
        for _ in range(2):
            await out.take(b"x" * (MCP_OUTPUT_BYTES_MAX // 2))

    assert (out.text(), out.file, files.kept) == ("x" * MCP_OUTPUT_BYTES_MAX, None, {})


async def test_one_byte_more_goes_to_a_file_that_has_all_of_it() -> None:
    files = Files()
    sent = b"head" + b"-" * (MCP_OUTPUT_BYTES_MAX - 7) + b"tail"
    async with output(files) as out:
        await out.take(sent[:10_000])
        await out.take(sent[10_000:])

    assert files.kept == {out.file: sent}
    assert out.text().startswith("head-")
    assert out.text().endswith("-tail")
    assert (
        f"[... 1 of {len(sent)} bytes are left out; read_file {out.file} has it ...]" in out.text()
    )


async def test_a_file_that_takes_nothing_is_given_up_and_the_program_goes_on() -> None:
    async with output(Files(stuck=True), patience_s=0.01) as out:
        for _ in range(100):
            await out.take(b"x" * 65536)

    assert out.size == 100 * 65536
    assert "it was not kept: the sandbox took nothing of it for 0.01 s" in out.text()


async def test_a_file_that_fails_says_why_and_the_program_goes_on() -> None:
    async with output(Files(CapacityError("the disk is full"))) as out:
        for _ in range(100):
            await out.take(b"x" * 65536)

    assert (out.size, out.file) == (100 * 65536, None)
    assert "it was not kept: the disk is full" in out.text()


async def test_a_call_that_is_cancelled_leaves_no_writer() -> None:
    async def run() -> None:
        async with output(Files()) as out:
            await out.take(b"x" * (MCP_OUTPUT_BYTES_MAX + 1))
            began.set()
            await asyncio.Event().wait()

    began = asyncio.Event()
    task = asyncio.create_task(run())
    await began.wait()
    task.cancel()

    await asyncio.wait([task])
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("cut", range(1, 4))
def test_no_character_is_cut_in_two(cut: int) -> None:
    data = "€".encode() * 3

    assert whole_head(data[: 3 + cut]).decode() == "€" * ((3 + cut) // 3)
    assert whole_tail(data[cut:]).decode() == "€" * ((9 - cut) // 3)


def test_what_is_no_text_is_not_shortened() -> None:
    assert whole_head(b"\xff\xfe\x00") == b"\xff\xfe\x00"
    assert len(whole_tail(b"\x80" * 10)) == 7
