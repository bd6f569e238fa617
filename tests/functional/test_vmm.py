"""The VMM on real KVM: odd shapes work, bad files are refused, and a death stays one machine's."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from forkd import programs
from forkd.engine.configs import ChildConfig, DiskConfig, Identity, MachineConfig, ZygoteConfig
from forkd.engine.control import Control
from forkd.engine.process import (
    CONFIG_FILE,
    LOG_FILE,
    ZYGOTE_SOCKET,
    end,
    start_machine,
    start_zygote,
)
from forkd.engine.replies import ChildFailed, ChildReady
from forkd.errors import ForkdError, StoreError
from forkd.host import proc
from forkd.model.sandbox import ForkOptions, SandboxState
from tests.support.callers import CALLER
from tests.support.processors import ON_EVERY_CPU, on_every_cpu
from tests.support.real_host import (
    BAKES_LARGE,
    LARGE_MEMORY_MIB,
    LARGE_VCPUS,
    REAL,
    baked_host,
    large,
    value,
)
from tests.support.service_host import until
from tests.support.soak import only_in_soak

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from tests.support.bakes import Bakes
    from tests.support.real_host import RealHost

pytestmark = [REAL, BAKES_LARGE, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

HIGH_FRAME = (4 << 30) // 4096

ONE = ForkOptions()

FILES = ("state", "memory", "disk.layer")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(tmp_path_factory: pytest.TempPathFactory, bakes: Bakes) -> AsyncIterator[RealHost]:
    """A host with a snapshot of a machine with four CPUs and memory above 4 GiB."""
    async with baked_host(bakes, large(tmp_path_factory.mktemp("recipes") / "large")) as baked:
        yield baked


async def test_every_cpu_of_a_child_works(host: RealHost) -> None:
    async with host.forked(2, ONE) as children:
        for child in children:
            assert await value(host, child.id, ON_EVERY_CPU) == on_every_cpu(LARGE_VCPUS)


async def test_processors_of_a_guest_are_cores_of_one_package_with_a_name(host: RealHost) -> None:
    code = """
import pathlib
cpus = sorted(pathlib.Path("/sys/devices/system/cpu").glob("cpu[0-9]*"))
read = lambda name: [(cpu / name).read_text().strip() for cpu in cpus]
info = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
caches = [cache for cpu in cpus for cache in cpu.glob("cache/index*")]
last = max(((cache / "level").read_text() for cache in caches), default="")
[
    read("topology/physical_package_id"),
    read("topology/core_id"),
    read("topology/thread_siblings_list"),
    sorted({line.split(": ", 1)[1] for line in info if line.startswith("model name")}),
    sorted({
        (cache / "shared_cpu_list").read_text().strip()
        for cache in caches
        if (cache / "level").read_text() == last
    }),
]
"""
    async with host.forked(1, ONE) as (child,):
        packages, cores, threads, names, shared = await value(host, child.id, code)

    each = [str(cpu) for cpu in range(LARGE_VCPUS)]
    assert packages == ["0"] * LARGE_VCPUS
    assert sorted(cores) == each
    assert threads == each
    assert names == [proc.cpu().model]
    # A guest may be told of no cache; an emulated AMD processor has none of the kind that is told.
    assert shared in ([], [f"0-{LARGE_VCPUS - 1}"])


async def test_nothing_wakes_a_guest_for_the_sake_of_its_kernels_own_statistics(
    host: RealHost,
) -> None:
    code = """
import pathlib
kernel = pathlib.Path("/proc")
[
    (kernel / "sys/kernel/watchdog").read_text(),
    (kernel / "pressure").exists(),
    (kernel / "cmdline").read_text(),
]
"""
    async with host.forked(1, ONE) as (child,):
        watchdog, pressure, told = await value(host, child.id, code)

    assert (watchdog, pressure) == ("0\n", False)
    assert {"nowatchdog", "psi=0"} <= set(told.split())  # the agent stops a watchdog as well


async def test_memory_above_4_gib_is_saved_forked_and_used(host: RealHost) -> None:
    code = f"""
import os
total = int(open("/proc/meminfo").readline().split()[1]) // 1024
high = [line for line in open("/proc/iomem") if "System RAM" in line
        and int(line.split("-")[0], 16) >= 4 << 30]
warm = frames(marker.ctypes.data, marker.nbytes // 4096)
fresh = numpy.ones(4 << 20, dtype=numpy.uint32)
[
    total,
    len(high),
    int((warm >= {HIGH_FRAME}).sum()),
    int((frames(fresh.ctypes.data, fresh.nbytes // 4096) >= {HIGH_FRAME}).sum()),
    bool((marker == numpy.arange(4 << 20, dtype=numpy.uint32)).all()),
]
"""
    async with host.forked(1, ONE) as (child,):
        total, high, warm, fresh, intact = await value(host, child.id, code)

    assert LARGE_MEMORY_MIB * 0.9 < total <= LARGE_MEMORY_MIB
    assert high == 1
    assert warm > 0
    assert fresh > 0
    assert intact


async def test_a_zygote_that_is_killed_takes_no_child_and_the_next_fork_has_another(
    host: RealHost,
) -> None:
    async with host.forked(3, ONE) as children:
        (zygote,) = host.vmm_processes() - {child.pid for child in children}
        os.kill(zygote, signal.SIGKILL)
        await until(lambda: zygote not in host.vmm_processes())

        for child in children:
            assert await value(host, child.id, "6 * 7") == 42
        async with host.forked(1, ONE) as (late,):
            assert await value(host, late.id, "6 * 7") == 42
    assert len(host.vmm_processes()) == 1


async def test_a_child_that_is_killed_is_reported_and_the_others_answer(host: RealHost) -> None:
    async with host.forked(3, ONE) as (dying, *others):
        assert dying.pid is not None
        os.kill(dying.pid, signal.SIGKILL)
        async for _ in host.service.sandboxes.follow_console_log(CALLER, dying.id):
            pass  # the log ends with the machine

        found = await host.service.sandboxes.get(CALLER, dying.id)
        assert (found.state, found.pid) == (SandboxState.EXITED, None)
        for other in others:
            assert await value(host, other.id, "6 * 7") == 42


async def test_of_a_child_that_fails_after_it_has_written_the_vmm_leaves_no_file(
    host: RealHost, folder: Path
) -> None:
    whole, place = host.snapshot.directory, folder / "c"
    (rootfs,) = host.settings.state_dir.glob("images/*/rootfs.ext4")
    disk = DiskConfig((rootfs, whole / "disk.layer"), host.snapshot.disk_bytes)
    config = ZygoteConfig(folder, whole / "state", (whole / "memory",), disk)
    child = ChildConfig("c", place, Identity("fails", uuid.uuid4().hex, str(uuid.uuid4())))
    outcomes: list[ChildReady | ChildFailed] = []
    place.mkdir()
    with await start_zygote(programs.find(programs.VMM), config) as zygote:
        try:
            async with await Control.connect(folder / ZYGOTE_SOCKET) as control:
                await control.fork([child], deadline_s=60.0, on_outcome=outcomes.append)
        finally:
            await end(zygote)

    (failed,) = outcomes
    assert isinstance(failed, ChildFailed)
    assert "the hook has failed as asked" in failed.message
    assert list(place.iterdir()) == []


async def test_a_kernel_that_is_no_kernel_is_one_error_and_leaves_nothing(
    host: RealHost, folder: Path
) -> None:
    known = host.vmm_processes()
    kernel = folder.with_suffix(".kernel")
    for contents in (b"", b"not a kernel", os.urandom(1 << 20), b"\x7fELF" + bytes(100)):
        kernel.write_bytes(contents)
        config = MachineConfig(folder, kernel, vcpus=1, memory_bytes=128 << 20)
        with pytest.raises(ForkdError, match="kernel") as refusal:
            await start_machine(programs.find(programs.VMM), config)

        assert refusal.value.context["control_code"] == "invalid_request"
    kernel.unlink()
    assert_only_log(folder)
    assert host.vmm_processes() == known


def truncated(raw: bytearray) -> None:
    del raw[-1]


def empty(raw: bytearray) -> None:
    raw.clear()


def flipped_in_the_middle(raw: bytearray) -> None:
    raw[len(raw) // 2] ^= 0x10


def flipped_in_the_header(raw: bytearray) -> None:
    raw[20] ^= 0x10


def foreign(raw: bytearray) -> None:
    raw[:8] = b"NOTOURS!"


def of_a_later_version(raw: bytearray) -> None:
    """Raise the version; its check comes before that of the header's digest."""
    struct.pack_into("<I", raw, 8, 3)


@pytest.mark.parametrize("file", ["state", only_in_soak("memory"), "disk.layer"])
async def test_a_bad_file_is_refused_by_its_name_and_what_is_wrong_with_it(
    host: RealHost, folder: Path, file: str
) -> None:
    known, whole = host.vmm_processes(), host.snapshot.directory
    bad = host.settings.state_dir / f"bad.{file}"
    cases: dict[Callable[[bytearray], None], str] = {
        truncated: "damaged",
        empty: "not_ours|damaged",
        flipped_in_the_middle: "damaged",
        flipped_in_the_header: "damaged",
        foreign: "not_ours",
        of_a_later_version: "too_new",
    }
    raw = (whole / file).read_bytes()
    try:
        for spoil, codes in cases.items():
            spoilt = bytearray(raw)
            spoil(spoilt)
            bad.write_bytes(spoilt)
            paths = {name: bad if name == file else whole / name for name in FILES}
            (rootfs,) = host.settings.state_dir.glob("images/*/rootfs.ext4")
            disk = DiskConfig((rootfs, paths["disk.layer"]), host.snapshot.disk_bytes)
            config = ZygoteConfig(folder, paths["state"], (paths["memory"],), disk)
            with pytest.raises(StoreError) as refusal:
                await start_zygote(programs.find(programs.VMM), config)

            assert refusal.value.context["control_code"] in codes.split("|"), spoil.__name__
            assert bad.name in str(refusal.value)
            assert_only_log(folder)
            assert host.vmm_processes() == known
    finally:
        bad.unlink()


@pytest.fixture
def folder(host: RealHost) -> Iterator[Path]:
    """A folder for one machine, on the disk."""
    made = host.settings.run_dir / "m"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def assert_only_log(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} <= {CONFIG_FILE, LOG_FILE}
