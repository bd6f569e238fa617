"""What guests on this host are shown of its processor, by `forkd-vmm cpu`."""

from __future__ import annotations

import json

from forkd import programs
from forkd.engine.replies import CpuSeen
from forkd.errors import HostError
from forkd.host import process
from forkd.host.rlimits import VMM

OFFER_TIMEOUT_S = 10.0
"""Longest time in which the VMM says it: it makes a machine, and runs nothing in it."""


def offered() -> CpuSeen:
    """Return what a guest that wants all of this host's processor would be shown.

    Blocks.

    Raises:
        ForkdError: The VMM is missing, KVM cannot be used, or the answer makes no sense.
    """
    command = (programs.find(programs.VMM), "cpu")
    done = process.run(command, timeout_s=OFFER_TIMEOUT_S, limits=VMM)
    try:
        said = json.loads(done.stdout)
    except ValueError as error:
        raise HostError(f"{programs.VMM} cpu: the answer is no JSON") from error
    return CpuSeen.read(said, "cpu")
