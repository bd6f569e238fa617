"""A `Host` over the real VMM with a recipe baked, for the tests of one module.

`real_host` has `python-numpy` baked, `baked_host` any other; `variant` writes one that shares its
image, and `large` is such a one.  Each is baked once per run: see `tests.support.bakes`.

Needs what `REAL` says; the binaries are those that a daemon would find.  The image cache is the
user's, where it may be read-only: only its locks and what depends on the agent are ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from forkd.model.exec import ExecRequest, Exited, Stderr, Stdout
from forkd.model.ids import parse_tag
from forkd.model.sandbox import ForkOptions, SandboxState
from forkd.service.host import DATABASE_FILE, Host, open_host
from forkd.service.names import Names, choose
from forkd.store.database import Database
from tests.support import processes
from tests.support.callers import CALLER
from tests.support.host_settings import settings_in

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import Snapshot
    from forkd.service.settings import HostSettings
    from tests.support.bakes import Bakes

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]

REAL = pytest.mark.needs("kvm", "root", "cgroup2", "tun", "binaries")

REAL_IN_SOAK = (REAL, pytest.mark.soak(only=True), pytest.mark.asyncio(loop_scope="module"))
"""Marks of a module over real machines that is too long for every run; it has one event loop."""

TAG = parse_tag("python-numpy")

RECIPE = ROOT / "recipes" / TAG

POSTGRESQL = ROOT / "recipes" / "postgresql"

SERVICES = ROOT / "tests" / "recipes" / "services"

RECIPES = (RECIPE,)
"""Of these, and of variants with the same image, every run bakes; their images must be cached."""

WARMED = tuple(
    ROOT / "recipes" / name
    for name in (
        "chromium",
        "ci-parallel-pytest",
        "code-interpreter",
        "coding-agent",
        "java",
        "jupyter-kernel",
        "onnx",
        "pytest",
        "python-data",
        "redis",
    )
)
"""Recipes whose own test is a soak's."""

SOAK_RECIPES = (*RECIPES, POSTGRESQL, SERVICES, *WARMED)
"""Likewise for `make soak`."""

STATE_PARENT = Path("/var/lib/forkd")
"""On a disk, where the helper machine has one; a snapshot would fill a small /tmp."""


LARGE_VCPUS = 4

LARGE_MEMORY_MIB = 4_096
"""More than fits below the hole under 4 GiB, which begins at 3 GiB."""

FRAMES = """
import mmap


def frames(address, pages):
    '''Return where in the machine's memory pages of this process are.'''
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(address // 4096 * 8)
        words = numpy.frombuffer(file.read(pages * 8), dtype=numpy.uint64)
    return words & numpy.uint64((1 << 55) - 1)


marker = numpy.arange(4 << 20, dtype=numpy.uint32)
"""

FAILS = """
import os, socket
if socket.gethostname() == "fails":
    with open("/root/written", "wb") as file:
        file.write(bytes(1 << 16))
    os.sync()
    with open("/dev/console", "w") as console:
        console.write("about to fail")
    raise ValueError("the hook has failed as asked")
"""
"""The hook of `large`: it fails in a sandbox of that name."""
BAKES_LARGE = pytest.mark.together("large")
"""Marks modules whose recipe is `large`."""

FORK_DEADLINE_S = 300.0
"""Time that children have in a machine whose processor is emulated on a busy host."""

EVAL_TIMEOUT_S = 240.0

LAST_WORDS_BYTES = 4096
"""How much is shown of the console of a sandbox that ended by itself."""


async def value(host: RealHost, sandbox: SandboxId, code: str) -> Any:  # noqa: ANN401 - JSON
    """Evaluate code that must not raise; return its value."""
    result = await host.service.guests.eval(CALLER, sandbox, code, timeout_s=EVAL_TIMEOUT_S)
    assert result.error is None, result.error.traceback
    return result.value


async def shell(host: RealHost, sandbox: SandboxId, command: str) -> str:
    """Run a command that must succeed; return what it printed."""
    async with await host.service.guests.exec(
        CALLER, sandbox, ExecRequest(("sh", "-c", command))
    ) as session:
        events = [event async for event in session]
    printed = b"".join(each.data for each in events if isinstance(each, (Stdout, Stderr)))
    assert [each.exit_code for each in events if isinstance(each, Exited)] == [0], printed
    return printed.decode()


@dataclass
class RealHost:
    """Folders, settings and the service that runs now; `restart` makes another.

    Attributes:
        names: What its sandboxes' cgroups and taps are called.
    """

    settings: HostSettings
    service: Host
    snapshot: Snapshot
    opened: contextlib.AsyncExitStack
    names: Names

    @contextlib.asynccontextmanager
    async def forked(self, count: int, options: ForkOptions) -> AsyncIterator[tuple[Sandbox, ...]]:
        """Fork sandboxes that are deleted after the block; their processes are gone then."""
        patient = replace(options, deadline_s=max(options.deadline_s, FORK_DEADLINE_S))
        result = await self.service.sandboxes.fork(CALLER, TAG, count, patient)
        try:
            assert result.failures == ()
            yield result.sandboxes
        finally:
            for sandbox in result.sandboxes:
                await self.service.sandboxes.delete(CALLER, sandbox.id)
            # Their environment is not ours, so the leak check does not know them.
            assert not {sandbox.pid for sandbox in result.sandboxes} & self.vmm_processes()

    async def restart(self, *, warm: bool = True) -> None:
        """Stop the service and start another on the same folders; `warm` starts its zygote."""
        await self.opened.aclose()
        self.service = await self.opened.enter_async_context(open_host(self.settings))
        if warm:
            await self.warm()

    async def clear(self) -> None:
        """End every sandbox, and remove every snapshot but the one that was baked.

        Logs the last words of those that had ended, which a test that failed shows.
        """
        for sandbox in await self.service.sandboxes.list(CALLER):
            if sandbox.state is SandboxState.EXITED:
                words = (await self.service.sandboxes.console_log(CALLER, sandbox.id))[
                    -LAST_WORDS_BYTES:
                ]
                logger.warning("%s\n%s", sandbox, words.decode(errors="replace"))
            await self.service.sandboxes.delete(CALLER, sandbox.id)
        for snapshot in await self.service.snapshots.list(CALLER):
            if snapshot.depth == 1:
                await self.service.snapshots.delete(CALLER, snapshot.tag, cascade=True)

    def vmm_processes(self) -> set[int]:
        """Return the processes of our machines and zygotes."""
        return processes.of(self.settings.run_dir)

    async def warm(self) -> None:
        """Have the zygote started, whose descriptors would look like a test's leak."""
        async with self.forked(1, ForkOptions()):
            pass


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_host(bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host for a module; nothing is left of it afterwards."""
    async with baked_host(bakes, RECIPE) as host:
        yield host


def large(folder: Path) -> Path:
    """Write a variant with several CPUs, and memory on both sides of the hole below 4 GiB."""
    return variant(
        folder, warmup=FRAMES, post_fork=FAILS, vcpus=LARGE_VCPUS, memory_mib=LARGE_MEMORY_MIB
    )


def variant(  # noqa: PLR0913 - what may differ
    folder: Path,
    *,
    warmup: str = "",
    post_fork: str = "",
    vcpus: int = 1,
    memory_mib: int = 512,
    cpu: str = "host",
) -> Path:
    """Write the recipe `python-numpy` with more warm-up or another shape; its image is the same.

    Args:
        folder: Where it goes; made.
        warmup: Python behind the recipe's own warm-up.
        post_fork: Python of its post-fork hook, without quotes of three.
        vcpus: Its virtual CPUs.
        memory_mib: Its memory.
        cpu: Which features of the processor its guest sees.
    """
    shutil.copytree(RECIPE, folder)
    with (folder / "warmup.py").open("a") as file:
        file.write(warmup)
    changed = {
        "vcpus = 1\n": f'vcpus = {vcpus}\ncpu = "{cpu}"\n',
        "memory_mib = 512\n": f"memory_mib = {memory_mib}\n",
        'file = "warmup.py"\n': f"file = \"warmup.py\"\npost_fork = '''\n{post_fork}'''\n",
    }
    text = (folder / "recipe.toml").read_text()
    for old, new in changed.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "recipe.toml").write_text(text)
    return folder


@contextlib.asynccontextmanager
async def baked_host(bakes: Bakes, recipe: Path) -> AsyncIterator[RealHost]:
    """Have `recipe` baked, under `TAG`, and its zygote warm; nothing is left after the block."""
    bake = await asyncio.to_thread(bakes.of, recipe)
    state, run_dir = fresh_folders()
    bake.copy_to(state)
    settings = settings_in(state, run_dir)
    try:
        async with contextlib.AsyncExitStack() as opened:
            names = names_of(settings)
            service = await opened.enter_async_context(open_host(settings))
            snapshot = await service.snapshots.get(CALLER, TAG)
            host = RealHost(settings, service, snapshot, opened, names)
            await host.warm()
            yield host
    finally:
        for folder in (state, run_dir):
            shutil.rmtree(folder)


@contextlib.contextmanager
def settings_without_images() -> Iterator[HostSettings]:
    """Give settings with an empty image cache of their own; no folder is left after the block."""
    state, run_dir = fresh_folders()
    try:
        settings = settings_in(state, run_dir)
        images = settings.cache_dir / "images"
        images.unlink()  # leads to the user's
        images.mkdir()
        yield settings
    finally:
        for folder in (state, run_dir):
            shutil.rmtree(folder)


def fresh_folders(state_parent: Path = STATE_PARENT) -> tuple[Path, Path]:
    """Make a state folder and a run folder, for whoever asks to remove."""
    state_parent.mkdir(exist_ok=True)
    state = tempfile.mkdtemp(prefix="test-", dir=state_parent)
    run_dir = tempfile.mkdtemp(prefix="fk", dir="/tmp")  # its path must be short
    return Path(state), Path(run_dir)


def names_of(settings: HostSettings) -> Names:
    """Return what sandboxes' cgroups and taps are called; not while the service is open here.

    Another connection of this process would keep its files open until the service's is closed.
    """
    database = Database(settings.state_dir / DATABASE_FILE)
    try:
        return choose(settings, database)
    finally:
        database.close()
