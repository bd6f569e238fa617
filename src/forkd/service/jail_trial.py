"""Whether a daemon that is root can jail its machines here, found out by trying.

Namespaces and users of their own take rights that a container may not have, root or not.  Without a
trial the first fork would fail, of a daemon that seems to be well.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.host import files, process
from forkd.host.rlimits import VMM

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.service.jail import UidRange

TRY_TIMEOUT_S = 30.0
"""Time in which a process jails itself and ends; it takes milliseconds on an idle host."""

CONTAINER_PAGE = "docs/howto/run-in-a-container.md"
"""The page that says what a container needs."""

ADVICE = (
    "the jail needs root's rights to make namespaces, mounts and users, which a container has with "
    f"--privileged, or as {CONTAINER_PAGE} says; FORKD_JAIL=off runs machines without a jail, as "
    "the daemon's user"
)
"""What such a jail takes."""


def try_out(vmm: Path, uids: UidRange) -> None:
    """Have the VMM jail itself as a user of a range; blocks.

    Raises:
        HostError: It cannot; the message says why.
    """
    with files.scratch_folder("forkd-jail-") as folder:
        words = (vmm, "jail", str(folder), str(uids.first + 1), str(uids.first))
        try:
            said = json.loads(process.run(words, timeout_s=TRY_TIMEOUT_S, limits=VMM).stdout)
            jailed = said["event"] == "jailed"
        except HostError as error:
            raise HostError(reason(error)) from error
        except (ValueError, LookupError, TypeError) as error:
            raise HostError(f"the answer of a jailed process makes no sense: {error}") from error
    if not jailed:
        raise HostError(f"a process that was to jail itself says: {said}")


def check(vmm: Path, uids: UidRange) -> None:
    """Return if the machines of a daemon can be jailed; blocks.

    Raises:
        HostError: They cannot; the message says why, and what it takes.
    """
    try:
        try_out(vmm, uids)
    except HostError as error:
        raise HostError(f"machines cannot be jailed here: {error}; {ADVICE}") from error


def reason(error: HostError) -> str:
    """Return what a VMM said that failed, if it said anything."""
    line = str(error).splitlines()[-1]
    return process.message_in(line) or line
