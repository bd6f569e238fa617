"""The helper machine: a QEMU machine that has a real KVM where the host has none."""

from forkd.machine.config import Accel, Forward, MachineConfig, Share
from forkd.machine.kernel import Kernel, find_kernel
from forkd.machine.machine import Machine

__all__ = ["Accel", "Forward", "Kernel", "Machine", "MachineConfig", "Share", "find_kernel"]
