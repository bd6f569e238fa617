"""What faults are injected into: every operation of a host, one step each.

A step is prepared without faults, and then acts; what it makes is deleted by `World.clean`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.engine.control import Control
from forkd.errors import NotFound
from forkd.host.files import remove_tree
from forkd.model.exec import ExecRequest
from forkd.model.ids import Tag, parse_tag
from forkd.model.image import ImageConfig
from forkd.model.pack import UnpackRequest
from forkd.model.sandbox import BranchOptions, ForkOptions, ForkResult, SandboxState
from forkd.model.snapshot import BuildLinkRequest, LinkRequest, SnapshotRequest
from tests.support import archives
from tests.support.callers import CALLER
from tests.support.service_host import TAG, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

    from forkd.model.ids import SandboxId
    from tests.support.fault_world import World

LINK, OTHER, THIRD = (parse_tag(name) for name in ("link", "other", "third"))


async def nothing(_: World) -> None:
    return None


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        act: Does it, with what `prepare` has returned.
        prepare: Makes what it needs.
        refused: Whether it ends in an error by itself.
    """

    act: Callable[[World, Any], Awaitable[object]]
    prepare: Callable[[World], Awaitable[Any]] = nothing
    refused: bool = False


async def drain(events: AsyncIterable[object]) -> None:
    async for _ in events:
        pass


# Sandboxes


async def stop_zygotes(world: World) -> None:
    await world.host.sandboxes.zygotes.stop(TAG)


async def fork(world: World, _: object) -> ForkResult:
    return await world.host.sandboxes.fork(CALLER, TAG, 2, world.options)


async def a_fork(world: World) -> SandboxId:
    return (await world.fork()).id


async def delete(world: World, sandbox: SandboxId) -> None:
    await world.host.sandboxes.delete(CALLER, sandbox)


async def is_killed(world: World, sandbox: SandboxId) -> None:
    """Have a machine end by itself; returns when that is seen."""
    pid = (await world.host.sandboxes.get(CALLER, sandbox)).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await gone(world, sandbox)


async def gone(world: World, sandbox: SandboxId) -> None:
    owner = world.host.sandboxes.roster.find(sandbox)
    assert owner is not None
    await until(lambda: owner.sandbox.state is not SandboxState.RUNNING)


async def expires(world: World, _: object) -> None:
    options = ForkOptions(ttl_s=0.1)
    for made in (await world.host.sandboxes.fork(CALLER, TAG, 1, options)).sandboxes:
        await gone(world, made.id)


async def reset(world: World, sandbox: SandboxId) -> None:
    await world.host.sandboxes.reset(CALLER, sandbox, deadline_s=5.0)


async def look(world: World, _: object) -> None:
    host = world.host
    await host.sandboxes.get(CALLER, world.source)
    await host.sandboxes.console_log(CALLER, world.source)
    await host.snapshots.get(CALLER, TAG)
    await host.trees.draw(CALLER)
    await host.system.info(CALLER)
    async with await Control.connect(world.control) as machine:
        await machine.status()
        await machine.metrics()


async def follow(world: World, sandbox: SandboxId) -> None:
    events = world.host.sandboxes.follow_console_log(CALLER, sandbox)
    async with contextlib.aclosing(events):
        await anext(events)
        await world.host.sandboxes.delete(CALLER, sandbox)
        await drain(events)


# Guests


async def evaluate(world: World, _: object) -> None:
    await world.value(world.source, "answer")
    await world.host.guests.eval(CALLER, world.source, "1 / 0")
    await world.host.guests.ping(CALLER, world.source)
    await world.host.guests.echo(CALLER, world.source, "echo")


async def execute(world: World, _: object) -> None:
    request = ExecRequest(("cat",), stdin=True)
    async with await world.host.guests.exec(CALLER, world.source, request) as session:
        await session.write_stdin(b"input")
        await session.close_stdin()
        await drain(session)


async def connect(world: World, _: object) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with await world.host.guests.connect(CALLER, world.source, port):
            pass


async def follow_clock(world: World, _: object) -> None:
    owner = world.host.sandboxes.roster.find(world.source)
    assert owner is not None
    await owner.running_guest().follow_clock()


async def no_files(world: World) -> None:
    """Remove what an earlier `files` has left in the source."""
    for path in ("/file", "/folder"):
        with contextlib.suppress(NotFound):
            await world.host.guests.remove(CALLER, world.source, path, recursive=True)


async def files(world: World, _: object) -> None:
    guests = world.host.guests
    await guests.write_file(CALLER, world.source, "/file", pieces(b"x" * 300_000))
    async with await guests.read_file(CALLER, world.source, "/file") as reader:
        await drain(reader)
    await guests.write_archive(CALLER, world.source, "/", pieces(bytes(1024)))
    async with await guests.read_archive(CALLER, world.source, "/") as reader:
        await drain(reader)
    await guests.make_dir(CALLER, world.source, "/folder")
    await guests.move(CALLER, world.source, "/file", "/folder/file")
    await guests.stat(CALLER, world.source, "/folder/file")
    await guests.list_dir(CALLER, world.source, "/folder")
    await guests.remove(CALLER, world.source, "/folder", recursive=True)


async def miss(world: World, _: object) -> None:
    await world.host.guests.stat(CALLER, world.source, "/nowhere")


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


# Trees


async def branch(world: World, _: object) -> None:
    await world.host.branches.branch(CALLER, world.source, 2, BranchOptions())


async def branch_and_write(world: World, _: object) -> None:
    await world.host.branches.branch(CALLER, world.source, 1, BranchOptions(), tag=LINK)


async def write_in_background(world: World, _: object) -> None:
    options = BranchOptions()
    await world.host.branches.branch(CALLER, world.source, 0, options, tag=LINK, wait=False)


async def write_step(world: World, _: object) -> None:
    """Write the result of a step of a build, and find it."""
    for sandbox in (world.source, None):
        request = BuildLinkRequest("a" * 64, ImageConfig(), sandbox)
        await world.host.build_links.link(CALLER, request)


async def a_child(world: World) -> SandboxId:
    """Return a child of a fork, so that the source stays what it is."""
    parent = await world.fork()
    result = await world.host.branches.branch(CALLER, parent.id, 2, BranchOptions())
    return result.fork.sandboxes[0].id


async def promote(world: World, child: SandboxId) -> None:
    await world.host.promotions.promote(CALLER, child)


async def compare(world: World, _: object) -> None:
    await world.host.comparisons.compare(CALLER, TAG, world.source)


# Snapshots


async def bake(world: World, _: object) -> None:
    await bake_with(world, "")


async def bake_unsaved(world: World, _: object) -> None:
    await bake_with(world, "save=fail")


async def bake_unbooted(world: World, _: object) -> None:
    await bake_with(world, "boot=exit")


async def bake_with(world: World, knobs: str) -> None:
    recipe = world.fake.recipe(name="other", knobs=knobs)
    events = world.host.snapshots.bake(CALLER, SnapshotRequest(OTHER, recipe))
    async with contextlib.aclosing(events):
        await drain(events)


async def unbuilt(world: World) -> None:
    """Have nothing of earlier builds left."""
    cache = world.fake.settings.cache_dir
    for entry in (*cache.glob("images/*"), *cache.glob("initramfs/*")):
        if not entry.name.endswith(".lock"):
            remove_tree(entry)


async def build(world: World, _: object) -> None:
    await drain(world.host.images.build(CALLER, world.fake.recipe()))


async def a_flaky_snapshot(world: World) -> Tag:
    """Return a snapshot of which every second child fails."""
    await bake_with(world, "fork=fail:2")
    return OTHER


async def fork_two_of(world: World, tag: Tag) -> None:
    await world.host.sandboxes.fork(CALLER, tag, 2, world.options)


async def a_link(world: World) -> Tag:
    await world.host.branches.snapshot(CALLER, world.source, LINK, wait=True)
    return LINK


async def a_chain(world: World) -> Tag:
    """Return a link over a link."""
    await a_link(world)
    sandbox = await world.fork(LINK)
    await world.host.branches.snapshot(CALLER, sandbox.id, OTHER, wait=True)
    await world.host.sandboxes.delete(CALLER, sandbox.id)
    return OTHER


async def cold_chain(world: World) -> Tag:
    """Return a link over a link, with no zygote of either."""
    tag = await a_chain(world)
    for each in (tag, LINK, TAG):
        await world.host.sandboxes.zygotes.stop(each)
    return tag


async def fork_of(world: World, tag: Tag) -> None:
    await world.host.sandboxes.fork(CALLER, tag, 1, world.options)


async def extend(world: World, tag: Tag) -> None:
    await drain(world.host.chains.extend(CALLER, LinkRequest(THIRD, tag, "true")))


async def compact(world: World, tag: Tag) -> None:
    await world.host.chains.compact(CALLER, tag)


async def compact_to(world: World, tag: Tag) -> None:
    await world.host.chains.compact(CALLER, tag, THIRD)


async def remove(world: World, tag: Tag) -> None:
    await world.host.snapshots.delete(CALLER, tag)


async def remove_all(world: World, _: Tag) -> None:
    await world.host.snapshots.delete(CALLER, LINK, cascade=True)


async def tidy(world: World, _: object) -> None:
    await world.host.snapshots.tidy(CALLER)


async def an_orphan(world: World) -> None:
    await a_chain(world)
    await world.host.snapshots.delete(CALLER, LINK, force=True)
    (world.fake.settings.state_dir / "staging" / "left").mkdir()


async def pack(world: World, tag: Tag) -> None:
    await drain(world.host.packs.pack(CALLER, tag))


async def a_pack(world: World) -> bytes:
    return b"".join([piece async for piece in world.host.packs.pack(CALLER, TAG)])


async def unpack(world: World, packed: bytes) -> None:
    request = UnpackRequest(THIRD, allow_unsigned=True)
    await world.host.packs.unpack(CALLER, request, pieces(packed))


# Recipes


async def no_recipes(world: World) -> None:
    for stored in (world.fake.settings.state_dir / "recipes").iterdir():
        remove_tree(stored)


async def upload(world: World, _: object) -> None:
    """Upload a recipe with a folder, a file, and links of both kinds."""
    recipe = (world.fake.recipe() / "recipe.toml").read_bytes()
    packed = archives.archive(
        archives.entry("recipe.toml", recipe),
        archives.folder("more"),
        archives.entry("more/file", b"x" * 1000),
        archives.symbolic("more/symbolic", "file"),
        archives.hard("more/hard", "more/file"),
    )
    stored = await world.host.recipes.upload(CALLER, pieces(packed))
    await world.host.recipes.get(CALLER, stored.source)


# The host


async def restart(world: World, _: object) -> None:
    await world.restart()


STEPS: dict[str, Step] = {
    "fork": Step(fork),
    "fork with a cold zygote": Step(fork, stop_zygotes),
    "fork with a cold chain": Step(fork_of, cold_chain),
    "fork of which one fails": Step(fork_two_of, a_flaky_snapshot),
    "delete": Step(delete, a_fork),
    "end of a machine": Step(is_killed, a_fork),
    "end of a life": Step(expires),
    "reset": Step(reset, a_fork),
    "look": Step(look),
    "follow": Step(follow, a_fork),
    "eval": Step(evaluate),
    "exec": Step(execute),
    "port": Step(connect),
    "follow the clock": Step(follow_clock),
    "files": Step(files, no_files),
    "missing file": Step(miss, refused=True),
    "branch": Step(branch),
    "branch with a tag": Step(branch_and_write),
    "snapshot in the background": Step(write_in_background),
    "step of a build": Step(write_step),
    "promote": Step(promote, a_child),
    "compare": Step(compare),
    "bake": Step(bake),
    "bake that does not boot": Step(bake_unbooted, refused=True),
    "bake that is not saved": Step(bake_unsaved, refused=True),
    "build": Step(build, unbuilt),
    "extend": Step(extend, a_link),
    "compact in place": Step(compact, a_chain),
    "compact to another tag": Step(compact_to, a_chain),
    "delete a snapshot": Step(remove, a_link),
    "delete a chain": Step(remove_all, a_chain),
    "tidy": Step(tidy, an_orphan),
    "pack": Step(pack, a_link),
    "unpack": Step(unpack, a_pack),
    "upload": Step(upload, no_recipes),
    "restart": Step(restart, a_child),
}
