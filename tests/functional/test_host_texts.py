"""What `forkd host setup` writes for AppArmor and udev, as their own programs read it.

They are those of Debian 13: its AppArmor knows user namespaces, and its udev checks rules.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forkd import programs
from forkd.service.setup import texts
from tests.support import fresh_root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.fresh_root import FreshRoot

pytestmark = [
    pytest.mark.needs("root", "mmdebstrap", "network"),
    pytest.mark.soak(only=True),
    pytest.mark.timeout(900),
]

OUR_PROFILE = (programs.PACKAGING / "apparmor/forkd-vmm").read_text(encoding="utf-8")

KVM = "/sys/devices/virtual/misc/kvm"
"""The device, as udev names it."""

OWN_DEVICES = "mount -t tmpfs none /dev && mknod -m 600 /dev/kvm c 10 232 &&"
"""Hides this host's devices from what is run next."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshRoot]:
    """A root of Debian 13 with both programs."""
    lower = fresh_root.made("trixie-checkers", ("apparmor", "python3", "udev"), "trixie")
    with fresh_root.fresh_root(lower, layer=tmp_path_factory.mktemp("layer")) as made:
        yield made


def write(root: FreshRoot, path: Path, text: str) -> Path:
    """Write a file below the root; return it as programs there name it."""
    file = Path("/") / path
    root.check(f"mkdir -p {file.parent} && printf %s {shlex.quote(text)} >{file}")
    return file


@pytest.mark.parametrize(
    "vmm", [texts.PROFILE_PATH, "/home/ada/.venv/bin/forkd-vmm", '/home/a b/["x"]*/forkd-vmm']
)
def test_apparmor_reads_the_profile(root: FreshRoot, vmm: str) -> None:
    file = write(root, texts.PROFILE_FILE, texts.profile(OUR_PROFILE, Path(vmm)))

    assert root.check(f"apparmor_parser --names {file}") == "forkd-vmm\n"
    assert root.check(f"apparmor_parser --skip-kernel-load --skip-cache {file}") == ""


def test_apparmor_refuses_a_profile_that_is_none(root: FreshRoot) -> None:
    wrong = OUR_PROFILE.replace("userns,", "usernamespaces,")
    file = write(root, Path("tmp-profile"), wrong)

    refused = root.run(f"apparmor_parser --skip-kernel-load --skip-cache {file}")
    assert refused.returncode == 1
    assert "syntax error" in refused.stderr


def test_udev_reads_the_rule_and_sees_what_is_wrong_in_another(root: FreshRoot) -> None:
    file = write(root, texts.UDEV_FILE, texts.udev_rule("kvm"))
    wrong = write(root, Path("wrong.rules"), texts.udev_rule("kvm").replace("MODE=", "MODES="))

    root.check(f"udevadm verify {file}")
    refused = root.run(f"udevadm verify {wrong}")
    assert refused.returncode == 1
    assert "MODES" in refused.stderr


def test_the_rule_is_what_counts_for_the_device(root: FreshRoot) -> None:
    write(root, texts.UDEV_FILE, texts.udev_rule("audio"))

    said = root.check(f"{OWN_DEVICES} udevadm test --action=add {KVM}")

    assert "Device node group:\n  audio (" in said
    assert "Device node permission:\n  0660\n" in said
