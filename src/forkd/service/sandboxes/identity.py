"""What a sandbox's guest is told of itself."""

from __future__ import annotations

import uuid
from hashlib import blake2b
from typing import TYPE_CHECKING

from forkd.engine.configs import Identity, NetworkConfig
from forkd.network.plan import PREFIX_LENGTH, PREFIX_LENGTH_V6
from forkd.service.allowance import guest_memory_bytes

if TYPE_CHECKING:
    from forkd.model.ids import SandboxId
    from forkd.model.sandbox import Sandbox
    from forkd.model.snapshot import Snapshot
    from forkd.network.plan import Slot


def machine_id(sandbox: SandboxId) -> str:
    """Return the machine id of a sandbox's guest: unique, and the same after a reset."""
    return blake2b(sandbox.encode(), digest_size=16, person=b"machine-id").hexdigest()


def identity_of(sandbox: Sandbox, slot: Slot | None, snapshot: Snapshot | None) -> Identity:
    """Return what a sandbox's guest is told of itself; the boot id is another each time."""
    network = None
    if slot is not None:
        network = NetworkConfig(
            slot.tap,
            slot.mac,
            f"{slot.guest}/{PREFIX_LENGTH}",
            slot.host,
            f"{slot.guest_v6}/{PREFIX_LENGTH_V6}" if slot.ipv6 else None,
            slot.host_v6 if slot.ipv6 else None,
            dns=(slot.host,),
        )
    return Identity(
        hostname=sandbox.hostname,
        machine_id=machine_id(sandbox.id),
        boot_id=str(uuid.uuid4()),
        network=network,
        guest_memory_bytes=guest_memory_bytes(sandbox, snapshot),
    )
