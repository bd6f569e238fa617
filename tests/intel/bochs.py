"""Fetch Bochs, an emulator of Intel's processors, and say what it is to run.

QEMU emulates virtualisation of AMD's kind only.  Bochs emulates Intel's, well enough for a stock
kernel and its `kvm_intel`.  It comes from Debian 13, as packages that are unpacked below `build/`
with the libraries they need, and run through their own loader: nothing is installed, and this
host's C library may be older.  apt fetches and verifies them, with folders of its own, from the
archive that this host's apt uses.

`configuration` is a function of the machine; `command` is how Bochs is started with it.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forkd.errors import HostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SUITE = "trixie"
"""The Debian release that Bochs is taken from: 13, whose Bochs is 3.0."""

PACKAGES = ("bochs", "bochs-term", "grub-common", "grub-pc-bin")
"""Bochs, a display that needs no window, and the boot loader with the program that makes it."""

UNPACKED = re.compile(r"(?:bochs|grub|lib|vgabios|zlib).*")
"""Those of the packages, and of what they depend on, that have a program or library to run."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""The keys that sign Debian's archive; the package is `debian-archive-keyring`."""

FETCH_DEADLINE_S = 900.0
UNPACK_DEADLINE_S = 60.0

LIBRARIES = "usr/lib/x86_64-linux-gnu"

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


def fetch(folder: Path, say: Callable[[str], object]) -> Path:
    """Have Bochs in `folder` and return it; what is there already is used.

    Raises:
        HostError: This host's apt does not use Debian's archive, or a package could not be had.
    """
    if folder.is_dir():
        return folder
    say(f"fetching Bochs from Debian's {SUITE}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".bochs-") as name:
        partial = Path(name)
        archives = _download(partial / "apt")
        root = partial / "root"
        root.mkdir()
        for archive in archives:
            _run(["dpkg-deb", "-x", str(archive), str(root)], UNPACK_DEADLINE_S)
        root.rename(folder)
    return folder


def debian_archive(targets: str) -> str:
    """Return where this host's apt has Debian from.

    Args:
        targets: Lines of `apt-get indextargets`: address, label and component, with `|` between.

    Raises:
        HostError: There is no such archive.
    """
    for line in targets.splitlines():
        address, label, component = line.split("|")
        if (label, component) == ("Debian", "main"):
            return address
    raise HostError("Bochs cannot be fetched: apt of this host has no archive of Debian's")


def apt_settings(folder: Path) -> str:
    """Return a configuration of apt that keeps everything it has in `folder`."""
    return (
        f'Dir::State::Lists "{folder}/lists";\n'
        f'Dir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache";\n'
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        'Dir::Etc::sourceparts "-";\n'
        'Acquire::Languages "none";\n'
        'APT::Sandbox::User "root";\n'
    )


def to_install(simulated: str) -> list[str]:
    """Return which packages to unpack, of those that `apt-get --simulate install` names."""
    names = re.findall(r"^Inst (\S+)", simulated, re.MULTILINE)
    return [name for name in names if UNPACKED.fullmatch(name)]


def _download(folder: Path) -> list[Path]:
    """Fetch the packages by an apt that knows nothing but the release, and trusts Debian's keys."""
    form = "$(REPO_URI)|$(LABEL)|$(COMPONENT)"
    targets = _run(["apt-get", "indextargets", "--format", form, "Created-By: Packages"], 60.0)
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    source = f"deb [signed-by={KEYRING}] {debian_archive(targets)} {SUITE} main\n"
    (folder / "sources.list").write_text(source, encoding="utf-8")
    (folder / "apt.conf").write_text(apt_settings(folder), encoding="utf-8")
    ours = {"APT_CONFIG": str(folder / "apt.conf")}
    _run(["apt-get", "-q", "update"], FETCH_DEADLINE_S, env=ours)
    asked = ["apt-get", "--simulate", "--no-install-recommends", "install", *PACKAGES]
    names = to_install(_run(asked, 60.0, env=ours))
    packages = folder / "packages"
    _run(["apt-get", "-q", "download", *names], FETCH_DEADLINE_S, env=ours, cwd=packages)
    return sorted(packages.glob("*.deb"))


def _run(
    command: Sequence[str],
    deadline_s: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command that must succeed; return what it printed."""
    try:
        done = subprocess.run(  # noqa: S603 - constants and paths of ours
            command, env=os.environ | (env or {}), cwd=cwd, timeout=deadline_s, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or "it printed no error"
        raise HostError(f"{command[0]} {command[1]} failed: {said}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"{command[0]} could not be run: {error}") from error
    return done.stdout


def program(bochs: Path, name: str) -> list[str]:
    """Return how a program of `bochs` is started: through the loader that came with it."""
    loader = bochs / "usr/lib64/ld-linux-x86-64.so.2"
    return [str(loader), "--library-path", str(bochs / LIBRARIES), str(bochs / "usr/bin" / name)]


def boot_sectors(bochs: Path, settings: str) -> bytes:
    """Return a boot loader, for the first sectors of a disk, that carries out `settings`.

    Raises:
        HostError: It could not be made.
    """
    modules = bochs / "usr/lib/grub/i386-pc"
    with tempfile.TemporaryDirectory(prefix="test-intel-") as name:
        (Path(name) / "grub.cfg").write_text(settings, encoding="utf-8")
        core = Path(name) / "core.img"
        _run(
            [
                *program(bochs, "grub-mkimage"), "-O", "i386-pc", "-d", str(modules),
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
    return [*program(bochs, "bochs-bin"), "-q", "-f", str(settings), "-rc", str(begin)]


def environment(bochs: Path) -> dict[str, str]:
    """Return what Bochs reads from its environment: where its parts are, and a plain terminal."""
    return {
        "LTDL_LIBRARY_PATH": str(bochs / LIBRARIES / "bochs/plugins"),
        "BXSHARE": str(bochs / "usr/share/bochs"),
        "TERM": "vt100",
        "PATH": os.environ.get("PATH", os.defpath),
    }
