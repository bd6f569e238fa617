"""What this host's KVM is, as far as can be told without running a guest."""

from __future__ import annotations

import os
from pathlib import Path

from forkd.host.faults import kernel_call

_DEVICE = Path("/dev/kvm")
_MODULES = Path("/sys/module")
_PVM = "kvm_pvm"
_STOCK = ("kvm_amd", "kvm_intel")
"""The modules whose guests can be stock Linux."""


def exists() -> bool:
    """Whether there is a /dev/kvm, open to us or not."""
    with kernel_call(f"look for {_DEVICE}"):
        return _DEVICE.exists()


def is_usable() -> bool:
    """Whether /dev/kvm can be opened; it may still run stock guests badly."""
    return os.access(_DEVICE, os.R_OK | os.W_OK)


def is_pvm() -> bool:
    """Whether KVM here is PVM, which interprets every guest kernel but its own."""
    with kernel_call("look for the module kvm_pvm"):
        return (_MODULES / _PVM).exists()


def nests() -> bool:
    """Whether KVM here lets a guest have a KVM of its own, as the helper machine must."""
    return any(_is_on(_MODULES / each / "parameters/nested") for each in _STOCK)


def _is_on(parameter: Path) -> bool:
    try:
        return parameter.read_text(encoding="ascii").strip() in {"1", "Y"}
    except OSError:
        return False
