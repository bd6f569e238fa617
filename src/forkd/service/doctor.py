"""Find out what a host can do, by trying, and say what to do about the rest.

`gather` looks and tries; `judge` is a function of what was found.  A *failed* check means that
sandboxes cannot run here in any way; a *warning* means that something is missing or slow, or that
`forkd up` has to go round by the helper machine; a *skipped* one could not be tried.

Whether KVM can run a stock guest is tried with a guest, by `forkd-vmm probe`: that /dev/kvm can be
opened says little, since a KVM of the PVM kind opens as well and then interprets every instruction.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd import programs
from forkd.cgroups import tree
from forkd.checks import DEBIAN_IMAGES, Check, Status
from forkd.errors import ForkdError, HostError
from forkd.host import (
    cgroupfs,
    disks,
    files,
    kvm,
    netlink,
    nftables,
    proc,
    process,
    refusals,
    tuning,
    userns,
)
from forkd.host.cells import python_paths
from forkd.host.rlimits import PRLIMIT, VMM
from forkd.images.kernel import newest_cached, series_of
from forkd.images.layout import Cache
from forkd.service import jail_trial, packages, processors, rootless, tuning_checks
from forkd.service.cells import Cells
from forkd.service.jail_trial import CONTAINER_PAGE
from forkd.service.setup import access, situation
from forkd.service.tuning_checks import SETUP

if TYPE_CHECKING:
    from pathlib import Path

    from forkd.engine.replies import CpuSeen
    from forkd.host.disks import FileSystem
    from forkd.host.tuning import Seen
    from forkd.service.jail import UidRange
    from forkd.service.setup.plan import Situation

PROBE_TIMEOUT_S = 5.0
"""Time a guest of a few instructions has; it takes milliseconds, and for ever under a bad KVM."""

CELL_TIMEOUT_S = 30.0
"""Time in which our Python starts in a cell, on a slow disk."""

_IN_A_CELL = (
    *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--net", "--"),
    *(sys.executable, "-P", "-c", "import forkd.images.plan"),
)
"""What a build does first: it makes namespaces in its cell, and loads what makes images."""

MEMORY_GOOD_MIB, MEMORY_LEAST_MIB = 4096, 1024
"""Memory for a hundred sandboxes in the helper machine; for a few."""

DISK_GOOD_MIB, DISK_LEAST_MIB = 10_240, 3072
"""Space for several images and snapshots; for one of each, while it is built."""

CONTROLLERS = ("cpu", "memory", "pids")

BUILDERS = ("mmdebstrap", "mke2fs", "depmod")
OCI_TOOLS = ("mke2fs", "depmod")
X86_64_V3 = frozenset(
    (
        "abm",
        "avx",
        "avx2",
        "bmi1",
        "bmi2",
        "cx16",
        "f16c",
        "fma",
        "lahf_lm",
        "movbe",
        "popcnt",
        "sse4_1",
        "sse4_2",
        "ssse3",
        "xsave",
    )
)
"""What a processor of that level has, beside what all have."""

QEMU = "qemu-system-x86_64"

IN_MEMORY, LAYERED = ("tmpfs", "ramfs"), ("overlay", "aufs")
SHARING = ("btrfs", "xfs", "bcachefs")
REMOTE = ("nfs", "cifs", "smb", "9p", "ceph", "fuse", "virtiofs")
"""Kinds of file systems: in memory; of containers; that share blocks; whose names begin so."""

ELSEWHERE = "put FORKD_STATE_DIR on a local disk"

HELPER_TOOLS = (QEMU, "busybox", "depmod")
"""What the helper machine needs: what runs it, its first programs, the tables of its modules."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Places:
    """Where the daemon would keep things."""

    state_dir: Path
    cache_dir: Path
    uids: UidRange | None = None
    build_uids: UidRange | None = None
    rootless_jail: bool = False
    own_cores: bool = True
    cgroups: bool = True


@dataclass(frozen=True, slots=True)
class Probe:
    """What `forkd-vmm probe` said: whether a stock guest ran, or why not."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class JailTried:
    """What came of a process that was jailed: whether it could be, or why not.

    Attributes:
        ok: Whether it could.
        reason: Why not.
        rootless: Whether it was the jail of a daemon that is not root.
        keeps_signals: Whether signals stay in that.
    """

    ok: bool
    reason: str
    rootless: bool = False
    keeps_signals: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """A host, as far as forkd cares."""

    system: str
    architecture: str
    is_root: bool
    cpu_model: str
    kvm_exists: bool
    kvm_opens: bool
    kvm_nests: bool
    is_pvm: bool
    probe: Probe | None
    processor: CpuSeen | None
    jail: JailTried | None
    cell: JailTried | None
    controllers: frozenset[str]
    has_delegated_cgroup: bool
    makes_cgroups: bool
    makes_taps: bool
    filters_packets: bool
    installed: frozenset[str]
    package_manager: str | None
    missing_programs: tuple[str, ...]
    cached_kernel: str | None
    memory_available_mib: int
    state_free_mib: int
    cache_free_mib: int
    seen: Seen
    situation: Situation
    state_disk: FileSystem
    hides_clone3: bool = False
    own_cores: bool = False
    wants_cgroups: bool = True


def examine(places: Places) -> list[Check]:
    """Look at this host and judge it."""
    return judge(gather(places))


# Effects


def gather(places: Places) -> Facts:
    """Look at this host, and try what can only be known by trying."""
    seen, delegated = tuning.look(), tree.delegated()
    return Facts(
        system=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        is_root=proc.is_root(),
        cpu_model=proc.cpu().model,
        kvm_exists=kvm.exists(),
        kvm_opens=kvm.is_usable(),
        kvm_nests=kvm.nests(),
        is_pvm=kvm.is_pvm(),
        probe=_probe(),
        processor=_processor(),
        jail=_try_rootless() if places.rootless_jail else _try_jail(places.uids),
        cell=_try_cell(places.uids, places.build_uids),
        controllers=cgroupfs.controllers(delegated or cgroupfs.CGROUP_ROOT),
        has_delegated_cgroup=delegated is not None,
        makes_cgroups=cgroupfs.is_ours(delegated or cgroupfs.CGROUP_ROOT),
        makes_taps=netlink.can_make_taps(),
        filters_packets=nftables.is_available(),
        installed=frozenset(
            filter(process.installed, (*BUILDERS, *OCI_TOOLS, *HELPER_TOOLS, PRLIMIT))
        ),
        package_manager=packages.manager(process.installed),
        missing_programs=tuple(filter(_is_missing, (programs.VMM, programs.AGENT))),
        cached_kernel=_cached_kernel(places.cache_dir),
        memory_available_mib=proc.memory_bytes()[1] // MIB,
        state_free_mib=files.free_bytes(places.state_dir) // MIB,
        cache_free_mib=files.free_bytes(places.cache_dir) // MIB,
        seen=seen,
        situation=situation.look(tuning.ROOT, situation.default_user(), seen),
        state_disk=disks.file_system(places.state_dir),
        hides_clone3=refusals.hides_clone3(),
        own_cores=places.own_cores and refusals.schedules_cores(),
        wants_cgroups=places.cgroups,
    )


def _probe() -> Probe | None:
    """Let the VMM try a guest; None if that cannot be tried."""
    if not kvm.is_usable() or _is_missing(programs.VMM):
        return None
    try:
        probe = (programs.find(programs.VMM), "probe")
        done = process.run(probe, timeout_s=PROBE_TIMEOUT_S, limits=VMM)
        said = json.loads(done.stdout)
        return Probe(bool(said["ok"]), str(said.get("reason") or ""))
    except ForkdError as error:
        return Probe(ok=False, reason=str(error).splitlines()[0])
    except (ValueError, LookupError, TypeError) as error:
        return Probe(ok=False, reason=f"the probe's answer makes no sense: {error}")


def _processor() -> CpuSeen | None:
    """Ask the VMM what guests are shown; None if it cannot say."""
    try:
        return processors.offered() if kvm.is_usable() else None
    except ForkdError:
        return None


def _try_siblings(uids: UidRange) -> None:
    """Make what siblings of a branch become users of their own in.

    Raises:
        HostError: It cannot be made.
    """
    users = ((uids.siblings_first, uids.block),)
    vmm = programs.find(programs.VMM)
    namespace = userns.make(vmm, proc.own_pid(), uids.first + 1, users)
    if namespace is not None:
        files.close(namespace)


def _try_jail(uids: UidRange | None) -> JailTried | None:
    """Have the VMM jail itself; None if there is to be no jail, or it cannot be tried."""
    if uids is None or _is_missing(programs.VMM):
        return None
    try:
        uids.check()
        jail_trial.try_out(programs.find(programs.VMM), uids)
        _try_siblings(uids)
    except ForkdError as error:
        return JailTried(ok=False, reason=str(error).splitlines()[0])
    return JailTried(ok=True, reason="")


def _try_rootless() -> JailTried | None:
    """Have the VMM jail itself as an ordinary user; None if that cannot be tried."""
    if _is_missing(programs.VMM):
        return None
    try:
        tried = rootless.try_out(programs.find(programs.VMM))
    except ForkdError as error:
        return JailTried(ok=False, reason=str(error), rootless=True)
    return JailTried(ok=True, reason="", rootless=True, keeps_signals=tried.keeps_signals)


def _try_cell(uids: UidRange | None, build_uids: UidRange | None) -> JailTried | None:
    """Start what builds images in a cell of its own; None as for `_try_jail`."""
    if build_uids is None or _is_missing(programs.VMM):
        return None
    cells = Cells(programs.find(programs.VMM), build_uids, uids, None)
    try:
        cells.check()
        with cells.build() as cell:
            command = cell.command(_IN_A_CELL, read=python_paths(), network=True)
            process.run(command, timeout_s=CELL_TIMEOUT_S)
    except HostError as error:
        return JailTried(ok=False, reason=jail_trial.reason(error))
    except ForkdError as error:
        return JailTried(ok=False, reason=str(error).splitlines()[-1])
    return JailTried(ok=True, reason="")


def _is_missing(program: str) -> bool:
    try:
        programs.find(program)
    except HostError:
        return True
    return False


def _cached_kernel(folder: Path) -> str | None:
    if not files.is_folder(folder / "kernels"):
        return None
    found = newest_cached(Cache(folder), series_of("debian"))
    return None if found is None else found.version


# Judgement


def judge(facts: Facts) -> list[Check]:
    """Return every check, most fundamental first."""
    return [
        _platform(facts),
        _programs(facts),
        _limits(facts),
        _native(facts),
        _shown(facts),
        _helper(facts),
        _root(facts),
        _jail(facts),
        _cells(facts),
        _cgroups(facts),
        _taps(facts),
        _tools(DEBIAN_IMAGES, BUILDERS, facts),
        _tools("images from OCI", OCI_TOOLS, facts),
        _kernel(facts),
        _amount("memory", facts.memory_available_mib, MEMORY_GOOD_MIB, MEMORY_LEAST_MIB),
        _amount("disk for snapshots", facts.state_free_mib, DISK_GOOD_MIB, DISK_LEAST_MIB),
        _state_disk(facts.state_disk),
        _amount("disk for images", facts.cache_free_mib, DISK_GOOD_MIB, DISK_LEAST_MIB),
        *access.judge(facts.situation),
        *tuning_checks.judge(
            facts.seen,
            needs_clone3=facts.is_root and facts.wants_cgroups,
            hides_clone3=facts.hides_clone3,
            is_jailed=facts.jail is not None and facts.jail.ok,
            own_cores=facts.own_cores,
        ),
    ]


def _platform(facts: Facts) -> Check:
    found = f"{facts.system} on {facts.architecture}, {facts.cpu_model}"
    if facts.system.startswith("Linux") and facts.architecture == "x86_64":
        return Check("platform", Status.PASS, found)
    return Check("platform", Status.FAIL, found, "forkd runs on Linux on x86_64 only")


def _programs(facts: Facts) -> Check:
    if not facts.missing_programs:
        return Check("programs", Status.PASS, f"{programs.VMM} and {programs.AGENT} are here")
    missing = " and ".join(facts.missing_programs)
    advice = "install the wheel for Linux on x86_64, which has them; or `make build` in a checkout"
    return Check("programs", Status.FAIL, f"{missing} not found", advice)


def _limits(facts: Facts) -> Check:
    name = "process limits"
    if PRLIMIT in facts.installed:
        return Check(name, Status.PASS, f"{PRLIMIT} is installed")
    missing = f"{PRLIMIT} is not installed, and nothing is started without limits"
    return Check(name, Status.FAIL, missing, packages.advice([PRLIMIT], facts.package_manager))


def _native(facts: Facts) -> Check:
    """Whether machines can run on this host itself."""
    name, around = "KVM", "`forkd up` uses the helper machine"
    if not facts.kvm_exists:
        advice = f"{around}; for KVM, enable virtualisation in the firmware"
        return Check(name, Status.WARN, "/dev/kvm is missing", advice)
    if not facts.kvm_opens:
        join = "" if facts.is_pvm else f"; {SETUP} opens it, after a new login"
        return Check(name, Status.WARN, "/dev/kvm is closed to you", f"{around}{join}")
    if facts.probe is not None and not facts.probe.ok:
        return Check(name, Status.WARN, f"a test guest does not run: {facts.probe.reason}", around)
    if facts.is_pvm:
        return Check(
            name,
            Status.WARN,
            "this KVM is PVM, which emulates guests: slow",
            around,
        )
    if facts.probe is None:
        return Check(name, Status.SKIP, "it opens, but no guest could be tried", "`make build`")
    return Check(name, Status.PASS, "a test guest runs")


def _shown(facts: Facts) -> Check:
    """Say what guests are shown of the processor, which snapshots of them need."""
    name, seen = "processor of guests", facts.processor
    if seen is None:
        return Check(name, Status.SKIP, "not known without KVM")
    known = set(seen.features)
    level = "x86-64-v3" if known.issuperset(X86_64_V3) else "less than x86-64-v3"
    if "avx512f" in known:
        level = f"{level} and AVX-512"
    found = (
        f"{seen.model}: {level}, {len(known)} features, {seen.physical_bits} address bits, "
        f"TSC of {seen.tsc_khz / 1000:.0f} MHz"
    )
    return Check(name, Status.PASS, found)


def _helper(facts: Facts) -> Check:
    """Whether the helper machine could stand in."""
    name = "helper machine"
    missing = [each for each in HELPER_TOOLS if each not in facts.installed]
    if not missing:
        with_kvm = facts.kvm_opens and facts.kvm_nests and not facts.is_pvm
        how = "uses KVM" if with_kvm else "emulates a processor, which is slow"
        return Check(name, Status.PASS, f"{QEMU} is installed and {how}")
    jailed = facts.is_root or (facts.jail is not None and facts.jail.ok)
    needed = _native(facts).status is not Status.PASS or not jailed
    status = Status.FAIL if needed else Status.SKIP
    advice = packages.advice(missing, facts.package_manager)
    return Check(name, status, f"{', '.join(missing)} not installed", advice)


def _root(facts: Facts) -> Check:
    if facts.is_root:
        return Check("privileges", Status.PASS, "root")
    advice = "`sudo forkd up` gives sandboxes a network, limits, and a user each"
    return Check("privileges", Status.WARN, "not root", advice)


def _jail(facts: Facts) -> Check:
    name = "jail"
    around = "--privileged, in a container; FORKD_JAIL=off goes without, as the daemon's user"
    if facts.jail is None:
        missing = "none: machines run as the daemon's user, and see what it sees"
        return Check(name, Status.WARN, missing, "FORKD_JAIL=on jails them")
    if facts.jail.rootless:
        return _rootless_jail(facts.jail)
    if not facts.jail.ok:
        return Check(name, Status.FAIL, facts.jail.reason, around)
    return Check(name, Status.PASS, "users, rights and namespaces of their own for machines")


def _rootless_jail(jail: JailTried) -> Check:
    """Judge what machines of an ordinary user have, who may also use the helper machine."""
    if not jail.ok:
        around = "`forkd up` uses the helper machine; a daemon here needs FORKD_JAIL=off"
        return Check("jail", Status.WARN, jail.reason, around)
    missing = ["users of their own", "a /proc of their own"]
    if not jail.keeps_signals:
        missing.append("signals that stay in it (Landlock of Linux 6.12)")
    return Check(
        "jail",
        Status.WARN,
        "files, network and namespaces of their own for machines, without any right; missing: "
        f"{', '.join(missing)}",
        "a daemon that is root gives each sandbox a user and machines a /proc of their own",
    )


def _cells(facts: Facts) -> Check:
    name = "cells of builds and packs"
    if facts.cell is None:
        missing = "none: builds of images, and packs, have what the daemon's user has"
        return Check(name, Status.WARN, missing, "a daemon that is root has them (FORKD_JAIL)")
    if not facts.cell.ok:
        advice = (
            "a kernel from 5.12 on, user namespaces, and our Python in folders that every user "
            "may read; FORKD_JAIL=off goes without"
        )
        return Check(name, Status.FAIL, facts.cell.reason, advice)
    return Check(name, Status.PASS, "user namespaces, and namespaces within them")


def _cgroups(facts: Facts) -> Check:
    if not facts.wants_cgroups:
        advice = "FORKD_CGROUPS=on gives each sandbox its own"
        return Check(
            "cgroup v2", Status.WARN, "off (FORKD_CGROUPS): sandboxes have no limits", advice
        )
    missing = [each for each in CONTROLLERS if each not in facts.controllers]
    if missing:
        return Check(
            "cgroup v2",
            Status.WARN,
            f"controllers missing: {', '.join(missing)}",
            "boot with systemd.unified_cgroup_hierarchy=1; or set FORKD_CGROUPS=off, so that "
            "root's daemon starts, with sandboxes that have no limits",
        )
    if facts.is_root and not facts.makes_cgroups:
        return Check(
            "cgroup v2",
            Status.WARN,
            "read-only, as in a container without privileges: root's daemon does not start",
            f"--privileged; or FORKD_CGROUPS=off, without limits; {CONTAINER_PAGE}",
        )
    if facts.is_root or facts.has_delegated_cgroup:
        return Check("cgroup v2", Status.PASS, f"controllers {', '.join(CONTROLLERS)}")
    return Check(
        "cgroup v2",
        Status.WARN,
        "none is delegated to you here: sandboxes of a daemon that is not root have no limits",
        "start it by `systemctl --user start forkd`, with packaging/forkd-user.service as its unit",
    )


def _taps(facts: Facts) -> Check:
    if facts.makes_taps and facts.filters_packets:
        return Check("network", Status.PASS, "taps can be made, and packets filtered")
    if facts.makes_taps:
        install = packages.advice([nftables.LIBRARY], facts.package_manager)
        advice = f"forks with a network will be refused; {install}"
        return Check("network", Status.WARN, f"{nftables.LIBRARY} is missing", advice)
    advice = "forks with a network will be refused; `modprobe tun`, as root"
    return Check("network", Status.WARN, "/dev/net/tun is missing or closed to you", advice)


def _tools(name: str, needed: tuple[str, ...], facts: Facts) -> Check:
    missing = [each for each in needed if each not in facts.installed]
    if not missing:
        return Check(name, Status.PASS, f"{', '.join(needed)} installed")
    advice = packages.advice(missing, facts.package_manager)
    return Check(name, Status.WARN, f"{', '.join(missing)} missing", advice)


def _kernel(facts: Facts) -> Check:
    if facts.cached_kernel is not None:
        return Check("guest kernel", Status.PASS, facts.cached_kernel)
    return Check("guest kernel", Status.WARN, "none fetched yet", "the first build fetches it")


def _amount(name: str, mib: int, good: int, least: int) -> Check:
    found = f"{mib} MiB free"
    if mib >= good:
        return Check(name, Status.PASS, found)
    status = Status.WARN if mib >= least else Status.FAIL
    return Check(name, status, found, f"{good} MiB are good, {least} MiB the least")


def _state_disk(found: FileSystem) -> Check:
    """Judge the disk of the state folder by what is on it: snapshots, images, tops of disks."""
    name = "disk of the state folder"
    if found.kind in IN_MEMORY:
        what = f"{found.kind}: it takes memory, and a restart of the host empties it"
        return Check(name, Status.WARN, what, ELSEWHERE)
    if found.kind in LAYERED:
        what = f"{found.kind}: it goes with its container, and copies what is written"
        return Check(name, Status.WARN, what, f"mount a volume there; or {ELSEWHERE}")
    if found.kind.startswith(REMOTE):
        return Check(name, Status.WARN, f"{found.kind}, over a network: slow", ELSEWHERE)
    if found.rotates:
        what = f"{found.kind} on a disk that rotates: bakes and first forks are slow"
        return Check(name, Status.WARN, what, "put FORKD_STATE_DIR on an SSD")
    shares = "shares blocks of copies" if found.kind in SHARING else "copies disks as a whole"
    return Check(name, Status.PASS, f"{found.kind}; {shares}")
