"""The helper machine: a QEMU machine that has a real KVM where the host has none.

Part of the client side, so that the CLI can start one; it loads no host code.
Why it is as it is: docs/adr/0003.
"""

from forkd.machine.accel import Accel
from forkd.machine.config import Forward, MachineConfig, Share
from forkd.machine.kernel import Kernel, find_kernel
from forkd.machine.machine import Machine

__all__ = ["Accel", "Forward", "Kernel", "Machine", "MachineConfig", "Share", "find_kernel"]
