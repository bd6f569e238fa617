"""Judge how a host is set up: settings of the kernel, the processor's flaws, security modules.

A function of what was seen.  What does not apply to a host has no check; nothing here keeps
sandboxes from running, except a seccomp profile that hides `clone3` from who needs it.
Each line fits a terminal of 80 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forkd.checks import Check, Status
from forkd.host import tuning
from forkd.service.jail_trial import CONTAINER_PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forkd.host.tuning import Seen

NAMES_MAX = 3
"""Flaws of a processor, or places of swap, that are named in one line."""

LOST_BELOW = (
    ((5, 14), "pages of forks are copied one by one (5.14)"),
    ((5, 16), "clocks of processors are set one by one (5.16)"),
    ((6, 12), "jails without root keep no signals in (6.12)"),
)
"""What older kernels lack, by the first that has it."""

SETUP = "`sudo forkd host setup`"
"""What sets a host up, and can be taken back."""


def judge(
    host: Seen, *, needs_clone3: bool, hides_clone3: bool, is_jailed: bool, own_cores: bool
) -> list[Check]:
    """Return every check that applies.

    Args:
        host: What was seen.
        needs_clone3: Whether no sandbox would start without `clone3`: each is to have a cgroup.
        hides_clone3: Whether a seccomp profile refuses `clone3`.
        is_jailed: Whether a jail was tried, and works.
        own_cores: Whether each machine would have a core to itself while it runs on it.
    """
    found = [
        _clone3(hides=hides_clone3, needed=needs_clone3),
        _kernel(host),
        *_settings(host),
        _favordynmods(host),
        _swap(host),
        _merging(host),
        _huge_pages(host),
        _smt(host, own_cores=own_cores),
        _flaws(host),
        _split_locks(host),
        _clock(host),
        *_modules(host, is_jailed=is_jailed),
    ]
    return [each for each in found if each is not None]


def _clone3(*, hides: bool, needed: bool) -> Check:
    name = "clone3"
    if not hides:
        return Check(name, Status.PASS, "allowed")
    status = Status.FAIL if needed else Status.WARN
    found = "hidden, as by Docker's default profile: no forks with cgroups"
    return Check(name, status, found, f"--security-opt seccomp=unconfined; {CONTAINER_PAGE}")


def _kernel(host: Seen) -> Check:
    name, (major, minor) = "host kernel", host.release
    lost = [what for first, what in LOST_BELOW if host.release < first]
    if not lost:
        return Check(name, Status.PASS, f"{major}.{minor}")
    status = Status.WARN if host.release < LOST_BELOW[1][0] else Status.PASS
    return Check(name, status, f"{major}.{minor}; {lost[0]}", "Linux 6.12 has all that is used")


def _settings(host: Seen) -> Iterator[Check]:
    wrong = tuning.wrong(host)
    for each in tuning.SETTINGS:
        value = host.values.get(each.name)
        if value is None or not each.applies(host):
            continue
        if each in wrong:
            yield Check(each.short_name, Status.WARN, f"{value}; {each.loss}", each.command)
        else:
            yield Check(each.short_name, Status.PASS, value)


def _favordynmods(host: Seen) -> Check | None:
    """Judge how long KVM's thread takes into its cgroup, where `nx_huge_pages` must stay."""
    name, is_on = "favordynmods", tuning.favordynmods(host)
    if is_on is None:
        return None
    if is_on:
        return Check(name, Status.PASS, "forks do not wait for cgroups")
    nx = next(each for each in tuning.SETTINGS if each.short_name == "nx_huge_pages")
    return Check(name, Status.WARN, f"off; {nx.loss}", SETUP)


def _swap(host: Seen) -> Check:
    if not host.swaps:
        return Check("swap", Status.PASS, "none that is a disk in the clear")
    found = f"{_named(host.swaps)}; guests' memory may be written there"
    return Check("swap", Status.WARN, found, "swapoff -a, or encrypt it")


def _merging(host: Seen) -> Check | None:
    if host.ksm is None:
        return None
    found = "on, and machines take no part" if host.ksm else "off"
    return Check("merging of pages (KSM)", Status.PASS, found)


def _huge_pages(host: Seen) -> Check:
    name = "huge pages"
    if not host.reserved_mib:
        return Check(name, Status.PASS, "none reserved; forkd takes transparent ones")
    found = f"{host.reserved_mib} MiB reserved, which forkd cannot use"
    return Check(name, Status.WARN, found, "sysctl -w vm.nr_hugepages=0")


def _smt(host: Seen, *, own_cores: bool) -> Check | None:
    if host.smt is None:
        return None
    if not host.smt:
        return Check("SMT", Status.PASS, "off")
    if own_cores:
        return Check("SMT", Status.PASS, "on; no two sandboxes share a core at a time")
    found = "on; sandboxes that share a core can watch each other"
    return Check("SMT", Status.WARN, found, "echo off >/sys/devices/system/cpu/smt/control")


def _flaws(host: Seen) -> Check | None:
    if not host.vulnerabilities:
        return None
    open_ones = [name for name, text in host.vulnerabilities.items() if _is_open(text)]
    if not open_ones:
        return Check("processor's flaws", Status.PASS, "mitigated, or not there")
    advice = "update microcode and kernel; boot without mitigations=off"
    return Check("processor's flaws", Status.WARN, f"open: {_named(open_ones)}", advice)


def _is_open(text: str) -> bool:
    return text.startswith(("Vulnerable", "KVM: Vulnerable")) or "VMX: vulnerable" in text


def _split_locks(host: Seen) -> Check | None:
    if "split_lock_detect" not in host.cpu_flags:
        return None
    if "split_lock_detect=fatal" in host.command_line:
        found = "fatal; a guest that splits locks ends"
        return Check("split locks", Status.WARN, found, "boot with split_lock_detect=warn")
    return Check("split locks", Status.PASS, "not fatal")


def _clock(host: Seen) -> Check | None:
    if host.clocksource is None:
        return None
    if host.clocksource in {"tsc", "hyperv_clocksource_tsc_page"}:
        return Check("clocksource", Status.PASS, host.clocksource)
    found = f"{host.clocksource}; guests' clocks are slower, and less exact"
    advice = "boot with clocksource=tsc, if dmesg does not say why it is not used"
    return Check("clocksource", Status.WARN, found, advice)


def _modules(host: Seen, *, is_jailed: bool) -> Iterator[Check]:
    if host.lsms is not None and "landlock" in host.lsms:
        yield Check("Landlock", Status.PASS, "on")
    elif host.lsms is not None:
        others = ",".join(sorted(host.lsms - {"capability"}))
        advice = f"boot with lsm=landlock{',' if others else ''}{others}"
        yield Check("Landlock", Status.WARN, "off; jails have one wall less", advice)
    if host.lockdown not in {None, "none"}:
        yield Check("kernel lockdown", Status.PASS, f"{host.lockdown}; forkd needs nothing of it")
    if host.appraises:
        found = "appraises programs: it refuses forkd-vmm without a signature"
        yield Check("IMA", Status.WARN, found, "sign it: evmctl ima_sign")
    if host.is_wsl:
        found = "KVM needs nestedVirtualization=true in .wslconfig"
        yield Check("WSL 2", Status.PASS, found)
    if host.selinux_enforces:
        yield Check("SELinux", Status.PASS, "enforces; sandboxes have no label of their own")
    if host.userns_restricted and is_jailed:
        yield Check("AppArmor", Status.PASS, "user namespaces work")
    elif host.userns_restricted:
        found = "takes the rights in user namespaces from forkd-vmm"
        yield Check("AppArmor", Status.WARN, found, SETUP)


def _named(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return ", ".join(names[:NAMES_MAX]) + more
