"""A guest that takes no frames costs its host no processor."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.model.network import HOST
from forkd.model.sandbox import ForkOptions
from tests.support.real_host import REAL, real_host, shell
from tests.support.service_host import until

if TYPE_CHECKING:
    from tests.support.real_host import RealHost

__all__ = ["real_host"]

pytestmark = [REAL, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

LOOKS = 100

UNBIND = "cd /sys/bus/virtio/drivers/virtio_net && echo virtio* >unbind"

BROADCAST = b"\xff" * 6 + b"\x02" * 6 + b"\x88\xb5" + bytes(50)
"""A frame to everybody, of the type for experiments."""


def is_asleep(pid: int) -> bool:
    """Return whether a process's first thread slept whenever it was looked at."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat")
    states = (stat.read_text().rpartition(")")[2].split()[0] for _ in range(LOOKS))
    return all(state == "S" for state in states)


async def test_frames_that_a_guest_does_not_take_do_not_keep_its_machine_awake(
    real_host: RealHost,
) -> None:
    plan = real_host.names.network
    async with real_host.forked(1, ForkOptions(network=HOST)) as (sandbox,):
        (tap,) = [name for _, name in socket.if_nameindex() if name.startswith(plan.tap_prefix)]
        await shell(real_host, sandbox.id, UNBIND)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
            wire.bind((tap, 0))
            for _ in range(LOOKS):
                wire.send(BROADCAST)

        assert sandbox.pid is not None
        pid = sandbox.pid
        await until(lambda: is_asleep(pid))
        assert await shell(real_host, sandbox.id, "echo still here") == "still here\n"
