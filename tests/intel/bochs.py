"""Say what Bochs, an emulator of Intel's processors, is to run.

QEMU emulates virtualisation of AMD's kind only.  Bochs emulates Intel's, well enough for a stock
kernel and its `kvm_intel`.  It comes from Debian 13 (`tools.trixie`), whose Bochs is 3.0, and is
unpacked below `build/`.

`configuration` is a function of the machine; `command` is how Bochs is started with it.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools import trixie

PROGRAM = trixie.Program(
    "Bochs",
    ("bochs", "bochs-term", "grub-common", "grub-pc-bin"),
    re.compile(r"(?:bochs|grub|lib|vgabios|zlib).*"),
)
"""Bochs, a display that needs no window, and the boot loader with the program that makes it."""

MODEL = "corei7_skylake_x"
"""The newest processor with virtualisation on which a stock kernel starts."""

HOST_MEMORY_MIB_MAX = 2048
"""Most memory of a machine that Bochs holds; it swaps what a machine touches beyond that."""

CLOCK_KHZ = 1_000_000
"""Rate of the time-stamp counter: Bochs counts one instruction as one nanosecond."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine that Bochs emulates; it has one processor.

    Attributes:
        memory_mib: Its memory.
        disk: What it boots from; the file stays as it is.
        results: A second disk, which it writes to.
        console: File that its kernel's messages go to.
        output: File or FIFO that the second serial port writes to.
        log: Bochs' own messages.
    """

    memory_mib: int
    disk: Path
    results: Path
    console: Path
    output: Path
    log: Path


def boot_sectors(bochs: Path, settings: str) -> bytes:
    """Return a boot loader, for the first sectors of a disk, that carries out `settings`.

    Raises:
        HostError: It could not be made.
    """
    modules = bochs / "usr/lib/grub/i386-pc"
    with tempfile.TemporaryDirectory(prefix="test-intel-") as name:
        (Path(name) / "grub.cfg").write_text(settings, encoding="utf-8")
        core = Path(name) / "core.img"
        trixie.run(
            [
                *trixie.command(bochs, "grub-mkimage"), "-O", "i386-pc", "-d", str(modules),
                "-p", "/", "-c", f"{name}/grub.cfg", "-o", str(core),
                "biosdisk", "part_msdos", "ext2", "linux",
            ],
            60.0,
        )  # fmt: skip
        return (modules / "boot.img").read_bytes() + core.read_bytes()


def configuration(bochs: Path, hardware: Hardware) -> str:
    """Return the `bochsrc` of a machine.

    Memory beyond what the guest touches costs nothing; `clock: sync=none` lets time in the machine
    pass with its instructions, so that waiting takes none.
    """
    return f"""\
config_interface: textconfig
display_library: term
romimage: file="{bochs}/usr/share/bochs/BIOS-bochs-latest", options=fastboot
vgaromimage: file="{bochs}/usr/share/bochs/VGABIOS-lgpl-latest"
cpu: model={MODEL}, count=1, ips={CLOCK_KHZ * 1000}, ignore_bad_msrs=1, reset_on_triple_fault=1
memory: guest={hardware.memory_mib}, host={min(hardware.memory_mib, HOST_MEMORY_MIB_MAX)}
pci: enabled=1, chipset=i440fx
clock: sync=none, time0=utc
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, mode=volatile, path="{hardware.disk}"
ata0-slave: type=disk, mode=flat, path="{hardware.results}"
boot: disk
com1: enabled=1, mode=file, dev="{hardware.console}"
com2: enabled=1, mode=file, dev="{hardware.output}"
log: "{hardware.log}"
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
speaker: enabled=0
"""


def command(bochs: Path, settings: Path, begin: Path) -> list[str]:
    """Return how Bochs is started with `settings`; `begin` has its debugger let it run."""
    return [*trixie.command(bochs, "bochs-bin"), "-q", "-f", str(settings), "-rc", str(begin)]


def environment(bochs: Path) -> dict[str, str]:
    """Return what Bochs reads from its environment: where its parts are, and a plain terminal."""
    return {
        "LTDL_LIBRARY_PATH": str(bochs / trixie.LIBRARIES / "bochs/plugins"),
        "BXSHARE": str(bochs / "usr/share/bochs"),
        "TERM": "vt100",
        "PATH": os.environ.get("PATH", os.defpath),
    }
