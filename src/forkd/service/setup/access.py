"""Judge who may use forkd on a host, beside root: a function of what was seen."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from forkd.checks import Check, Status
from forkd.service.setup.plan import DELEGATED, GROUP, device_group, groups_wanted
from forkd.service.tuning_checks import SETUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.service.setup.plan import Situation


def judge(seen: Situation) -> list[Check]:
    """Return every check that applies."""
    return [_group(seen), *_device(seen), *_membership(seen), *_delegation(seen)]


def _group(seen: Situation) -> Check:
    name = f"group {GROUP}"
    if seen.group:
        return Check(name, Status.PASS, "its members may use the daemon of root")
    return Check(name, Status.WARN, "missing; only root may use the daemon of root", SETUP)


def _device(seen: Situation) -> Iterator[Check]:
    device = seen.device
    if device is None:
        return
    name, mode = "/dev/kvm", stat.filemode(device.mode)[1:]
    if device.is_open:
        yield Check(name, Status.PASS, f"open to every user ({mode})")
    elif device.users is not None:
        yield Check(name, Status.PASS, f"open to the group {device.users} ({mode})")
    else:
        yield Check(name, Status.WARN, f"open to root alone ({mode})", SETUP)


def _membership(seen: Situation) -> Iterator[Check]:
    if seen.user is None:
        return
    name, missing = f"user {seen.user}", groups_wanted(seen)
    if not missing:
        groups = " and ".join(filter(None, (GROUP, device_group(seen.device))))
        yield Check(name, Status.PASS, f"in the groups {groups}")
        return
    found = f"not in the groups {', '.join(missing)}"
    yield Check(name, Status.WARN, found, SETUP)


def _delegation(seen: Situation) -> Iterator[Check]:
    if seen.user is None or seen.delegated is None:
        return
    name, missing = "cgroups of users", DELEGATED - seen.delegated
    if not missing:
        yield Check(name, Status.PASS, f"delegated: {', '.join(sorted(DELEGATED))}")
        return
    found = f"not delegated: {', '.join(sorted(missing))}"
    yield Check(name, Status.WARN, f"{found}; no such limits without root", SETUP)
