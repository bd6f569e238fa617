"""What is done thousands of times, or with much memory, costs no more the last time."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest

from forkd import Client
from forkd.cgroups.tree import ZYGOTES
from forkd.host.cgroupfs import children
from forkd.model.ids import Tag, parse_tag
from forkd.model.sandbox import ForkOptions
from tests.support.callers import CALLER
from tests.support.memory import Held, image_bytes, private_bytes
from tests.support.real_daemon import running_daemon
from tests.support.real_host import REAL, RECIPE, TAG, baked_host, value, variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from forkd.model.ids import SandboxId
    from forkd.model.json import JsonValue
    from forkd.sdk import Sandbox
    from tests.support.bakes import Bakes
    from tests.support.real_daemon import Daemon
    from tests.support.real_host import RealHost

pytestmark = [REAL, pytest.mark.soak, pytest.mark.timeout(600)]

MIB = 1 << 20

# Resets

SETTLED = 10
"""After so many resets everything that is made once has been made: the pages that forks are known
to write, Python's caches in the daemon, the log's first lines."""

RESETS = 2_000

MAY_GROW = {
    "private_bytes": MIB,
    "daemon_bytes": 8 * MIB,
    "cgroup_bytes": 8 * MIB,
    "descriptors": 1,
}
"""By how much something may be more than it was then, at any time; what is not here, by nothing.

A guest's kernel does not write to the same pages each time; the daemon's allocator keeps what it
has had; the kernel counts to cgroups in batches; a connection of the daemon's may be ending while
it is counted.  A page lost at each reset would be 8 MiB of the
machine's, after two thousand, and a kilobyte 2 MiB."""

SIBLING_MAY_GROW = {**MAY_GROW, "private_bytes": 32 * MIB, "cgroup_bytes": 32 * MIB}
"""The same of a sibling.  It keeps a copy of each page that it wrote where its seed has one, so it
comes nearer, for as long as its guest writes to others, to what its source had written: some 40
MiB.  A page lost at each reset would not show here, five would."""

MARK = """
import os
found = ["mark" in globals(), os.path.exists("/root/mark")]
mark = bytes([{number} % 251 + 1]) * (1 << 20)
open("/root/mark", "wb").write(mark)
found
"""

THOUGHT = """
thought = bytearray(bytes(range(256)) * 4096 * 16)
open("/root/thought", "wb").write(thought)
None
"""

FINGERPRINT = """
import os
def fingerprint():
    files = []
    for top in ("/etc", "/root", "/opt", "/usr/lib/python3", "/var"):
        for folder, _, names in os.walk(top):
            files += [(os.path.join(folder, name), os.lstat(os.path.join(folder, name)).st_size)
                      for name in sorted(names)]
    return sorted(set(globals()) - {"fingerprint"}), hash_of(files)
def hash_of(files):
    import hashlib
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()
fingerprint()
"""


@pytest.fixture(scope="module")
def warm_daemon(bakes: Bakes) -> Iterator[Daemon]:
    """A daemon with a base whose zygote runs."""
    with running_daemon(bakes.of(RECIPE)) as made, Client(made.url) as client:
        client.fork(TAG)[0].kill()
        yield made


@pytest.fixture
def daemon(warm_daemon: Daemon) -> Iterator[Daemon]:
    """The daemon, whose sandboxes are killed afterwards."""
    yield warm_daemon
    with Client(warm_daemon.url) as client:
        for sandbox in client.sandboxes.list():
            sandbox.kill()


class Patient:
    """A sandbox, and all that it and its daemon hold."""

    def __init__(self, daemon: Daemon, sandbox: Sandbox) -> None:
        self._daemon, self.sandbox = daemon, sandbox
        self._folder = daemon.settings.sandboxes_dir / sandbox.id
        (group,) = set(children(daemon.names.cgroup_root)) - {ZYGOTES}
        self._group = daemon.names.cgroup_root / group

    def examined(self) -> dict[str, int]:
        """Return everything that must not grow."""
        pid = self.sandbox.refresh().pid
        assert pid is not None
        machine, service = Held.by(pid), Held.by(self._daemon.pid)
        return {
            "private_bytes": machine.private_bytes,
            "descriptors": machine.descriptors,
            "threads": machine.threads,
            "mappings": machine.mappings,
            "daemon_bytes": service.private_bytes,
            "daemon_descriptors": service.descriptors,
            "cgroup_bytes": int((self._group / "memory.current").read_text()),
            "files": len(list(self._folder.iterdir())),
            "file_bytes": sum(file.stat().st_blocks * 512 for file in self._folder.iterdir()),
            "processes": len(self._daemon.vmm_processes()),
            "left_over": len(self._daemon.left()),
        }


def forked_ms(client: Client) -> float:
    """Return how long a fork takes, in its own words."""
    with client.fork(TAG)[0] as sandbox:
        assert sandbox.info.fork_ms is not None
        return sandbox.info.fork_ms.total


@pytest.mark.soak(only=True)  # a few resets: tests/functional/test_branch_reset.py
def test_a_sandbox_is_reset_again_and_again_and_nothing_grows(
    daemon: Daemon, tell: Callable[[str], None]
) -> None:
    with Client(daemon.url) as client:
        (other,) = client.fork(TAG)
        wanted = other.eval(FINGERPRINT).check().value
        (sandbox,) = client.fork(TAG, memory_limit_mib=768, network=True)
        _reset_often(client, Patient(daemon, sandbox), wanted, RESETS, tell, may_grow=MAY_GROW)


@pytest.mark.soak(only=True)  # as above
def test_a_sibling_whose_source_has_ended_is_reset_again_and_again_and_nothing_grows(
    daemon: Daemon, tell: Callable[[str], None]
) -> None:
    with Client(daemon.url) as client:
        (source,) = client.fork(TAG, memory_limit_mib=768, network=True)
        source.eval(THOUGHT).check()
        sandbox, other = source.branch(2)
        wanted = other.eval(FINGERPRINT).check().value
        for each in (source, other):
            each.kill()
        _reset_often(
            client, Patient(daemon, sandbox), wanted, RESETS, tell, may_grow=SIBLING_MAY_GROW
        )


def _reset_often(  # noqa: PLR0913 - all of it is said by its tests
    client: Client,
    patient: Patient,
    wanted: JsonValue,
    resets: int,
    tell: Callable[[str], None],
    *,
    may_grow: dict[str, int],
) -> None:
    sandbox = patient.sandbox
    seen, spent_ms, fork_ms = [], [], []
    for number in range(1, resets + 1):
        found = sandbox.eval(MARK.format(number=number)).check().value
        assert found == [False, False], f"reset {number - 1} left something of before"
        spent_ms.append(sandbox.reset())
        if number % SETTLED == 0:
            seen.append(patient.examined())
        if number % 100 == 0 or number == resets:
            assert sandbox.eval(FINGERPRINT).check().value == wanted
            sandbox.reset()
            fork_ms.append(forked_ms(client))
    grown = {name: max(each[name] for each in seen[1:]) - seen[0][name] for name in seen[0]}
    reset_ms, of_fork_ms = statistics.median(spent_ms), statistics.median(fork_ms)
    tell(f"{resets} resets, p50 {reset_ms:.1f} ms, of a fork {of_fork_ms:.1f} ms; grown {grown}")
    tell(f"first {seen[0]}; last {seen[-1]}")
    assert {name for name, more in grown.items() if more > may_grow.get(name, 0)} == set()


# Links

BASE_MIB = 400
"""Of ballast in the base, with which it has 512 MiB that are not zero."""

ZYGOTE_BYTES = 8 * MIB
"""What a zygote may have for itself: its own few MiB, and the ends of huge pages."""

BESIDE_BYTES = 16 * MIB
"""What a link may store besides: what its guest's kernel and runtime wrote meanwhile."""

CHILD_BYTES = 24 * MIB
"""What a child may that has looked at all its data: its kernel's and its runtime's own pages."""

EXTEND = """
import hashlib, os
{tag} = bytearray({mib} << 20)
for at in range(0, len({tag}), 1 << 20):
    {tag}[at:at + (1 << 20)] = os.urandom(1 << 20)
open("/root/{tag}", "wb").write({tag}[:1 << 20])
hashlib.sha256({tag}).hexdigest()
"""

CHECK = """
[hashlib.sha256({tag}).hexdigest(), open("/root/{tag}", "rb").read() == {tag}[:1 << 20]]
"""


async def extended(host: RealHost, tag: Tag, parent: Tag, mib: int) -> str:
    """Write a link of so much that no other has; return the digest of that."""
    source = await forked(host, parent)
    digest = await value(host, source, EXTEND.format(tag=tag, mib=mib))
    await host.service.branches.snapshot(CALLER, source, tag, wait=True)
    await host.service.sandboxes.delete(CALLER, source)
    return str(digest)


async def forked(host: RealHost, tag: Tag) -> SandboxId:
    return (await host.service.sandboxes.fork(CALLER, tag, 1, ForkOptions())).sandboxes[0].id


@pytest.mark.soak(only=True)  # small ones: tests/functional/test_chains.py
async def test_ten_large_links_have_their_base_in_memory_once_and_all_their_data(
    bakes: Bakes, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    count, mib = 10, 50
    ballast = f"\nballast = numpy.random.default_rng(0).bytes({BASE_MIB} << 20)\n"
    recipe = variant(tmp_path / "large", warmup=ballast, memory_mib=1280)
    async with baked_host(bakes, recipe) as host:
        base = image_bytes(host.vmm_processes())
        digests: dict[Tag, str] = {}
        for number in range(1, count + 1):
            tag = parse_tag(f"link{number}")
            digests[tag] = await extended(host, tag, [TAG, *digests][-1], mib)
        links = [await host.service.snapshots.get(CALLER, tag) for tag in digests]
        for link in links:
            assert mib * MIB < link.stored_bytes < mib * MIB + BESIDE_BYTES

        for depth in range(count + 1):
            child = await forked(host, [TAG, *digests][depth])
            for tag, digest in list(digests.items())[:depth]:
                assert await value(host, child, CHECK.format(tag=tag)) == [digest, True]

        pids = host.vmm_processes()
        assert len(pids) == 2 * (count + 1)
        images = image_bytes(pids)
        assert base.items() <= images.items()
        beside = sum(images.values()) - sum(base.values()) + private_bytes(pids)
        stored = sum(link.stored_bytes for link in links)
        tell(f"base {max(base.values())} bytes; links {[link.stored_bytes for link in links]}")
        tell(f"beside it {beside} bytes in {len(pids)} processes, {stored} stored")
        assert beside < stored + count * ZYGOTE_BYTES + (count + 1) * CHILD_BYTES
        for each in await host.service.sandboxes.list(CALLER):
            await host.service.sandboxes.delete(CALLER, each.id)
