"""The kinds of containers that the documentation speaks of.

`functional/test_container_kinds.py` starts each that needs no cgroups and sees what its daemon
says; `functional/test_container_machines.py` forks machines in each whose daemon starts;
`contract/test_container.py` compares the tables and commands of the page with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.support.containers import Confinement, words

if TYPE_CHECKING:
    from collections.abc import Mapping

USER = 10001
"""The user that the image has for containers without root."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of container.

    Attributes:
        options: What `docker run` is given for it, or the section of the page that says so.
        confinement: How runc is told the same.
        environment: Settings of the daemon.
        jail: What machines have, in the words of the page; empty if the daemon does not start.
        own: What each sandbox has of its own besides, in the words of the page.
        says: What the doctor says of the jail; if it does not start, what the daemon says.
        program: What is started instead of the image's program; empty for that.
    """

    options: str
    confinement: Confinement
    environment: Mapping[str, str] = field(default_factory=dict)
    jail: str = ""
    own: str = ""
    says: str = ""
    program: tuple[str, ...] = ()

    @property
    def has_cgroups(self) -> bool:
        """Whether its sandboxes have cgroups, which only a host with cgroup v2 can try."""
        return self.own.startswith(LIMITS)

    @property
    def has_networks(self) -> bool:
        """Whether its sandboxes can have networks."""
        return self.own.endswith(NETWORKS)


KVM = "/dev/kvm"
TUN = "/dev/net/tun"

MEMORY_MIB = 2048

USERS = "`--user forkd --device /dev/kvm --cap-drop ALL"

LIMITS = "limits"
NETWORKS = "networks"
NEITHER = "neither"

NEEDED = {
    "CHOWN": "cannot let group",
    "DAC_OVERRIDE": "cannot make the folder /run/forkd/s: Permission denied",
    "SETGID": "machines cannot be jailed here: give up groups: Operation not permitted",
    "SETPCAP": "machines cannot be jailed here: give up capability 0 for good",
    "SETUID": "machines cannot be jailed here: become user",
    "SYS_ADMIN": "machines cannot be jailed here: unshare mount, network, IPC and UTS namespaces",
    "SYS_CHROOT": "machines cannot be jailed here: chroot: Operation not permitted",
}
"""The capabilities that a root daemon whose sandboxes have limits needs to start, and what it says
without each."""

REFUSED_BY_SECCOMP = "machines cannot be jailed here: pivot_root"
"""What it says with all of them, and a profile like Docker's."""

NEEDED_LATER = {
    "KILL": "cannot kill process",
    "SYS_PTRACE": "cannot look at the users of process",
}
"""What bakes and branches need besides, with machines of other users, and what they say without."""

FOR_NETWORKS = words("NET_ADMIN")
"""What networks of sandboxes take besides."""

ROOTS_JAIL = "files, network, namespaces and users of their own"

SMALLER = "[without `--privileged`](#limits-without---privileged)"

LIMITED = Confinement(
    capabilities=frozenset({*NEEDED, *NEEDED_LATER}),
    seccomp=False,
    devices=(KVM,),
    writes_cgroups=True,
    memory_mib=MEMORY_MIB,
)

CONNECTED = replace(
    LIMITED,
    capabilities=LIMITED.capabilities | FOR_NETWORKS,
    devices=(KVM, TUN),
    writes_settings=True,
)

REMOUNTED = replace(CONNECTED, writes_cgroups=False, writes_settings=False)

REMOUNT = (
    "for each in /sys/fs/cgroup /proc/sys;"
    " do mount -o remount,bind,rw,nosuid,nodev,noexec $each || exit; done;"
    " exec forkd-daemon serve"
)
"""What a shell in a container does that may only read what its daemon has to write."""

KINDS = {
    "privileged": Kind(
        "`--privileged`",
        Confinement(privileged=True, memory_mib=MEMORY_MIB),
        jail=ROOTS_JAIL,
        own=f"{LIMITS} and {NETWORKS}",
        says="users, rights and namespaces of their own for machines",
    ),
    "privileged, host's cgroups": Kind(
        "`--privileged --cgroupns host`",
        Confinement(privileged=True, sees_groups_above=True, memory_mib=MEMORY_MIB),
        jail=ROOTS_JAIL,
        own=f"{LIMITS} and {NETWORKS}",
        says="users, rights and namespaces of their own for machines",
    ),
    "root, limits and networks": Kind(
        SMALLER,
        CONNECTED,
        jail=ROOTS_JAIL,
        own=f"{LIMITS} and {NETWORKS}",
        says="users, rights and namespaces of their own for machines",
    ),
    "root, limits": Kind(
        f"{SMALLER} and without networks",
        LIMITED,
        jail=ROOTS_JAIL,
        own=LIMITS,
        says="users, rights and namespaces of their own for machines",
    ),
    "root, remounted": Kind(
        f"{SMALLER}, with a command that remounts",
        REMOUNTED,
        jail=ROOTS_JAIL,
        own=f"{LIMITS} and {NETWORKS}",
        says="users, rights and namespaces of their own for machines",
        program=("sh", "-c", REMOUNT),
    ),
    "user": Kind(
        f"{USERS} --security-opt seccomp=unconfined`",
        Confinement(
            capabilities=frozenset(),
            seccomp=False,
            devices=(KVM,),
            user=USER,
            gains_rights=False,
            memory_mib=MEMORY_MIB,
        ),
        jail="files, network and namespaces of their own; all are the daemon's user",
        own=NEITHER,
        says="files, network and namespaces of their own for machines",
    ),
    "user, no jail": Kind(
        f"{USERS} -e FORKD_JAIL=off`",
        Confinement(
            capabilities=frozenset(),
            devices=(KVM,),
            user=USER,
            gains_rights=False,
            memory_mib=MEMORY_MIB,
        ),
        environment={"FORKD_JAIL": "off"},
        jail="none: machines see what the daemon sees",
        own=NEITHER,
        says="none: machines run as the daemon's user",
    ),
    "user, jail": Kind(
        f"{USERS}`",
        Confinement(capabilities=frozenset(), devices=(KVM,), user=USER, gains_rights=False),
        says="machines cannot be jailed here: make a user namespace without being root",
    ),
    "root, jail": Kind(
        "`--device /dev/kvm -e FORKD_CGROUPS=off`",
        Confinement(devices=(KVM,)),
        environment={"FORKD_CGROUPS": "off"},
        says="machines cannot be jailed here: unshare",
    ),
    "root": Kind(
        "`--device /dev/kvm`",
        Confinement(devices=(KVM,)),
        says="every sandbox gets a cgroup, and this host has no cgroup v2",
    ),
}


def row(kind: Kind) -> str:
    """Return what the page says of a kind of container, a row of its table."""
    if kind.jail:
        return f"| {kind.options} | yes | {kind.jail} | {kind.own} |"
    return f"| {kind.options} | no: `{kind.says} …` | | |"


def options(confinement: Confinement) -> tuple[str, ...]:
    """Return the options of `docker run` for a root container that may write its cgroups."""
    words = [f"--device {each}" for each in confinement.devices]
    words += ["--cap-drop ALL", *(f"--cap-add {each}" for each in confinement.capabilities)]
    words += [f"--security-opt {each}=unconfined" for each in ("seccomp", "apparmor")]
    words += ["--security-opt systempaths=unconfined"] if confinement.writes_settings else []
    return (*words, "--security-opt writable-cgroups=true")
