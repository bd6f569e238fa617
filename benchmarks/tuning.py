"""What settings of the host and of KVM are worth to a fork: the part `host`.

One snapshot is forked under each setting in turn, again and again, in one machine: one fork, many
times, and a hundred at once.  Between turns the cgroups are mounted anew and a zygote is started:
this is for a machine of the run's own, never for a host that others use.  `kvm.nx_huge_pages=never`
cannot be taken back, so a machine without it is booted first, and then one with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import bed, withheld
from benchmarks.harness import Json, guest_faults, median, quantile
from forkd.errors import EngineError, HostError
from forkd.host import process

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.teller import Teller

WIDTH = 100
"""Children of the wide fork."""

MODULES = Path("/sys/module")
CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/mounts")
COMMAND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """How the host is set, and what KVM offers.

    Attributes:
        favordynmods: Whether cgroups are mounted so that moving a thread waits for nobody.
        never: Whether `kvm.nx_huge_pages` is `never`, so that KVM makes no thread for a machine.
        prefault: Whether a child may ask KVM to map the pages that it has copied.
    """

    favordynmods: bool = False
    never: bool = False
    prefault: bool = False


SETTINGS = {
    "plain": Setting(),
    "favordynmods": Setting(favordynmods=True),
    "prefault": Setting(prefault=True),
    "favordynmods_prefault": Setting(favordynmods=True, prefault=True),
    "never": Setting(never=True),
    "never_prefault": Setting(never=True, prefault=True),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How often each setting has its turn, and how many single forks a turn has."""

    rounds: int
    singles: int

    def steps(self) -> int:
        """How many steps are told of."""
        return self.rounds * len(here())


FULL = Plan(rounds=5, singles=7)
QUICK = Plan(rounds=2, singles=3)


@dataclass(slots=True)
class Samples:
    """What was measured under one setting."""

    one_ms: list[float] = field(default_factory=list)
    hundred_ms: list[float] = field(default_factory=list)
    slowest_ms: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    mappings: list[int] = field(default_factory=list)
    stages: dict[str, list[float]] = field(default_factory=dict)

    def figures(self) -> Json:
        """Return what is kept: medians, and between what half of the samples are."""
        return {
            "one_ms": spread(self.one_ms),
            "hundred_ms": spread(self.hundred_ms),
            "slowest_tenth_ms": spread(self.slowest_ms),
            "stages_ms": {name: median(times) for name, times in self.stages.items()},
            "guest_faults": median(self.faults) if self.faults else None,
            "mappings": median(self.mappings),
        }


async def measure(baked: bed.Baked, teller: Teller, *, quick: bool) -> Json:
    """Fork under each setting in turn; return the figures of each.

    Raises:
        HostError: The machine cannot be set so.
        ForkdError: A child did not become ready.
    """
    plan = QUICK if quick else FULL
    offered = is_offered(withheld.PRE_FAULT_MEMORY)
    settings = {name: each for name, each in here().items() if offered or not each.prefault}
    samples = {name: Samples() for name in settings}
    programs = {
        hidden: withholding(baked.settings.vmm, baked.settings.run_dir, hidden)
        for hidden in (withheld.PRE_FAULT_MEMORY, withheld.NOTHING)
    }
    with restored():
        for number in range(1, plan.rounds + 1):
            # The other way round each second time: what drifts meets all alike.
            names = list(settings) if number % 2 else list(reversed(settings))
            for name in names:
                teller.begin(f"forks with the setting {name}, round {number} of {plan.rounds}")
                setting = settings[name]
                apply(setting)
                hidden = withheld.NOTHING if setting.prefault else withheld.PRE_FAULT_MEMORY
                host = replace(baked.settings, vmm=programs[hidden])
                turn = Turn(replace(baked, settings=host), plan.singles, samples[name])
                await teller.patiently(turn.take)
    return {
        "host": {
            "width": WIDTH,
            "rounds": plan.rounds,
            "singles": plan.rounds * plan.singles,
            "prefault_offered": offered,
            "settings": {name: each.figures() for name, each in samples.items()},
        }
    }


@dataclass(frozen=True, slots=True)
class Turn:
    """Forks under one setting, by a zygote of their own."""

    baked: bed.Baked
    singles: int
    samples: Samples

    async def take(self) -> None:
        """Fork one and one, then a hundred; keep the times once all have been ready.

        Raises:
            EngineError: A child failed.
        """
        taken = Samples()
        async with bed.zygote(self.baked) as zygote:
            async with zygote.fork(1):
                pass  # from the first one the zygote learns
            for _ in range(self.singles):
                async with zygote.fork(1) as herd:
                    (child,) = herd.children
                    taken.one_ms.append(child.ready_ms)
                    taken.mappings.append(mappings(child.pid))
                    if (faults := guest_faults(child.pid)) is not None:
                        taken.faults.append(faults)
                    for name in ("clone", "build", "resume", "agent"):
                        taken.stages.setdefault(name, []).append(getattr(child.times, name))
            async with zygote.fork(WIDTH) as herd:
                taken.hundred_ms.append(herd.answered_ms)
                times = [child.times.total for child in herd.children]
                taken.slowest_ms.append(quantile(times, 90))
        kept = self.samples
        for name in ("one_ms", "hundred_ms", "slowest_ms", "faults", "mappings"):
            getattr(kept, name).extend(getattr(taken, name))
        for name, stage_ms in taken.stages.items():
            kept.stages.setdefault(name, []).extend(stage_ms)


def spread(samples_ms: list[float]) -> Json:
    """Return the median, and the quarters below and above it."""
    return {
        "p25": quantile(samples_ms, 25),
        "p50": quantile(samples_ms, 50),
        "p75": quantile(samples_ms, 75),
        "count": len(samples_ms),
    }


def mappings(pid: int) -> int:
    """Return how many mappings a process has."""
    return len(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines())


def is_offered(extension: int) -> bool:
    """Return whether KVM has an extension."""
    device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(device, withheld.KVM_CHECK_EXTENSION, extension) > 0
    finally:
        os.close(device)


def withholding(program: Path, folder: Path, extension: int) -> Path:
    """Write a program to `folder` that is another one from which KVM hides an extension."""
    made = folder / f"without-{extension}"
    command = [sys.executable, "-S", withheld.__file__, str(extension), str(program)]
    made.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
    made.chmod(0o700)
    return made


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Have cgroups after the block as they were before."""
    before = Setting(favordynmods=is_favoring())
    try:
        yield
    finally:
        apply(before)


def here() -> dict[str, Setting]:
    """Return the settings that this machine can have, by their names."""
    never = nx_huge_pages() == "never"
    return {name: each for name, each in SETTINGS.items() if each.never == never}


def apply(setting: Setting) -> None:
    """Mount cgroups as a setting says.

    Raises:
        HostError: It cannot be set so.
    """
    if is_favoring() != setting.favordynmods:
        # The source is named, so that mount(8) adds no option that there is already.
        others = [option for option in mount_options() if option != "favordynmods"]
        words = ["remount", *others, *(["favordynmods"] if setting.favordynmods else [])]
        run("mount", "-t", "cgroup2", "-o", ",".join(words), "cgroup2", str(CGROUPS))
        if is_favoring() != setting.favordynmods:
            raise HostError(f"the kernel does not change favordynmods of {CGROUPS}")


def is_favoring() -> bool:
    """Return whether cgroups are mounted with `favordynmods`."""
    return "favordynmods" in mount_options()


def mount_options() -> list[str]:
    """Return how cgroups are mounted."""
    lines = MOUNTS.read_text(encoding="utf-8").splitlines()
    mounted = next(line.split() for line in lines if f" {CGROUPS} " in line)
    return mounted[3].split(",")


def nx_huge_pages() -> str:
    """Return how KVM keeps huge pages from being executed; nothing where there is no KVM."""
    try:
        return (MODULES / "kvm/parameters/nx_huge_pages").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def run(*command: str) -> None:
    """Run a program that must succeed.

    Raises:
        HostError: It did not.
    """
    process.run(command, timeout_s=COMMAND_TIMEOUT_S)


def joined(plain: Json, tuned: Json) -> Json:
    """Return the figures of two machines as those of one run."""
    settings = plain["host"]["settings"] | tuned["host"]["settings"]
    repeated = plain["rounds_repeated"] + tuned["rounds_repeated"]
    return {**plain, "rounds_repeated": repeated, "host": {**plain["host"], "settings": settings}}


def publish(bench: Json, path: Path) -> None:
    """Write the figures of a run to the file that a page of the documentation is made of.

    Raises:
        EngineError: The run is of a kernel without one of the settings.
    """
    if not bench["host"]["prefault_offered"]:
        raise EngineError("KVM had no KVM_PRE_FAULT_MEMORY: measure with FORKD_MACHINE_KERNEL=6.12")
    machine = bench["machine"]
    kept = {
        "cpus": machine["cpus"],
        "kernel": machine["kernel"],
        "place": machine["place"],
        "started_at": bench["started_at"],
        "host": bench["host"],
    }
    path.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", encoding="utf-8")
