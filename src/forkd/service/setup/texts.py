"""What is in the files that set a host up: pure functions of what is wrong, and of what is there.

A file of settings has exactly what is wrong now and the lines that it has had before, so that
doing it again changes nothing, and what a person has added stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from forkd.host.tuning import Seen, Setting

SYSCTL_FILE = Path("etc/sysctl.d/90-forkd.conf")
"""Sorts behind the distributions' own."""

TMPFILES_FILE = Path("etc/tmpfiles.d/forkd.conf")
MODPROBE_FILE = Path("etc/modprobe.d/forkd.conf")

UDEV_FILE = Path("etc/udev/rules.d/70-forkd.rules")
"""Sorts behind the rule of systemd for /dev/kvm, which is in 50-udev-default.rules."""

UNITS = Path("etc/systemd/system")
CGROUPS_UNIT = UNITS / "forkd-cgroups.service"
CGROUPS_WANTED = UNITS / "sysinit.target.wants/forkd-cgroups.service"
DELEGATE_FILE = UNITS / "user@.service.d/forkd.conf"

PROFILE = "forkd-vmm"
PROFILE_FILE = Path("etc/apparmor.d") / PROFILE
PROFILE_PATH = "/opt/forkd/bin/forkd-vmm"
"""Where the profile that comes with forkd says that the program is."""

SETTINGS_FILES = (SYSCTL_FILE, TMPFILES_FILE, MODPROBE_FILE)

HEAD = "# Written by `forkd host setup`; `forkd host undo` takes it back."


def settings(
    host: Seen, wrong: Collection[Setting], existing: Mapping[Path, str]
) -> dict[Path, str]:
    """Return the files of settings that would change, with what would be in them.

    Args:
        host: What was seen.
        wrong: The settings that are to be set.
        existing: What is in those of `SETTINGS_FILES` that are there.
    """
    wanted: dict[Path, str] = {}
    for path in SETTINGS_FILES:
        missing = [each for each in wrong if file_of(each, host) == path]
        text = _merged(existing.get(path, ""), missing, is_modprobe=path == MODPROBE_FILE)
        if missing and text != existing.get(path):
            wanted[path] = text
    return wanted


def file_of(setting: Setting, host: Seen) -> Path:
    """Return the file that sets a setting at each start of a host."""
    if setting.is_sysctl:
        return SYSCTL_FILE
    return MODPROBE_FILE if setting.module in host.loadable else TMPFILES_FILE


def _merged(existing: str, settings: list[Setting], *, is_modprobe: bool) -> str:
    """Return a file with these settings, and what it had of others."""
    kept = [
        line
        for line in existing.splitlines()
        if line != HEAD and not any(_is_of(line, each) for each in settings)
    ]
    lines = (each.module_line if is_modprobe else each.line for each in settings)
    return "\n".join([HEAD, *kept, *lines]) + "\n"


def _is_of(line: str, setting: Setting) -> bool:
    words = line.replace("=", " ").split()
    if words[:1] == ["options"]:
        return words[1:3] == [setting.module, setting.short_name]
    return setting.name in words


def udev_rule(group: str) -> str:
    """Return the rule that opens /dev/kvm to a group."""
    return f'{HEAD}\nKERNEL=="kvm", GROUP="{group}", MODE="0660"\n'


def cgroups_unit(options: Collection[str]) -> str:
    """Return the unit that mounts cgroups so that forks do not wait for them.

    Args:
        options: How they are mounted now; a mount that is changed keeps only what is named.
    """
    named = ",".join(["remount", *sorted(options), "favordynmods"])
    return f"""\
{HEAD}
[Unit]
Description=Cgroups that forks of forkd need not wait for
DefaultDependencies=no
Before=sysinit.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mount -o {named} /sys/fs/cgroup

[Install]
WantedBy=sysinit.target
"""


def delegation(controllers: Collection[str]) -> str:
    """Return the drop-in that has systemd delegate controllers to the daemons of users."""
    return f"{HEAD}\n[Service]\nDelegate={' '.join(sorted(controllers))}\n"


def profile(ours: str, vmm: Path) -> str:
    """Return AppArmor's profile for a VMM.

    Args:
        ours: The profile that comes with forkd.
        vmm: Where the VMM is.
    """
    return f"{HEAD}\n{ours.replace(PROFILE_PATH, quoted(vmm))}"


def quoted(path: Path) -> str:
    """Return a path as AppArmor takes it: letters that it gives a meaning stand for themselves."""
    if re.fullmatch(r"[\w./+-]+", str(path), re.ASCII):
        return str(path)
    special = '\\"[]{}*?^@'
    escaped = "".join(f"\\{each}" if each in special else each for each in str(path))
    return f'"{escaped}"'
