"""What a machine that is baked holds of the host, and of its tenant's quotas: as a sandbox does.

A bake runs code of a tenant, so it is admitted, counted and limited like a fork of the snapshot
that it makes: what it may take is reserved before the machine is started, and the machine is
started in a cgroup with the limits that a sandbox without limits of its own would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from forkd.errors import BuildError, CapacityError, InvalidRequest, QuotaExceeded
from forkd.host import proc
from forkd.limits import BAKED_MACHINES_MAX, LONG_RETRY_S
from forkd.model.sandbox import ForkOptions
from forkd.model.tenant import Amounts
from forkd.service.allowance import allow, limits_of
from forkd.service.ledger import amounts_of
from forkd.service.places import Places
from forkd.service.supervision import to_end

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from forkd.cgroups.tree import CgroupTree
    from forkd.engine.configs import JailConfig
    from forkd.images.recipe import Recipe
    from forkd.model.caller import Caller
    from forkd.model.snapshot import Snapshot
    from forkd.service.admission import Admission
    from forkd.service.jail import Jail
    from forkd.service.ledger import Ledger
    from forkd.service.settings import HostSettings


@dataclass(frozen=True, slots=True)
class BakeLease:
    """What one machine holds while it is baked.

    Attributes:
        disk_limit_mib: Most that it may write to its disk.
        jail: Where it is, and which user; None without a jail.
        cgroup: What it is started in; None where sandboxes have no limits either.
    """

    disk_limit_mib: int
    jail: JailConfig | None = None
    cgroup: Path | None = None


@dataclass(frozen=True, slots=True)
class BakeLeases:
    """The leases of the machines that one host bakes.

    Attributes:
        settings: Whether machines have cgroups, and what their disks may take.
        admission: Whether the host has room for one more.
        ledger: What its tenant may have.
        jail: Which users they are.
        cgroups: Where they have their groups.
        machines: Their places; a bake that may have none waits.
    """

    settings: HostSettings
    admission: Admission
    ledger: Ledger
    jail: Jail
    cgroups: CgroupTree
    machines: Places = field(
        default_factory=lambda: Places("baked machines", BAKED_MACHINES_MAX, LONG_RETRY_S)
    )

    def check(self, caller: Caller, recipe: Recipe) -> None:
        """Return if the machine of a recipe may have its memory; known before its image is built.

        Raises:
            InvalidRequest: The host has less memory than that.
            QuotaExceeded: Its tenant may not have so much.
            CapacityError: The host has no room for it.
        """
        asked_mib = recipe.machine.memory_mib
        total_bytes, available_bytes = proc.memory_bytes()
        wants = f"the recipe {recipe.name} asks for {asked_mib} MiB of memory (machine.memory_mib)"
        if asked_mib << 20 > self.admission.guest_bytes_max(total_bytes):
            raise InvalidRequest(
                f"{wants}, but this host has {total_bytes >> 20} MiB, and "
                f"{available_bytes >> 20} MiB of it available; lower machine.memory_mib, bake the "
                "recipe on a larger host, or allow guests that do not use all of theirs "
                "(FORKD_MEMORY_OVERCOMMIT)",
                field="machine.memory_mib",
            )
        try:
            self.ledger.check(caller.tenant, Amounts(memory_mib=asked_mib))
            self.admission.check(asked_mib)
        except (QuotaExceeded, CapacityError) as error:
            message = f"{wants}: {error}; or lower machine.memory_mib"
            raise type(error)(message, **error.context) from error

    @contextlib.asynccontextmanager
    async def take(
        self, caller: Caller, shape: Snapshot, on_wait: Callable[[], None]
    ) -> AsyncGenerator[BakeLease, None]:
        """Give a machine what it needs for the block, in which it has ended.

        Args:
            caller: Who bakes it, and whose tenant it counts for.
            shape: The snapshot that it will be.
            on_wait: Called if it has to wait for others to be baked.

        Raises:
            QuotaExceeded: Its tenant may not have so much.
            CapacityError: The host has no room for it, or no more users.
            BuildError: It was killed for want of memory within the block.
            HostError: A limit could not be set.
        """
        options = ForkOptions(disk_limit_mib=self.settings.disks.limit_mib)
        asked = replace(amounts_of(options, shape), sandboxes=0)  # nobody can use it as one
        self.ledger.check(caller.tenant, asked)  # rather now than after others
        if not self.machines.has_room(caller):
            on_wait()
        async with self.machines.wait(caller):
            self.admission.check(asked.memory_mib)
            with self.ledger.reserve(caller.tenant, asked), self.jail.cell() as cell:
                async with self._group(allow(options, shape)) as group:
                    yield BakeLease(self.settings.disks.limit_mib, cell, group)

    @contextlib.asynccontextmanager
    async def _group(self, options: ForkOptions) -> AsyncGenerator[Path | None, None]:
        """Give a cgroup with the limits of a sandbox; None if sandboxes have none."""
        limits = limits_of(options) if self.settings.cgroups else None
        if limits is None:
            yield None
            return
        name = f"bake-{secrets.token_hex(8)}"
        try:
            yield await to_end(asyncio.to_thread(self.cgroups.create, name, limits))
        except BuildError as error:
            wanting = await asyncio.to_thread(self.cgroups.out_of_memory, name)
            if wanting is None:
                raise
            raise BuildError(
                f"the machine was killed, out of memory: {wanting} had no more; "
                "give the recipe more (machine.memory_mib)",
                **error.context,
            ) from error
        finally:
            await to_end(asyncio.to_thread(self.cgroups.remove, name))
