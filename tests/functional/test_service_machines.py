"""The service over real machines: bake once, fork, ask, limit, lose, restart, delete."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from forkd.errors import StoreError
from forkd.model.exec import ExecRequest, Exited, Stdout
from forkd.model.network import HOST
from forkd.model.sandbox import BranchOptions, ForkOptions, SandboxState
from tests.support.bakes import unshare
from tests.support.callers import CALLER
from tests.support.real_host import REAL, TAG
from tests.support.soak import only_in_soak

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.service.host import Host
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

ONE = ForkOptions()
REACH = """
import socket
with socket.create_connection(("{host}", {port}), 20) as connection:
    address = connection.getsockname()[0]
address
"""
DEADLINE_S = 60.0

TRIPLE_FAULT = """
echo triple > /sys/kernel/reboot/type
echo 1 > /sys/kernel/reboot/force
echo b > /proc/sysrq-trigger
"""
"""Have the kernel reset by a fault that it cannot be told of."""

HALT = "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0xcdef0123)'"
"""Do what `halt -f` does: RB_HALT_SYSTEM of reboot(2)."""


async def value(service: Host, sandbox: SandboxId, code: str) -> Any:  # noqa: ANN401 - JSON
    """Evaluate code that must not raise; return its value."""
    result = await service.guests.eval(CALLER, sandbox, code, timeout_s=DEADLINE_S)
    assert result.error is None, result.error.traceback
    return result.value


async def test_every_child_has_the_warm_namespace_and_an_identity_of_its_own(
    real_host: RealHost,
) -> None:
    service = real_host.service
    code = """
import os, random, uuid
[
    numpy.zeros(5).tolist() == [0.0] * 5 and os.uname().nodename,
    open("/etc/machine-id").read(),
    open("/proc/sys/kernel/random/boot_id").read(),
    os.urandom(16).hex(),
    random.random(),
    float(numpy.random.random()),
    str(uuid.uuid4()),
]
"""
    async with real_host.forked(8, ONE) as sandboxes:
        answers = [await value(service, sandbox.id, code) for sandbox in sandboxes]

    assert [answer[0] for answer in answers] == [sandbox.hostname for sandbox in sandboxes]
    for column in zip(*answers, strict=True):
        assert len(set(column)) == len(sandboxes)


async def test_what_one_sibling_writes_the_other_does_not_see(real_host: RealHost) -> None:
    service = real_host.service
    async with real_host.forked(2, ONE) as (writer, reader):
        write = (
            "open('/root/mine', 'w').write('x'); import os; os.sync(); os.path.exists('/root/mine')"
        )
        assert await value(service, writer.id, write) is True
        look = "import os; os.path.exists('/root/mine')"
        assert await value(service, reader.id, look) is False


async def test_a_command_streams_both_ways_and_passes_its_status_on(real_host: RealHost) -> None:
    service = real_host.service
    request = ExecRequest(("sh", "-c", "cat; exit 3"), stdin=True)
    async with (
        real_host.forked(1, ONE) as (sandbox,),
        await service.guests.exec(CALLER, sandbox.id, request) as session,
    ):
        await session.write_stdin(b"through the guest")
        await session.close_stdin()
        events = [event async for event in session]

    assert b"".join(e.data for e in events if isinstance(e, Stdout)) == b"through the guest"
    assert isinstance(events[-1], Exited)
    assert events[-1].exit_code == 3


async def test_a_file_comes_back_as_it_was_sent(real_host: RealHost) -> None:
    service, data = real_host.service, os.urandom(3_000_000)

    async def pieces() -> AsyncIterator[bytes]:
        yield data

    async with real_host.forked(1, ONE) as (sandbox,):
        assert await service.guests.write_file(CALLER, sandbox.id, "/root/f", pieces()) == len(data)
        assert (await service.guests.stat(CALLER, sandbox.id, "/root/f")).size_bytes == len(data)
        async with await service.guests.read_file(CALLER, sandbox.id, "/root/f") as reader:
            assert b"".join([piece async for piece in reader]) == data


@pytest.mark.soak(only=True)
async def test_files_are_written_where_they_are_mounted_and_for_whom_they_are(
    real_host: RealHost,
) -> None:
    guests = real_host.service.guests

    async def write(sandbox: Sandbox, path: str, data: bytes, user: str | None = None) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        await guests.write_file(
            CALLER, sandbox.id, path, pieces(), make_parents=True, mode=0o644, user=user
        )

    tree = b"".join(_tree_with_links())

    async def archive() -> AsyncIterator[bytes]:
        yield tree

    async with real_host.forked(1, ONE) as (sandbox,):
        unpacked = await guests.write_archive(CALLER, sandbox.id, "/srv/app", archive(), user="1:2")
        async with await guests.read_archive(CALLER, sandbox.id, "/srv/app") as reader:
            packed = b"".join([piece async for piece in reader])
        await write(sandbox, "/etc/hosts", b"127.0.0.1 localhost\n127.0.0.9 db\n")
        await write(sandbox, "/etc/resolv.conf", b"# mine\n")
        await write(sandbox, "/proc/sys/vm/swappiness", b"17\n")
        await write(sandbox, "/sys/kernel/mm/transparent_hugepage/enabled", b"never\n")
        await write(sandbox, "/dev/null", b"x" * 100_000)
        await write(sandbox, "/home/a/b", b"x", user="nobody")
        branched = await real_host.service.branches.branch(CALLER, sandbox.id, 1, BranchOptions())
        (sibling,) = branched.fork.sandboxes
        try:
            seen = await value(real_host.service, sibling.id, _SEEN)
        finally:
            await real_host.service.sandboxes.delete(CALLER, sibling.id)

    assert (unpacked.skipped, unpacked.entries) == ((), 4)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = {each.name: (each.linkname, each.uid, each.gid) for each in tar}
    assert members == {
        ".": ("", 1, 2),
        "caf\udce9": ("", 1, 2),
        "bin": ("", 1, 2),
        "bin/python": ("/usr/bin/python3", 1, 2),
    }
    assert seen == {
        "linked": "works\n",
        "db": "127.0.0.9",
        "own": "127.0.0.1",
        "resolv.conf": "# mine\n",
        "swappiness": "17\n",
        "huge pages": True,
        "null": True,
        "owners": [65534, 65534],
    }


def _tree_with_links() -> Iterator[bytes]:
    """Yield an archive with what a virtual environment and odd names have."""
    for name, kind, target in (
        ("./", tarfile.DIRTYPE, ""),
        ("bin", tarfile.DIRTYPE, ""),
        ("bin/python", tarfile.SYMTYPE, "/usr/bin/python3"),
        ("caf\udce9", tarfile.REGTYPE, ""),
    ):
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.mode = kind, target, 0o755
        yield member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    yield bytes(1024)


_SEEN = """
import os, pathlib, socket, stat, subprocess
read = lambda path: pathlib.Path(path).read_text()
{
    "linked": subprocess.check_output(["/srv/app/bin/python", "-c", "print('works')"]).decode(),
    "db": socket.gethostbyname("db"),
    "own": socket.gethostbyname(socket.gethostname()),
    "resolv.conf": read("/etc/resolv.conf"),
    "swappiness": read("/proc/sys/vm/swappiness"),
    "huge pages": "[never]" in read("/sys/kernel/mm/transparent_hugepage/enabled"),
    "null": stat.S_ISCHR(os.stat("/dev/null").st_mode),
    "owners": [os.stat(path).st_uid for path in ("/home/a", "/home/a/b")],
}
"""


async def test_a_limited_sandbox_lives_in_a_cgroup_that_goes_with_it(real_host: RealHost) -> None:
    options = ForkOptions(memory_limit_mib=700, pids_limit=32, cpu_limit=1.5)
    async with real_host.forked(1, options) as (sandbox,):
        group = real_host.names.cgroup_root / sandbox.id
        assert (group / "memory.max").read_text().strip() == str(700 << 20)
        assert (group / "pids.max").read_text().strip() == "32"
        assert (group / "cpu.max").read_text().split() == ["150000", "100000"]
        assert (sandbox.pids_limit, sandbox.cpu_limit) == (32, 1.5)
        assert str(sandbox.pid) in (group / "cgroup.procs").read_text().split()
        assert await value(real_host.service, sandbox.id, "1 + 1") == 2

    assert not group.exists()


@pytest.mark.soak(only=True)
async def test_a_sandbox_with_a_network_reaches_the_hosts_end_of_its_link(
    real_host: RealHost,
) -> None:
    plan = real_host.names.network
    hosts = {slot.guest: slot.host for slot in map(plan.slot, range(plan.slots))}
    async with real_host.forked(2, ForkOptions(network=HOST)) as sandboxes:
        for sandbox in sandboxes:
            host = hosts[str(sandbox.address)]
            with socket.create_server((host, 0)) as server:
                code = REACH.format(host=host, port=server.getsockname()[1])
                assert await value(real_host.service, sandbox.id, code) == sandbox.address

    left = [name for _, name in socket.if_nameindex() if plan.is_ours(name)]
    assert left == []


@pytest.mark.soak(only=True)
async def test_a_disk_that_is_full_in_one_child_is_not_in_its_sibling(real_host: RealHost) -> None:
    service = real_host.service
    fill = """
import os
with open("/root/big", "wb") as file:
    for _ in range(16):
        file.write(os.urandom(1 << 20))
    file.flush()
    os.fsync(file.fileno())
"""
    async with (
        real_host.forked(1, ForkOptions(disk_limit_mib=8)) as (small,),
        real_host.forked(1, ONE) as (large,),
    ):
        full = await service.guests.eval(CALLER, small.id, fill, timeout_s=DEADLINE_S)
        assert full.error is not None
        assert full.error.type == "OSError"
        await value(service, large.id, fill + "1")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo o > /proc/sysrq-trigger", "the guest powered off"),
        ("echo b > /proc/sysrq-trigger", "the guest reset itself"),
        ("echo c > /proc/sysrq-trigger", "the guest's kernel panicked"),
        (HALT, "the guest halted"),
        (TRIPLE_FAULT, "the guest's processor gave up (triple fault)"),
    ],
    ids=["off", "reset", "panic", "halt", "triple fault"],
)
async def test_a_sandbox_that_ends_by_itself_is_exited_and_says_why(
    real_host: RealHost, command: str, reason: str
) -> None:
    service = real_host.service
    async with real_host.forked(1, ONE) as (sandbox,):
        off = ExecRequest(("sh", "-c", f"{command}; sleep 60"))
        async with await service.guests.exec(CALLER, sandbox.id, off):
            async with asyncio.timeout(DEADLINE_S):
                async for _ in service.sandboxes.follow_console_log(CALLER, sandbox.id):
                    pass
        found = await service.sandboxes.get(CALLER, sandbox.id)
        assert (found.state, found.exit_reason) == (SandboxState.EXITED, reason)


async def test_sandboxes_outlive_the_service(real_host: RealHost) -> None:
    async with real_host.forked(2, ONE) as sandboxes:
        for sandbox in sandboxes:
            await value(real_host.service, sandbox.id, f"mine = {sandbox.hostname!r}")

        await real_host.restart()

        for sandbox in sandboxes:
            found = await real_host.service.sandboxes.get(CALLER, sandbox.id)
            assert found.state is SandboxState.RUNNING
            assert await value(real_host.service, sandbox.id, "mine") == sandbox.hostname


@pytest.mark.parametrize(
    "file",
    ["state", only_in_soak("memory"), only_in_soak("disk.layer")],
)
async def test_a_flipped_bit_is_found_before_anything_runs(real_host: RealHost, file: str) -> None:
    path = real_host.snapshot.directory / file
    await real_host.restart(warm=False)  # no zygote has it loaded
    unshare(path)
    flip_last_bit(path)
    try:
        with pytest.raises(StoreError) as refusal:
            await real_host.service.sandboxes.fork(CALLER, TAG, 1, ONE)
    finally:
        flip_last_bit(path)

    assert refusal.value.context["control_code"] == "damaged"
    async with real_host.forked(1, ONE) as (sandbox,):
        assert await value(real_host.service, sandbox.id, "1 + 1") == 2


def flip_last_bit(path: os.PathLike[str]) -> None:
    with open(path, "r+b") as file:  # noqa: PTH123 - a byte
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
