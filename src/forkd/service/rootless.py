"""Whether a daemon that is not root can jail its machines here, found out by trying.

What an ordinary user may do depends on sysctls, on security modules and on what the daemon itself
runs in, and no file says all of it.  So the VMM jails itself once, as a machine would be, and says
what became of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host import files, process
from forkd.host.rlimits import VMM
from forkd.service.jail_trial import TRY_TIMEOUT_S, reason

if TYPE_CHECKING:
    from pathlib import Path

ADVICE = (
    "user namespaces for ordinary users (sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a "
    "container, its profile) and a kernel from 5.12 on; FORKD_JAIL=off goes without"
)
"""What such a jail takes."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A jail that could be had.

    Attributes:
        keeps_signals: Whether who is in it can signal nobody outside.
    """

    keeps_signals: bool


def try_out(vmm: Path) -> Tried:
    """Have the VMM jail itself as an ordinary user; blocks.

    Raises:
        HostError: It cannot; the message says why, and what it takes.
    """
    with files.scratch_folder("forkd-jail-") as folder:
        try:
            done = process.run((vmm, "jail", folder), timeout_s=TRY_TIMEOUT_S, limits=VMM)
            said = json.loads(done.stdout)
            return Tried(keeps_signals=bool(said["keeps_signals"]))
        except HostError as error:
            raise HostError(f"machines cannot be jailed here: {reason(error)}; {ADVICE}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise HostError(f"the answer of a jailed process makes no sense: {error}") from error
