"""Boot a machine on Bochs for one job, pass on what the job prints, and fetch what it leaves.

The machine is made for the job and removed with it.  Its first serial port is the kernel's
console; the job prints to the second, which is a FIFO here.  When the job has ended, the machine
writes an archive of the job's files over its second disk, and powers off.
"""

from __future__ import annotations

import os
import pty
import selectors
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError
from forkd.machine import initramfs
from forkd.machine.qemu import CMDLINE, MODULES, SYSCTLS
from tests.intel import bochs, disk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from forkd.machine import Kernel

MEMORY_MIB = 6144
"""Memory of a machine: tests bake a guest of 4 GiB, most of which it never touches.

Linux has a GiB less: Bochs hides what lies below 4 GiB behind its devices.
"""

RESULTS_BYTES = 512 << 20
"""Size of the disk on which a job leaves its files."""

RESULTS = "/run/results"
"""Folder in the machine for the files that a job leaves."""

STATUS = "status"
"""Name of the file in which its exit status is."""

DISK_MODULES = ("ata_piix", "sd_mod", "ext4", "crc32c_generic")
"""What the first stage needs before it can reach the disk."""

APPLETS = (
    "sh", "mount", "insmod", "mkdir", "cp", "dd", "usleep", "switch_root", "sync", "poweroff",
)  # fmt: skip

KERNEL = "boot/vmlinuz"
INITRAMFS = "boot/initramfs"

CONSOLE_SHOWN_LINES = 20
"""How much of the console an error shows."""

READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Job:
    """What a machine is booted for.

    Attributes:
        script: Shell script, which root runs.
        cwd: Its working folder.
        folders: Folders of this host that it needs beside system, Python and checkout.
    """

    script: str
    cwd: Path
    folders: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: its exit status, and the files that it left, by their names."""

    status: int
    files: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one machine, in a folder that is removed with it."""

    folder: Path

    @property
    def disk(self) -> Path:
        """What it boots from."""
        return self.folder / "disk.img"

    @property
    def results(self) -> Path:
        """Its second disk."""
        return self.folder / "results.img"

    @property
    def console(self) -> Path:
        """Its kernel's messages."""
        return self.folder / "console.log"

    @property
    def log(self) -> Path:
        """Messages of Bochs itself."""
        return self.folder / "bochs.log"

    @property
    def output(self) -> Path:
        """The FIFO of what the job prints."""
        return self.folder / "output"


def run_job(  # noqa: PLR0913 - what runs, on what, for how long, and who is told
    job: Job,
    kernel: Kernel,
    *,
    emulator: Path,
    folder: Path,
    deadline_s: float,
    say: Callable[[str], object],
    on_output: Callable[[bytes], object],
) -> Outcome:
    """Run a job in a machine of its own; its console stays, in `folder/console.log`.

    Raises:
        HostError: The machine could not be made, ended without a result, or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="machine-") as name:
        files = Files(Path(name))
        say("making the disk of the Intel machine")
        _make_disks(files, job, kernel, emulator)
        say("booting it; a core emulates it, and its kernel takes a minute")
        began_s = time.monotonic()
        try:
            _run(files, emulator, deadline_s, on_output)
            return _outcome(files)
        finally:
            if files.console.exists():
                files.console.replace(folder / "console.log")
            say(f"the machine ran for {time.monotonic() - began_s:.0f} s")


def _make_disks(files: Files, job: Job, kernel: Kernel, emulator: Path) -> None:
    root = files.folder / "root"
    disk.gather(root, job.cwd, (kernel.image.parent, *job.folders))
    (root / KERNEL).parent.mkdir(exist_ok=True)
    shutil.copyfile(kernel.image, root / KERNEL)
    (root / INITRAMFS).write_bytes(first_stage(job, kernel))
    boot = bochs.boot_sectors(emulator, boot_settings())
    disk.make_image(files.disk, root, boot, run=disk.run)
    shutil.rmtree(root)
    with files.results.open("wb") as file:
        file.truncate(RESULTS_BYTES)


def boot_settings() -> str:
    """Return what the boot loader carries out.

    The kernel's line is the helper machine's, with the rate of Bochs' counter and a faster console:
    each character takes a machine's time.
    """
    line = CMDLINE.replace("console=ttyS0 ", "console=ttyS0,115200 ", 1)
    return (
        f"linux (hd0,msdos1)/{KERNEL} {line} tsc_early_khz={bochs.CLOCK_KHZ}\n"
        f"initrd (hd0,msdos1)/{INITRAMFS}\n"
        "boot\n"
    )


def first_stage(job: Job, kernel: Kernel) -> bytes:
    """Return the initramfs: busybox, both stages, what they read, and the modules for the disk."""
    here = Path(__file__).parent
    archive = initramfs.Archive()
    for name in ("bin", "proc", "sys", "dev", "modules"):
        archive.folder(name)
    archive.file("bin/busybox", initramfs.busybox().read_bytes(), mode=0o755)
    for applet in APPLETS:
        archive.link(f"bin/{applet}", "busybox")
    archive.file("init", (here / "boot.sh").read_bytes(), mode=0o755)
    archive.file("job.sh", (here / "job.sh").read_bytes(), mode=0o755)
    archive.file("job", job.script.encode())
    archive.file("machine.conf", settings(job, kernel).encode())
    modules_dep = (kernel.modules / "modules.dep").read_text(encoding="utf-8")
    built_in = initramfs.built_in_modules(kernel.modules)
    order = initramfs.load_order(modules_dep, DISK_MODULES, built_in)
    names = [Path(path).name.removesuffix(".xz") for path in order]
    for path, name in zip(order, names, strict=True):
        archive.file(f"modules/{name}", initramfs.read_module(kernel.modules / path))
    archive.file("modules/order", "".join(f"{name}\n" for name in names).encode())
    return archive.finish()


def settings(job: Job, kernel: Kernel) -> str:
    """Return `machine.conf`, which job.sh reads; it loads `kvm_intel` itself."""
    values = {
        "RELEASE": kernel.release,
        "KERNEL_MODULES": str(kernel.modules),
        "MODULES": " ".join(name for name in MODULES if not name.startswith("kvm_")),
        "SYSCTLS": " ".join(SYSCTLS),
        "RESULTS": RESULTS,
        "WORKING_FOLDER": str(job.cwd),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def _run(
    files: Files, emulator: Path, deadline_s: float, on_output: Callable[[bytes], object]
) -> None:
    """Run Bochs until the machine has powered off; it does not outlive us."""
    hardware = bochs.Hardware(
        memory_mib=MEMORY_MIB, disk=files.disk, results=files.results, console=files.console,
        output=files.output, log=files.log,
    )  # fmt: skip
    configuration, begin = files.folder / "bochsrc", files.folder / "begin"
    configuration.write_text(bochs.configuration(emulator, hardware), encoding="utf-8")
    begin.write_text("c\n", encoding="utf-8")
    os.mkfifo(files.output)
    with ExitStack() as stack:
        # Open before Bochs opens it, so that it need not wait for us.
        output = os.open(files.output, os.O_RDONLY | os.O_NONBLOCK)
        stack.callback(os.close, output)
        display, terminal = pty.openpty()
        stack.callback(os.close, display)
        try:
            process = subprocess.Popen(  # noqa: S603 - ours
                bochs.command(emulator, configuration, begin), env=bochs.environment(emulator),
                cwd=files.folder, stdin=terminal, stdout=terminal, stderr=terminal,
            )  # fmt: skip
        finally:
            os.close(terminal)
        stack.callback(process.wait)
        stack.callback(process.kill)
        for data in follow(output, display, time.monotonic() + deadline_s):
            on_output(data)


def follow(output: int, display: int, deadline_s: float) -> Iterator[bytes]:
    """Yield what the job prints until Bochs has closed its terminal; what is shown there is lost.

    Raises:
        HostError: It is later than `deadline_s`, on the monotonic clock.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        selector.register(display, selectors.EVENT_READ)
        while True:
            left_s = deadline_s - time.monotonic()
            ready = selector.select(left_s) if left_s > 0 else []
            if not ready:
                raise HostError("the Intel machine took too long; --deadline gives it more minutes")
            for key, _ in ready:
                data = _available(key.fd)
                if key.fd == output and data:
                    yield data
                elif not data:
                    selector.unregister(key.fd)
            if display not in selector.get_map():
                break
    while data := _available(output):
        yield data


def _available(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, READ_BYTES)
    except OSError:  # a terminal whose other end is closed, or a FIFO without more
        return b""


def _outcome(files: Files) -> Outcome:
    left = read_results(files.results)
    if left is None:
        console = files.console if files.console.exists() else files.log
        lines = console.read_text(errors="replace").splitlines()[-CONSOLE_SHOWN_LINES:]
        shown = "\n".join(lines)
        raise HostError(f"the Intel machine ended without a result; its last messages:\n{shown}")
    return Outcome(int(left.pop(STATUS)), left)


def read_results(path: Path) -> dict[str, bytes] | None:
    """Return the files on the disk of the results by their names; None if there is no status."""
    try:
        with tarfile.open(path) as archive:
            members = [(each.name, archive.extractfile(each)) for each in archive if each.isfile()]
            found = {Path(name).name: file.read() for name, file in members if file is not None}
    except tarfile.TarError:
        return None
    return found if STATUS in found else None
