"""Boot a machine, warm it, and write it down: how a snapshot comes to be.

    boot -> configure -> warm -> quiesce -> pause -> save -> stop

The machine lives in a folder of its own and ends with this function, whichever way
that goes.  Waiting is always for an event, never for a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.engine import guest_bake
from forkd.engine.boot import BootListener
from forkd.engine.configs import DiskConfig, MachineConfig
from forkd.engine.control import Control
from forkd.engine.guest import Guest
from forkd.engine.process import (
    CONSOLE_LOG,
    CONTROL_SOCKET,
    VSOCK_SOCKET,
    end,
    last_words,
    log_tail,
    start_machine,
)
from forkd.errors import BuildError, Conflict, EngineError, GuestError, InvalidRequest
from forkd.host import files, ownership
from forkd.model.progress import Progress
from forkd.service import folders
from forkd.service.snapshots.bake_warm import warm_up
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.engine.replies import CpuSeen, SavedFile
    from forkd.images.builder import BuiltImage
    from forkd.service.settings import HostSettings
    from forkd.service.snapshots.bake_leases import BakeLease

BOOT_TIMEOUT_S = 300.0
"""How long a stock kernel may take to boot to its agent: 5 s where it is emulated, twice."""

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Baked:
    """What was baked.

    Attributes:
        files: What was saved.
        runtime: The name of the guest's warm runtime, or `none`.
        cpu: What the guest has seen of the processor; None if the VMM did not say.
    """

    files: tuple[SavedFile, ...]
    runtime: str
    cpu: CpuSeen | None


@dataclass(frozen=True, slots=True)
class BakePlan:
    """What is baked.

    Attributes:
        built: The image and its recipe.
        rootfs: The lowest layer of the disk, as the store keeps it.
        staged: The empty folder to save into.
        lease: What the machine holds of the host.
    """

    built: BuiltImage
    rootfs: Path
    staged: Path
    lease: BakeLease

    @property
    def uid(self) -> int | None:
        """The user that the machine is; None for the daemon's."""
        return None if self.lease.jail is None else self.lease.jail.uid


async def bake(settings: HostSettings, plan: BakePlan, tell: Callable[[Progress], None]) -> Baked:
    """Boot and warm a machine and save it to `plan.staged`; nothing else remains of it.

    Raises:
        WarmUpError: The warm-up failed, or was not ready in time.
        BuildError: A line to run failed; or the machine did not boot, or ended; the message has
            its last words.
        HostError: The kernel refused something.
    """
    directory = settings.bakes_dir / secrets.token_hex(8)
    await folders.make(directory, plan.uid)
    try:
        return await _bake_in(directory, settings, plan, tell)
    except (GuestError, Conflict, InvalidRequest) as error:
        raise BuildError(f"the guest refused to be baked: {error}", **error.context) from error
    except EngineError as error:
        console = await asyncio.to_thread(log_tail, directory / CONSOLE_LOG)
        logged = await asyncio.to_thread(last_words, directory)
        why = f"{error}; {logged}" if logged else f"{error}"
        raise BuildError(f"{why}; the end of its console: {console}") from error
    finally:
        await to_end(asyncio.to_thread(files.remove_tree, directory))


async def _bake_in(
    directory: Path, settings: HostSettings, plan: BakePlan, tell: Callable[[Progress], None]
) -> Baked:
    tell(Progress("boot", 0.0, f"booting {plan.built.kernel_version}"))
    async with BootListener(directory) as listener, _machine(directory, settings, plan) as control:
        await listener.booted(BOOT_TIMEOUT_S)
        tell(Progress("boot", 1.0, "the agent answers"))
        guest = Guest(directory / VSOCK_SOCKET)
        with contextlib.closing(guest):
            runtime = await warm_up(guest, plan.built.recipe, plan.built.config, tell)
            tell(Progress("quiesce", None, "making the guest cheap to fork"))
            await guest_bake.quiesce(guest)
        await asyncio.sleep(settings.settle_s)
        tell(Progress("save", 0.0, "writing memory, state and disk"))
        await control.pause()
        await asyncio.to_thread(ownership.give, plan.staged, plan.uid)
        saved = await control.save(plan.staged)
        await asyncio.to_thread(ownership.take_back, plan.staged)
        written_mib = sum(file.bytes for file in saved.files) // _MIB
        tell(Progress("save", 1.0, f"wrote {written_mib} MiB"))
        return Baked(tuple(saved.files), runtime, saved.cpu)


@contextlib.asynccontextmanager
async def _machine(
    directory: Path, settings: HostSettings, plan: BakePlan
) -> AsyncGenerator[Control, None]:
    """Start the machine; it is gone when the block ends."""
    config = _config(directory, settings, plan)
    process = await start_machine(
        settings.vmm,
        config,
        filtered=settings.filtered,
        own_cores=settings.own_cores,
        cgroup=plan.lease.cgroup,
    )
    with process:
        try:
            async with await Control.connect(directory / CONTROL_SOCKET) as control:
                yield control
        finally:
            # What it is worth is saved by now, and a kill needs no answer.
            await to_end(end(process))
            process.drain_log()


def _config(directory: Path, settings: HostSettings, plan: BakePlan) -> MachineConfig:
    shape, image = plan.built.recipe.machine, plan.built.image
    return MachineConfig(
        directory=directory,
        kernel=image.kernel,
        initramfs=image.initramfs,
        cmdline=_cmdline(plan.built),
        vcpus=shape.vcpus,
        cpu=shape.cpu,
        memory_bytes=shape.memory_mib * _MIB,
        disk=DiskConfig(
            (plan.rootfs,),
            image.disk_bytes,
            top_limit_bytes=plan.lease.disk_limit_mib * _MIB,
            top_directory=settings.tops_dir,
            top_reserve_bytes=settings.disks.reserve_mib * _MIB,
        ),
        jail=plan.lease.jail,
    )


def _cmdline(built: BuiltImage) -> str | None:
    words = [built.recipe.machine.cmdline]
    if built.recipe.init == "image":
        words.append("forkd.init=image")
    return " ".join(filter(None, words)) or None
