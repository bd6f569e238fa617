"""Decide whether this machine can run a test, from what the test says it needs.

A test states requirements, never places: `@pytest.mark.needs("kvm", "root")`.
The same test then runs natively where the requirement holds, or inside the
helper machine that `make test-machine` boots, without knowing which.

An unmet need skips the test on a laptop.  With `--strict-needs`, which CI and
the helper machine always pass, it fails instead: a suite that silently skips
is a suite that does not exist.  A need that only the host outside can meet,
such as the network, is waived there by name: `--waive-needs network`.

So that each test runs once, `--unmet-to FILE` lists what is skipped here, and
`--unmet-from FILE` runs only that elsewhere.  `--needing NEED,…` runs what needs
one of these, wherever it is.

Only a test that needs something of the host may change what is the host's: its
mounts, networks, cgroups.  `--changing-host` runs those, `--leaving-host` all
others, at the same time if wanted: `tests.support.leaks` looks at its own then.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import socket
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd.host.disks import disk_of
from forkd.machine.qemu import CMDLINE
from tests.support import pythons
from tools import node

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent.parent

STATE = Path("/var/lib/forkd")
"""Where machines' disks are."""

NETWORK_DEADLINE_S = 2.0
"""How long the Debian archive's address may take to answer before there is no network."""

ARCHIVE = ("deb.debian.org", 80)
"""Where the tests that need the network get their packages."""

OURS = frozenset({"binaries"})
"""Needs that are no one's but this checkout's."""

KVM_CHECK_EXTENSION = 0xAE03
KVM_CAP_PRE_FAULT_MEMORY = 236


def has_stock_kvm() -> bool:
    """Whether KVM opens and is not the paravirtual one, which cannot run a stock guest."""
    return os.access("/dev/kvm", os.R_OK | os.W_OK) and not Path("/sys/module/kvm_pvm").exists()


def has_program(name: str) -> Callable[[], bool]:
    """Return a probe for a program on the path."""
    return lambda: shutil.which(name) is not None


def has_built(*names: str) -> Callable[[], bool]:
    """Return a probe for files that `make build` leaves in the build folder."""
    return lambda: all((ROOT / "build" / "bin" / name).exists() for name in names)


def has_package(mark: str) -> Callable[[], bool]:
    """Return a probe for the package of a release of Debian, which `make soak` builds."""
    return lambda: any((ROOT / "build" / "deb").glob(f"forkd_*+{mark}_*.deb"))


@cache
def has_network() -> bool:
    """Whether the Debian archive answers."""
    try:
        socket.create_connection(ARCHIVE, NETWORK_DEADLINE_S).close()
    except OSError:
        return False
    return True


def limits_io() -> bool:
    """Whether disk I/O can be limited where machines' disks are."""
    controllers = Path("/sys/fs/cgroup/cgroup.controllers")
    return (
        controllers.exists()
        and "io" in controllers.read_text().split()
        and STATE.exists()
        and disk_of(STATE) is not None
    )


def has_invariant_tsc() -> bool:
    """Whether the processor's counter never stops, so that guests take their time from it."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return {"constant_tsc", "nonstop_tsc"} <= set(flags)


def has_pre_fault() -> bool:
    """Whether KVM maps pages before a guest touches them, which it does since Linux 6.12."""
    try:
        kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return fcntl.ioctl(kvm, KVM_CHECK_EXTENSION, KVM_CAP_PRE_FAULT_MEMORY) > 0
    finally:
        os.close(kvm)


PROBES: dict[str, Callable[[], bool]] = {
    "kvm": has_stock_kvm,
    "root": lambda: os.geteuid() == 0,
    "cgroup2": lambda: Path("/sys/fs/cgroup/cgroup.controllers").exists(),
    "io": limits_io,
    "tun": lambda: os.access("/dev/net/tun", os.R_OK | os.W_OK),
    "binaries": has_built("forkd-vmm", "forkd-agent", "forkd-witness"),
    "reference": (ROOT / "build" / "reference-client" / "forkd_mcp").exists,
    "node": node.installed,
    "bun": node.BUN.exists,
    "deno": node.DENO.exists,
    "mcp-testers": node.MCP_TESTERS.exists,
    "inspect": (ROOT / "build" / "inspect-client" / "inspect_ai").exists,
    "nft": has_program("nft"),
    "invariant-tsc": has_invariant_tsc,
    "pre-fault": has_pre_fault,
    "helper": lambda: Path("/proc/cmdline").read_text(encoding="utf-8").startswith(CMDLINE),
    "qemu": has_program("qemu-system-x86_64"),
    "mmdebstrap": has_program("mmdebstrap"),
    "systemd": has_program("/usr/lib/systemd/systemd"),
    "systemd-analyze": has_program("systemd-analyze"),
    "runc": has_program("runc"),
    "umoci": has_program("umoci"),
    "docker-registry": has_program("docker-registry"),
    "prometheus": has_program("prometheus"),
    "minisign": has_program("minisign"),
    "release-tools": (ROOT / "build" / "release-tools" / "cyclonedx_py").exists,
    "deb": has_package("deb12"),
    "deb13": has_package("deb13"),
    "man": has_program("man"),
    "network": has_network,
    **{f"python{each}": partial(pythons.is_available, each) for each in pythons.VERSIONS},
}


def stated_by(item: pytest.Item) -> list[str]:
    """Return what a test says that it needs."""
    return [need for mark in item.iter_markers("needs") for need in mark.args]


def changes_host(item: pytest.Item) -> bool:
    """Whether a test may change what is the host's."""
    return not OURS.issuperset(stated_by(item))


def unmet(item: pytest.Item) -> list[str]:
    """Return what `item` needs and this machine lacks, in the order stated."""
    stated = stated_by(item)
    unknown = [need for need in stated if need not in PROBES]
    if unknown:
        pytest.fail(f"unknown needs: {', '.join(unknown)}", pytrace=False)
    return [need for need in stated if not PROBES[need]()]


def needs(text: str) -> frozenset[str]:
    """Read a list of needs; a usage error names those that no test can have."""
    named = frozenset(text.split(","))
    if unknown := sorted(named - PROBES.keys()):
        raise argparse.ArgumentTypeError(f"no such need: {', '.join(unknown)}")
    return named


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("needs")
    group.addoption("--strict-needs", action="store_true", help="fail, not skip, on an unmet need")
    group.addoption("--waive-needs", default="", metavar="NEED,…", help="may skip even so")
    group.addoption("--unmet-to", type=Path, metavar="FILE", help="list tests with an unmet need")
    group.addoption("--unmet-from", type=Path, metavar="FILE", help="run only the tests listed")
    group.addoption("--needing", type=needs, metavar="NEED,…", help="run only tests with a need")
    group.addoption(
        "--changing-host", action="store_true", help="run only tests that may change the host"
    )
    group.addoption("--leaving-host", action="store_true", help="run only the others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*what): host features this test requires")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = list(items)
    if (listing := config.getoption("--unmet-from")) is not None:
        names = set(listing.read_text(encoding="utf-8").splitlines())
        wanted = [item for item in wanted if item.nodeid in names]
    if (needed := config.getoption("--needing")) is not None:
        wanted = [item for item in wanted if not needed.isdisjoint(stated_by(item))]
    if config.getoption("--changing-host"):
        wanted = [item for item in wanted if changes_host(item)]
    if config.getoption("--leaving-host"):
        wanted = [item for item in wanted if not changes_host(item)]
    if len(wanted) < len(items):
        left_out = set(items).difference(wanted)
        items[:] = wanted
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish(session: pytest.Session) -> None:
    if (listing := session.config.getoption("--unmet-to")) is not None:
        names = (f"{item.nodeid}\n" for item in session.items if unmet(item))
        listing.write_text("".join(names), encoding="utf-8")


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = unmet(item)
    if not missing:
        return
    reason = f"this machine lacks: {', '.join(missing)}"
    waived = set(item.config.getoption("--waive-needs").split(","))
    if item.config.getoption("--strict-needs") and not waived.issuperset(missing):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
