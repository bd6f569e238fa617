"""What an administrator may set on a host, in one table, and what the host says of itself.

`SETTINGS` is the table: for each setting its name, what is wanted, what its lack costs, and how it
is set.  A setting that is a sysctl is set by a line of sysctl.d; a parameter of a module that is
loaded when it is needed, by a line of modprobe.d; any other one is a file below /sys, set by a line
of tmpfiles.d.  `look` reads them all, and the facts that decide whether a setting is good.

What is not here on purpose: forkd uses no inotify on a host, and its entries in the tables of
neighbours are permanent ones, which do not count against `gc_thresh3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.host.rlimits import USER_PROCESSES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path("/")

MAPPINGS_LEAST = 65_530
"""Mappings that a process must be able to have, the kernel's default.  A zygote has at most one for
each 2 MiB of its guest."""

OPEN_FILES_LEAST = 524_288
"""What systemd lets services ask for.  The daemon has a few for each sandbox."""

HALT_POLL_NS_MOST = 200_000
"""The kernel's default.  For so long a processor waits actively for a guest that has halted."""

PROCESSES_PER_MIB = 3
"""A dozen for each sandbox, and a sandbox for each 4 MiB of memory."""

_KIB_PER_MIB = 1024
_CHOSEN = re.compile(r"\[(\S+)]")
"""How the kernel marks the chosen one of several words."""

RELEASE_OF_NEVER = (6, 5)
"""First kernel whose `nx_huge_pages` may be `never`."""

RELEASE_OF_FAVORDYNMODS = (6, 0)
RELEASE_WITHOUT_WAIT = (6, 14)
"""From this kernel on KVM's recovery thread is a thread of the VMM, and no move between cgroups."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a host says of itself; a file that is not there is None, or has no entry.

    Attributes:
        release: The kernel's version.
        memory_mib: The host's memory.
        values: The settings of the table, by name.
        command_line: The words with which the kernel was booted.
        cpu_flags: The first processor's features.
        vulnerabilities: What the kernel does about each flaw of the processor.
        smt: Whether several threads share a core now.
        ksm: Whether the kernel merges equal pages.
        swaps: Where memory is swapped to, unless that is memory or encrypted.
        clocksource: What the host's clock counts.
        lsms: Security modules that are on.
        selinux_enforces: Whether SELinux is one, and not only logs.
        userns_restricted: Whether AppArmor takes the rights in user namespaces from programs
            without a profile.
        cgroup_options: How cgroup v2 is mounted.
        reserved_mib: Memory in huge pages that are reserved, which is nothing for forkd.
        lockdown: What the kernel keeps from root: `none`, `integrity` or `confidentiality`.
        appraises: Whether IMA is told to refuse programs without a signature.
        is_wsl: Whether this is Linux in Windows (WSL 2).
        loadable: Those modules of settings that are loaded when they are needed, and not parts of
            the kernel.
    """

    release: tuple[int, int] = (0, 0)
    memory_mib: int = 0
    values: Mapping[str, str] = field(default_factory=dict)
    command_line: tuple[str, ...] = ()
    cpu_flags: frozenset[str] = frozenset()
    vulnerabilities: Mapping[str, str] = field(default_factory=dict)
    smt: bool | None = None
    ksm: bool | None = None
    swaps: tuple[str, ...] = ()
    clocksource: str | None = None
    lsms: frozenset[str] | None = None
    selinux_enforces: bool = False
    userns_restricted: bool = False
    cgroup_options: frozenset[str] | None = None
    reserved_mib: int = 0
    lockdown: str | None = None
    appraises: bool = False
    is_wsl: bool = False
    loadable: frozenset[str] = frozenset()


def _always(_: Seen) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the kernel.

    Attributes:
        name: A sysctl's name, or the path of a file below /sys.
        wanted: What to set it to.
        loss: What a value that is not good costs.
        is_good: Whether a value is good as it is, on a host.
        applies: Whether the setting matters on a host.
    """

    name: str
    wanted: str
    loss: str
    is_good: Callable[[str, Seen], bool]
    applies: Callable[[Seen], bool] = _always

    @property
    def is_sysctl(self) -> bool:
        """Whether it is set by sysctl.d."""
        return not self.name.startswith("/")

    @property
    def short_name(self) -> str:
        """A sysctl's name, or the last part of a path."""
        return self.name.rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Where its value is, below the host's root."""
        return path_of(self.name)

    @property
    def module(self) -> str | None:
        """The module whose parameter it is; None if it is none."""
        parts = self.path.parts
        return parts[2] if parts[:2] == ("sys", "module") else None

    @property
    def command(self) -> str:
        """Return what sets it until the host restarts."""
        if self.is_sysctl:
            return f"sysctl -w {self.name}={self.wanted}"
        return f"echo {self.wanted} >{self.name}"

    @property
    def line(self) -> str:
        """Return what sets it at each start, in sysctl.d or tmpfiles.d."""
        if self.is_sysctl:
            return f"{self.name} = {self.wanted}"
        return f"w {self.name} - - - - {self.wanted}"

    @property
    def module_line(self) -> str:
        """Return what sets it whenever its module is loaded, in modprobe.d."""
        return f"options {self.module} {self.short_name}={self.wanted}"


def _at_least(least: int) -> Callable[[str, Seen], bool]:
    return lambda value, _: _number(value) >= least


def _enough_processes(value: str, host: Seen) -> bool:
    return _number(value) >= min(USER_PROCESSES_MAX, PROCESSES_PER_MIB * host.memory_mib)


def _never_is_safe(host: Seen) -> bool:
    safe = host.vulnerabilities.get("itlb_multihit") == "Not affected"
    return safe and RELEASE_OF_NEVER <= host.release < RELEASE_WITHOUT_WAIT


def _does_not_wait(value: str, host: Seen) -> bool:
    return value == "never" or "favordynmods" in (host.cgroup_options or ())


SETTINGS = (
    Setting(
        "vm.overcommit_memory",
        *("0", "each fork counts as its whole guest"),
        is_good=lambda value, _: value != "2",
    ),
    Setting(
        "vm.max_map_count",
        *("1048576", "large guests may not fit"),
        is_good=_at_least(MAPPINGS_LEAST),
    ),
    Setting(
        "kernel.threads-max",
        *("1000000", "fewer sandboxes than memory has room for"),
        is_good=_enough_processes,
    ),
    Setting(
        "kernel.pid_max",
        *("4194304", "fewer sandboxes than memory has room for"),
        is_good=_enough_processes,
    ),
    Setting(
        "fs.nr_open",
        *("1048576", "the daemon may run out of open files"),
        is_good=_at_least(OPEN_FILES_LEAST),
    ),
    Setting(
        "user.max_user_namespaces",
        *("65536", "no builds, branches or jails without root"),
        is_good=_at_least(1),
    ),
    Setting(
        "kernel.unprivileged_userns_clone",
        *("1", "no branches of branches"),
        is_good=_at_least(1),
    ),
    Setting(
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        *("advise", "a fork takes a fifth longer"),
        is_good=lambda value, _: value not in {"never", "deny"},
    ),
    Setting(
        "/sys/module/kvm/parameters/nx_huge_pages",
        *("never", "a fork waits for a thread that KVM makes"),
        is_good=_does_not_wait,
        applies=_never_is_safe,
    ),
    Setting(
        "/sys/module/kvm/parameters/halt_poll_ns",
        *(str(HALT_POLL_NS_MOST), "idle guests keep processors busy"),
        is_good=lambda value, _: _number(value) <= HALT_POLL_NS_MOST,
    ),
)
"""Every setting of the kernel that forkd advises on."""


def _number(value: str) -> int:
    try:
        return int(value)
    except ValueError:
        return 0


def path_of(name: str) -> Path:
    """Return where the value of a setting is, below the host's root."""
    if name.startswith("/"):
        return Path(name).relative_to("/")
    return Path("proc/sys", name.replace(".", "/"))


def wrong(host: Seen) -> tuple[Setting, ...]:
    """Return the settings that are there, matter, and are not good."""
    return tuple(
        each
        for each in SETTINGS
        if each.name in host.values
        and each.applies(host)
        and not each.is_good(host.values[each.name], host)
    )


def favordynmods(host: Seen) -> bool | None:
    """Whether cgroups are mounted so that forks do not wait for them.

    None where that makes no difference: another setting keeps forks from waiting, or the kernel.
    """
    nx = next(each for each in SETTINGS if each.short_name == "nx_huge_pages")
    waits = RELEASE_OF_FAVORDYNMODS <= host.release < RELEASE_WITHOUT_WAIT
    if host.cgroup_options is None or nx.applies(host) or not waits:
        return None
    return "favordynmods" in host.cgroup_options or host.values.get(nx.name) == "never"


# Effects


def look(root: Path = ROOT) -> Seen:
    """Return what a host says of itself, below its root.

    A file that is missing, or not ours to read, says nothing: that is no error.
    """
    text = _Texts(root)
    smt, ksm = text.of("sys/devices/system/cpu/smt/active"), text.of("sys/kernel/mm/ksm/run")
    lsms = text.of("sys/kernel/security/lsm")
    restricted = text.of("proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    return Seen(
        release=release(text.of("proc/sys/kernel/osrelease") or ""),
        memory_mib=_memory_mib(text.of("proc/meminfo") or ""),
        values=_values(text),
        command_line=tuple((text.of("proc/cmdline") or "").split()),
        cpu_flags=_flags(text.of("proc/cpuinfo") or ""),
        vulnerabilities=text.of_folder("sys/devices/system/cpu/vulnerabilities"),
        smt=None if smt is None else smt == "1",
        ksm=None if ksm is None else ksm == "1",
        swaps=_swaps(text),
        clocksource=text.of("sys/devices/system/clocksource/clocksource0/current_clocksource"),
        lsms=None if lsms is None else frozenset(lsms.split(",")),
        selinux_enforces=text.of("sys/fs/selinux/enforce") == "1",
        userns_restricted=restricted == "1",
        cgroup_options=_cgroup_options(text.of("proc/self/mounts") or ""),
        reserved_mib=reserved_mib(text.of("proc/meminfo") or ""),
        lockdown=text.of_choice(Path("sys/kernel/security/lockdown")),
        appraises=appraises(text.of("proc/cmdline") or ""),
        is_wsl="microsoft" in (text.of("proc/sys/kernel/osrelease") or "").lower(),
        loadable=_loadable(text),
    )


def value(name: str, root: Path = ROOT) -> str | None:
    """Return the value of a setting now, below a host's root; None if it cannot be read."""
    return _Texts(root).of_choice(path_of(name))


class _Texts:
    """Small files below a root."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, path: Path | str) -> str | None:
        """Return a file's text; None if it cannot be read."""
        try:
            return (self._root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def of_choice(self, path: Path) -> str | None:
        """Return a file's text, or the word in it that is marked as chosen."""
        found = self.of(path)
        chosen = _CHOSEN.search(found or "")
        return chosen[1] if chosen else found

    def of_folder(self, path: str) -> dict[str, str]:
        """Return the texts of a folder's files, by name; none if it cannot be read."""
        try:
            names = sorted(each.name for each in (self._root / path).iterdir())
        except OSError:
            return {}
        found = {name: self.of(f"{path}/{name}") for name in names}
        return {name: text for name, text in found.items() if text is not None}


def release(text: str) -> tuple[int, int]:
    """Return the first two numbers of a kernel's version; zeros if it has none."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _values(text: _Texts) -> dict[str, str]:
    found = {each.name: text.of_choice(each.path) for each in SETTINGS}
    return {name: value for name, value in found.items() if value is not None}


def _loadable(text: _Texts) -> frozenset[str]:
    modules = {each.module for each in SETTINGS if each.module is not None}
    return frozenset(each for each in modules if text.of(f"sys/module/{each}/initstate"))


def _memory_mib(meminfo: str) -> int:
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) // _KIB_PER_MIB if found else 0


def reserved_mib(meminfo: str) -> int:
    """Return the memory in huge pages that are reserved, by /proc/meminfo."""
    pages = re.search(r"^HugePages_Total:\s+(\d+)", meminfo, re.MULTILINE)
    size = re.search(r"^Hugepagesize:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(pages[1]) * int(size[1]) // _KIB_PER_MIB if pages and size else 0


def appraises(command_line: str) -> bool:
    """Whether a kernel that was booted so refuses programs without a signature (IMA).

    What a policy says that is loaded later is root's to read, and not seen.
    """
    policies = re.findall(r"\bima_policy=(\S+)", command_line)
    enforces = not re.search(r"\bima_appraise=(off|fix|log)\b", command_line)
    return enforces and any("appraise" in each or "secure_boot" in each for each in policies)


def _flags(cpuinfo: str) -> frozenset[str]:
    found = re.search(r"^flags\s*:(.*)", cpuinfo, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def _swaps(text: _Texts) -> tuple[str, ...]:
    """Return where memory is swapped to: neither memory (zram) nor an encrypted disk."""
    lines = (text.of("proc/swaps") or "").splitlines()[1:]
    names = [line.split()[0] for line in lines]
    return tuple(name for name in names if not _is_harmless(name.rpartition("/")[2], text))


def _is_harmless(device: str, text: _Texts) -> bool:
    kind = text.of(f"sys/block/{device}/dm/uuid") or ""
    return device.startswith("zram") or kind.startswith("CRYPT-")


def _cgroup_options(mounts: str) -> frozenset[str] | None:
    for line in mounts.splitlines():
        _, _, kind, options, *_ = line.split()
        if kind == "cgroup2":
            return frozenset(options.split(","))
    return None
