"""Every check of how a host is set up: its settings, and who may use forkd on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd import programs
from forkd.errors import ForkdError
from forkd.host import proc, refusals
from forkd.service import rootless, tuning_checks
from forkd.service.setup import access

if TYPE_CHECKING:
    from forkd.checks import Check
    from forkd.service.setup.plan import Situation


def examine(seen: Situation) -> list[Check]:
    """Return every check that applies, those of who may use forkd first."""
    return [
        *access.judge(seen),
        *tuning_checks.judge(
            seen.host,
            needs_clone3=proc.is_root(),
            hides_clone3=refusals.hides_clone3(),
            is_jailed=seen.host.userns_restricted and _can_jail(seen),
            own_cores=refusals.schedules_cores(),
        ),
    ]


def _can_jail(seen: Situation) -> bool:
    """Whether AppArmor leaves the VMM its rights in user namespaces, as far as can be told."""
    if proc.is_root():
        return seen.profile_loaded
    try:
        rootless.try_out(programs.find(programs.VMM))
    except ForkdError:
        return False
    return True
