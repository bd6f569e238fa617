"""The kinds of containers without privileges that the documentation speaks of.

`functional/test_container_kinds.py` starts each and sees what its daemon says;
`contract/test_container.py` compares the table of the page with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.containers import Confinement

if TYPE_CHECKING:
    from collections.abc import Mapping

USER = 10001
"""The user that the image has for containers without root."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of container.

    Attributes:
        options: What `docker run` is given for it.
        confinement: How runc is told the same.
        environment: Settings of the daemon.
        jail: What machines have, in the words of the page; empty if the daemon does not start.
        says: What the doctor says of the jail; if it does not start, what the daemon says.
    """

    options: str
    confinement: Confinement
    environment: Mapping[str, str] = field(default_factory=dict)
    jail: str = ""
    says: str = ""


KVM = "/dev/kvm"

MEMORY_MIB = 2048


USERS = "--user forkd --device /dev/kvm --cap-drop ALL"

KINDS = {
    "user": Kind(
        f"{USERS} --security-opt seccomp=unconfined",
        Confinement(
            capabilities=frozenset(),
            seccomp=False,
            devices=(KVM,),
            user=USER,
            gains_rights=False,
            memory_mib=MEMORY_MIB,
        ),
        jail="files, network and namespaces of their own; all are the daemon's user",
        says="files, network and namespaces of their own for machines",
    ),
    "user, no jail": Kind(
        f"{USERS} -e FORKD_JAIL=off",
        Confinement(
            capabilities=frozenset(),
            devices=(KVM,),
            user=USER,
            gains_rights=False,
            memory_mib=MEMORY_MIB,
        ),
        environment={"FORKD_JAIL": "off"},
        jail="none: machines see what the daemon sees",
        says="none: machines run as the daemon's user",
    ),
    "user, jail": Kind(
        USERS,
        Confinement(capabilities=frozenset(), devices=(KVM,), user=USER, gains_rights=False),
        says="machines cannot be jailed here: make a user namespace without being root",
    ),
    "root, jail": Kind(
        "--device /dev/kvm -e FORKD_CGROUPS=off",
        Confinement(devices=(KVM,)),
        environment={"FORKD_CGROUPS": "off"},
        says="machines cannot be jailed here: unshare",
    ),
    "root": Kind(
        "--device /dev/kvm",
        Confinement(devices=(KVM,)),
        says="every sandbox gets a cgroup, and this host has no cgroup v2",
    ),
}


def row(kind: Kind) -> str:
    """Return what the page says of a kind of container, a row of its table."""
    if kind.jail:
        return f"| `{kind.options}` | yes | {kind.jail} |"
    return f"| `{kind.options}` | no: `{kind.says} …` | |"
