"""Real machines are branched while they run, reset in place, promoted, and ended in time."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd.model.exec import ExecRequest, Exited, Stdout
from forkd.model.ids import parse_tag
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from tests.support.callers import CALLER
from tests.support.real_host import REAL, TAG, real_host, value

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from forkd.model.diff import Difference
    from forkd.model.ids import SandboxId, Tag
    from forkd.model.sandbox import Sandbox
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

OPTIONS = BranchOptions()
DEADLINE_S = 120.0

BEFORE = """
import os
os.makedirs("/root/t/gone/below")
os.makedirs("/root/t/moved")
for name in ("gone/below/deep", "moved/a", "same", "mode", "content", "linked", "renamed", "kind",
             "owner", "touched", "rewritten", "shorter"):
    with open("/root/t/" + name, "w") as file:
        file.write("as it was " * 1000)
os.symlink("same", "/root/t/link")
with open("/root/t/big", "wb") as file:
    file.write(os.urandom(1 << 20) * 24)
"""

AFTER = """
import os, shutil
os.chdir("/root/t")
shutil.rmtree("gone")
os.rename("moved", "away")
os.rename("renamed", "new name")
os.chmod("mode", 0o600)
os.chown("owner", 70000, 5)
os.link("linked", "other name")
os.unlink("link"); os.symlink("t", "link")
os.symlink("x" * 200, "long link")
os.unlink("kind"); os.mkdir("kind")
os.utime("touched", ns=(1, 1))
os.truncate("shorter", 5)
then = os.stat("content").st_mtime_ns
with open("content", "r+b") as file:
    file.seek(5000); file.write(b"X")
os.utime("content", ns=(then, then))
then = os.stat("rewritten").st_mtime_ns
data = open("rewritten", "rb").read()
os.unlink("rewritten"); open("rewritten", "wb").write(data)
os.utime("rewritten", ns=(then, then))
with open("big", "r+b") as file:
    file.seek(20 << 20); file.write(b"in the middle")
with open("sparse", "wb") as file:
    file.truncate(1 << 33)
os.mknod("device", 0o20644, os.makedev(1, 3))
os.mkfifo("pipe")
os.mkdir("many")
for number in range(500):
    open(f"many/{number}", "w").write(str(number))
held = open("unlinked", "w"); held.write("x" * 5000); held.flush(); os.unlink("unlinked")
None
"""

LISTING = """
import json, os, stat
def look():
    root, found, todo = os.lstat("/").st_dev, {}, ["/"]
    while todo:
        path = todo.pop()
        s = os.lstat(path)
        if s.st_dev != root:
            continue
        folder, link = stat.S_ISDIR(s.st_mode), stat.S_ISLNK(s.st_mode)
        plain = [s.st_mode, s.st_uid, s.st_gid, s.st_rdev]
        if not folder:
            plain += [s.st_size, s.st_mtime_ns, os.readlink(path) if link else ""]
        found[path] = [plain, 0 if folder else s.st_ctime_ns]
        if folder:
            todo += [os.path.join(path, name) for name in os.listdir(path)]
    with open("/run/listing", "w") as file:
        json.dump(found, file)
look()
"""

DIGEST = "__import__('hashlib').sha256(open({path!r}, 'rb').read()).hexdigest()"


async def source(host: RealHost, options: ForkOptions | None = None) -> Sandbox:
    return (await host.service.sandboxes.fork(CALLER, TAG, 1, options or ForkOptions())).sandboxes[
        0
    ]


async def branched(host: RealHost, parent: SandboxId, count: int) -> tuple[Sandbox, ...]:
    result = await host.service.branches.branch(CALLER, parent, count, OPTIONS)
    assert result.fork.failures == ()
    return result.fork.sandboxes


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def clean(real_host: RealHost) -> AsyncIterator[None]:
    yield
    for each in await real_host.service.sandboxes.list(CALLER):
        await real_host.service.sandboxes.delete(CALLER, each.id)
    assert list(real_host.settings.sandboxes_dir.iterdir()) == []


async def test_siblings_have_memory_and_files_of_one_instant_and_go_their_own_ways(
    real_host: RealHost,
) -> None:
    parent = await source(real_host)
    await value(real_host, parent.id, "thought = 7; open('/root/note', 'w').write('seven')")

    result = await real_host.service.branches.branch(CALLER, parent.id, 3, OPTIONS)
    siblings = result.fork.sandboxes
    await value(real_host, parent.id, "thought = 8; open('/root/note', 'w').write('eight')")
    for number, each in enumerate(siblings):
        read = "(thought, open('/root/note').read())"
        assert await value(real_host, each.id, read) == [7, "seven"]
        await value(real_host, each.id, f"open('/root/note', 'w').write('{number}')")

    notes = [await value(real_host, s.id, "open('/root/note').read()") for s in siblings]
    assert notes == ["0", "1", "2"]
    assert await value(real_host, parent.id, "open('/root/note').read()") == "eight"
    assert result.pause_ms > 0
    assert result.stall_ms is not None, result.stall_unknown
    assert result.stall_ms >= result.pause_ms


ROWS = (
    "open('/proc/sys/kernel/random/boot_id').read()",
    "open('/etc/machine-id').read()",
    "__import__('socket').gethostname()",
    "__import__('os').urandom(16).hex()",
    "random.random()",
    "float(numpy.random.random())",
    "str(__import__('uuid').uuid4())",
)
"""What differs in each sibling, as the expression that shows it."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(real_host: RealHost) -> dict[str, tuple[Any, ...]]:
    """What a source and four siblings answer to each row."""
    parent = await source(real_host)
    family = (parent, *await branched(real_host, parent.id, 4))
    answers = [await value(real_host, each.id, f"[{', '.join(ROWS)}]") for each in family]
    return dict(zip(ROWS, zip(*answers, strict=True), strict=True))


@pytest.mark.parametrize("row", ROWS)
async def test_no_two_siblings_and_not_their_source_share(
    row: str, told: dict[str, tuple[Any, ...]]
) -> None:
    assert len(set(told[row])) == 5


async def test_a_program_in_the_source_keeps_its_streams_over_a_branch(
    real_host: RealHost,
) -> None:
    parent = await source(real_host)
    request = ExecRequest(("cat",), stdin=True)
    async with await real_host.service.guests.exec(CALLER, parent.id, request) as session:
        await session.write_stdin(b"before ")
        await branched(real_host, parent.id, 2)
        await session.write_stdin(b"after")
        await session.close_stdin()
        events = [event async for event in session]

    assert b"".join(e.data for e in events if isinstance(e, Stdout)) == b"before after"
    assert [e.exit_code for e in events if isinstance(e, Exited)] == [0]


async def test_a_branch_of_a_branch_of_a_branch_knows_all_that_came_before(
    real_host: RealHost,
) -> None:
    last = await source(real_host)
    for depth in range(4):
        code = f"globals().setdefault('path', []).append({depth}); open('/root/{depth}', 'w')"
        await value(real_host, last.id, f"{code}; None")
        (last,) = await branched(real_host, last.id, 1)

    assert len(last.ancestors) == 4
    assert await value(real_host, last.id, "path") == [0, 1, 2, 3]
    files = await real_host.service.guests.list_dir(CALLER, last.id, "/root")
    assert {"0", "1", "2", "3"} <= {each.name for each in files}


async def test_branches_of_one_source_at_once_are_all_whole(real_host: RealHost) -> None:
    parent = await source(real_host)
    await value(real_host, parent.id, "thought = list(range(100_000)); None")

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(branched(real_host, parent.id, 2)) for _ in range(3)]

    for each in (sibling for task in tasks for sibling in task.result()):
        assert await value(real_host, each.id, "sum(thought)") == sum(range(100_000))


async def test_a_source_with_a_network_has_siblings_with_addresses_of_their_own(
    real_host: RealHost,
) -> None:
    parent = await source(real_host, ForkOptions(network=HOST))
    siblings = await branched(real_host, parent.id, 2)

    everybody = (parent, *siblings)
    for each in everybody:
        assert await answers_at(real_host, each), f"{each.address} does not answer"
    assert len({each.address for each in everybody}) == 3
    assert len({each.address_v6 for each in everybody}) == 3

    assert await value(real_host, siblings[0].id, WITHOUT_ADDRESS) == "None"
    (again,) = await branched(real_host, siblings[0].id, 1)
    assert await answers_at(real_host, again), "its source had taken its own address away"


WITHOUT_ADDRESS = """
import fcntl, os, socket, struct
(name,) = {*os.listdir("/sys/class/net")} - {"lo"}
nothing = struct.pack("16sH2s4s8x", name.encode(), socket.AF_INET, b"", bytes(4))
with socket.socket(type=socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, 0x8916, nothing)  # SIOCSIFADDR
str(None)
"""
"""Takes a guest's IPv4 address away."""


async def answers_at(host: RealHost, sandbox: Sandbox) -> bool:
    """Whether the guest takes a connection at each address, and is who it should be."""
    code = """
import socket, threading
server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
def serve():
    for _ in range(2):
        peer, _ = server.accept()
        peer.sendall(socket.gethostname().encode())
        peer.close()
threading.Thread(target=serve, daemon=True).start()
server.getsockname()[1]
"""
    port = await value(host, sandbox.id, code)

    def ask(address: str | None) -> bytes:
        with socket.create_connection((address, port), timeout=30) as peer:
            return peer.recv(100)

    found = [await asyncio.to_thread(ask, each) for each in (sandbox.address, sandbox.address_v6)]
    return found == [sandbox.hostname.encode()] * 2


async def test_a_reset_sandbox_is_where_it_was_forked_and_becomes_somebody_anew(
    real_host: RealHost,
) -> None:
    sandbox = await source(real_host, ForkOptions(network=HOST))
    boot_ids = set()
    for _ in range(5):
        code = "thought = 7; open('/root/lost', 'w').write('x'); None"
        await value(real_host, sandbox.id, code)

        await real_host.service.sandboxes.reset(CALLER, sandbox.id, deadline_s=DEADLINE_S)

        assert await value(real_host, sandbox.id, "'thought' in globals()") is False
        names = {
            each.name
            for each in await real_host.service.guests.list_dir(CALLER, sandbox.id, "/root")
        }
        assert "lost" not in names
        row = "open('/proc/sys/kernel/random/boot_id').read()"
        boot_ids.add(await value(real_host, sandbox.id, row))
    assert len(boot_ids) == 5
    assert await answers_at(real_host, sandbox)
    assert await real_host.service.sandboxes.get(CALLER, sandbox.id) == sandbox


async def test_a_promoted_child_has_its_parents_name_and_address(real_host: RealHost) -> None:
    parent = await source(real_host, ForkOptions(network=HOST))
    winner, _ = await branched(real_host, parent.id, 2)
    await value(real_host, winner.id, "thought = 'best'")

    promoted = (await real_host.service.promotions.promote(CALLER, winner.id)).sandbox

    assert (promoted.id, promoted.address) == (parent.id, parent.address)
    assert promoted.address_v6 == parent.address_v6 != winner.address_v6
    assert await value(real_host, parent.id, "thought") == "best"
    name = await value(real_host, parent.id, "__import__('socket').gethostname()")
    assert name == parent.hostname
    assert await answers_at(real_host, promoted)
    assert await real_host.service.sandboxes.list(CALLER) == (promoted,)


@pytest.mark.soak(only=True)
async def test_promotion_and_lineage_survive_another_daemon(real_host: RealHost) -> None:
    parent = await source(real_host, ForkOptions(network=HOST))
    winner, _ = await branched(real_host, parent.id, 2)
    await real_host.service.promotions.promote(CALLER, winner.id)
    (child,) = await branched(real_host, parent.id, 1)
    before = set(await real_host.service.sandboxes.list(CALLER))

    await real_host.restart()

    assert set(await real_host.service.sandboxes.list(CALLER)) == before
    assert await answers_at(real_host, await real_host.service.sandboxes.get(CALLER, parent.id))
    (tree,) = await real_host.service.trees.draw(CALLER, child.id)
    assert (tree.id, [node.id for node in tree.children]) == (parent.id, [child.id])
    assert 0 < (tree.private_bytes or 0) < 256 << 20


async def test_a_sibling_whose_time_has_come_is_ended(real_host: RealHost) -> None:
    parent = await source(real_host)
    result = await real_host.service.branches.branch(CALLER, parent.id, 1, BranchOptions(ttl_s=5.0))
    (child,) = result.fork.sandboxes

    async with asyncio.timeout(DEADLINE_S):
        async for _ in real_host.service.sandboxes.follow_console_log(CALLER, child.id):
            pass

    found = await real_host.service.sandboxes.get(CALLER, child.id)
    assert (found.state, found.exit_reason) == (SandboxState.EXITED, "ttl")


async def listing(host: RealHost, sandbox: SandboxId) -> dict[str, Any]:
    """Ask a guest for every file of its root file system."""
    await value(host, sandbox, LISTING)
    async with await host.service.guests.read_file(CALLER, sandbox, "/run/listing") as reader:
        return dict(json.loads(b"".join([piece async for piece in reader])))


async def as_guests_say(host: RealHost, one: SandboxId, other: SandboxId) -> set[tuple[str, str]]:
    was, now = await listing(host, one), await listing(host, other)
    found = {(path, "removed") for path in was.keys() - now.keys()}
    found |= {(path, "added") for path in now.keys() - was.keys()}
    for path in was.keys() & now.keys():
        if was[path][0] != now[path][0]:
            found.add((path, "changed"))
        elif was[path][1] != now[path][1] and was[path][0][0] >> 12 == 8:
            ask = DIGEST.format(path=path)
            if await value(host, one, ask) != await value(host, other, ask):
                found.add((path, "changed"))
    return found


def changes(found: Difference) -> set[tuple[str, str]]:
    assert found.more == 0
    return {(each.path, each.change.value) for each in found.changes}


async def diff(host: RealHost, one: SandboxId | Tag, other: SandboxId | Tag) -> Difference:
    async with asyncio.timeout(500):
        return await host.service.comparisons.compare(CALLER, one, other)


@pytest.mark.soak(only=True)
async def test_the_disks_say_what_the_guests_say(real_host: RealHost) -> None:
    service = real_host.service
    (parent,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
    await value(real_host, parent.id, BEFORE)
    (child,) = (await service.branches.branch(CALLER, parent.id, 1, BranchOptions())).fork.sandboxes
    await value(real_host, child.id, AFTER)
    await value(real_host, child.id, "much = bytearray(8 << 20); None")

    found = await diff(real_host, parent.id, child.id)

    said = changes(found)
    below = {(path.removeprefix("/root/t/"), change) for path, change in said}
    assert len([path for path, _ in below if path.startswith("many/")]) == 500
    assert {each for each in below if not each[0].startswith("many")} == {
        *((name, "changed") for name in ("mode", "owner", "content", "link", "kind", "touched")),
        *((name, "changed") for name in ("shorter", "big")),
        *((name, "added") for name in ("away", "away/a", "new name", "other name", "long link")),
        *((name, "added") for name in ("sparse", "device", "pipe")),
        *((name, "removed") for name in ("gone", "gone/below", "gone/below/deep", "moved")),
        *((name, "removed") for name in ("moved/a", "renamed")),
    }
    assert said == await as_guests_say(real_host, parent.id, child.id)
    assert (found.pages_apart or 0) >= 2048
    assert await value(real_host, child.id, "held.write('goes on')") == 7


@pytest.mark.soak(only=True)
async def test_what_was_not_written_out_yet_is_seen_of_sandboxes_and_of_snapshots(
    real_host: RealHost,
) -> None:
    service = real_host.service
    (one, other) = (await service.sandboxes.fork(CALLER, TAG, 2, ForkOptions())).sandboxes
    assert changes(await diff(real_host, one.id, other.id)) == set()
    await value(
        real_host, one.id, "file = open('/root/unsynced', 'w'); file.write('x'); file.flush()"
    )
    await service.branches.snapshot(CALLER, one.id, link := parse_tag("unsynced"), wait=True)
    await value(real_host, one.id, "file.write('y'); file.flush()")

    assert changes(await diff(real_host, TAG, link)) == {("/root/unsynced", "added")}
    assert changes(await diff(real_host, link, one.id)) == {("/root/unsynced", "changed")}
    await service.sandboxes.delete(CALLER, one.id)
    await service.snapshots.delete(CALLER, link)


@pytest.mark.soak(only=True)  # of a guest that has stopped writing: the tests above
async def test_a_guest_that_writes_all_the_while_is_compared_at_one_moment(
    real_host: RealHost,
) -> None:
    service = real_host.service
    (one,) = (await service.sandboxes.fork(CALLER, TAG, 1, ForkOptions())).sandboxes
    await value(
        real_host,
        one.id,
        """
import os, threading
os.mkdir("/root/busy")
def work(number):
    turn = 0
    while True:
        turn += 1
        path = f"/root/busy/{number}"
        with open(path + ".new", "w") as file:
            file.write(str(turn) * 9000)
        os.rename(path + ".new", path)
for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
""",
    )

    for _ in range(2):
        paths = {path for path, _ in changes(await diff(real_host, TAG, one.id))}
        assert "/root/busy" in paths
        assert paths <= {"/root/busy"} | {
            f"/root/busy/{number}{end}" for number in range(3) for end in ("", ".new")
        }


async def test_a_branch_does_not_give_its_source_room_beyond_the_limit_on_its_disk(
    real_host: RealHost,
) -> None:
    fill = "import os; f = open('/root/f{0}', 'wb'); f.write(os.urandom(3 << 20)); f.flush(); "
    fill += "os.fsync(f.fileno()) or True"
    parent = await source(real_host, ForkOptions(disk_limit_mib=5))
    assert await value(real_host, parent.id, fill.format(0)) is True

    await branched(real_host, parent.id, 1)

    result = await real_host.service.guests.eval(CALLER, parent.id, fill.format(1))
    assert result.error is not None
    assert "No space left on device" in result.error.message
