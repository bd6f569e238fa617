"""Say what QEMU is to run, as a pure function of the machine's configuration.

Two choices carry the rest.  The processor is AMD's with nested paging, because
that is the virtualisation that QEMU can emulate; with `-accel kvm` it is the
host's.  Nothing is added by default (`-nodefaults`): each device here has a use.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from forkd.machine.accel import Accel
from forkd.machine.door import MONITOR
from forkd.machine.executor import PORT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from forkd.machine.config import MachineConfig

ROOT_FOLDER = "root"
"""The machine's root, in the state folder."""

P9_MSIZE_BYTES = 524288
"""Largest 9p message; what virtio's ring of 128 pages carries with room."""

CMDLINE = (
    "console=ttyS0 quiet loglevel=5 panic=-1 tsc=reliable clocksource=tsc no_timer_check "
    "mitigations=off random.trust_cpu=on"
)
"""The kernel's command line.

`tsc`: QEMU's time-stamp counter is the host's, but the kernel cannot calibrate
its trust in it under emulation, and without it KVM inside has no stable clock.
`mitigations`: an emulated processor does not speculate; ours runs only what the
person who started it runs.
"""

CACHED = "trans=virtio,version=9p2000.L,access=any,cache=loose"
CHANGING = "trans=virtio,version=9p2000.L,access=any,cache=none"


MODULES = (
    "kvm_amd", "kvm_intel", "tun", "veth", "bridge", "dummy", "nf_tables", "nft_chain_nat",
    "nft_masq", "nft_ct", "nft_limit", "loop", "vhost_vsock",
)  # fmt: skip
"""Loaded before the executor starts: in a machine without udev no other does."""

SYSCTLS = (
    "vm/overcommit_memory=1", "vm/max_map_count=1048576", "kernel/pid_max=4194304",
    "kernel/threads-max=1000000", "fs/inotify/max_user_instances=8192",
    "net/ipv4/neigh/default/gc_thresh3=16384",
    "kernel/printk=7", "kernel/watchdog_thresh=30", "kernel/softlockup_panic=1",
)  # fmt: skip
"""What a thousand sandboxes need, by path under /proc/sys.

The last line ends a machine whose processor has been stuck for a minute, with
the reason on its console: its clients get an error instead of waiting for ever.
"""


def command(config: MachineConfig, *, executor_port: int, ready_fd: int) -> list[str]:
    """Return QEMU's command line; it runs in the state directory.

    Args:
        config: The machine.
        executor_port: Port of the host's loopback that leads to the executor.
        ready_fd: Inherited socket on which the machine says that it is ready.
    """
    forwards = [(executor_port, PORT), *((f.host_port, f.guest_port) for f in config.forwards)]
    rules = "".join(f",hostfwd=tcp:127.0.0.1:{host}-:{guest}" for host, guest in forwards)
    return [
        config.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-daemonize", "-pidfile", "qemu.pid", "-qmp", f"unix:{MONITOR},server=on,wait=off",
        "-machine", "q35,usb=off,vmport=off",
        *_processor(config.accel),
        "-smp", str(config.cpu_count), "-m", f"{config.memory_mib}M",
        "-kernel", str(config.kernel), "-initrd", "initramfs", "-append", _cmdline(config),
        "-chardev", "file,id=console,path=console.log,append=on", "-serial", "chardev:console",
        "-chardev", f"socket,id=ready,fd={ready_fd}", "-serial", "chardev:ready",
        "-netdev", f"user,id=net,ipv6=off{rules}",
        "-device", "virtio-net-pci,netdev=net,romfile=",
        "-object", "rng-random,id=entropy,filename=/dev/urandom",
        "-device", "virtio-rng-pci,rng=entropy",
        "-drive", "file=state.img,if=none,id=state,format=raw,discard=unmap,cache=writeback",
        "-device", "virtio-blk-pci,drive=state",
        *_folders(config),
    ]  # fmt: skip


def _cmdline(config: MachineConfig) -> str:
    words = [CMDLINE]
    if config.accel is Accel.TCG and config.counter_khz is not None:
        words.append(f"tsc_early_khz={config.counter_khz}")
    if config.possible_cpus is not None:
        words.append(f"possible_cpus={config.possible_cpus}")
    return " ".join(words)


def _processor(accel: Accel) -> list[str]:
    if accel is Accel.KVM:
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi", "-cpu", "EPYC-v3,+svm,+npt"]


def _folders(config: MachineConfig) -> Iterator[str]:
    root = "/" if config.whole_host else ROOT_FOLDER
    folders = [("root", root, False), ("modules", str(config.modules), False)]
    folders += [(system_tag(n), str(path), False) for n, path in enumerate(config.system)]
    folders += [(tag(n), str(s.source), s.writable) for n, s in enumerate(config.shares)]
    for name, path, writable in folders:
        yield "-fsdev"
        yield (
            f"local,id={name},path={_escape(path)},security_model=none,multidevs=remap,"
            f"readonly={'off' if writable else 'on'}"
        )
        yield "-device"
        yield f"virtio-9p-pci,fsdev={name},mount_tag={name}"


def _escape(path: str) -> str:
    return path.replace(",", ",,")


def tag(number: int) -> str:
    """Return the mount tag of a share."""
    return f"share{number}"


def system_tag(number: int) -> str:
    """Return the mount tag of a folder of the host's programs."""
    return f"system{number}"


def system_table(config: MachineConfig) -> str:
    """Return the lines from which init.sh mounts the host's programs."""
    return "".join(f"{system_tag(n)}\t{path}\n" for n, path in enumerate(config.system))


def shares_table(config: MachineConfig) -> str:
    """Return the lines from which second.sh mounts the shares."""
    return "".join(
        f"{tag(number)}\t{mount_options(changing=share.changing)}"
        f"{'' if share.writable else ',ro'}\t{share.layer or '-'}\t{share.target}\n"
        for number, share in enumerate(config.shares)
    )


def mount_options(*, changing: bool) -> str:
    """Return how a shared folder is mounted inside."""
    return f"{CHANGING if changing else CACHED},msize={P9_MSIZE_BYTES}"


def settings(config: MachineConfig, *, python: Path, executor: Path) -> str:
    """Return `machine.conf`, which both stages of init read.

    `python` is a virtual environment's program and `executor` a file in our source folder.  Both
    folders stay visible inside even below `/tmp`, which is otherwise the machine's own, if they are
    there already because the machine sees the whole host.
    """
    own_tmp = "/tmp"  # noqa: S108 - the machine's, which nothing is written to here
    folders = (python.parent.parent, executor.parents[2])
    seen = folders if config.whole_host else ()
    kept = [folder for folder in seen if folder.is_relative_to(own_tmp)]
    values = {
        "RELEASE": config.release,
        "ROOT_OPTIONS": mount_options(changing=False) + ",ro",
        "MODULES": " ".join(MODULES),
        "SYSCTLS": " ".join(SYSCTLS),
        "PYTHON": str(python),
        "KEPT": "".join(f"{folder}\n" for folder in kept),
        "TUNED": "yes" if config.tuned else "",
        "EXECUTOR": str(executor),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
