"""What this host's KVM is, as far as can be told without running a guest."""

from __future__ import annotations

import os
from pathlib import Path

_DEVICE = Path("/dev/kvm")
_PVM_MODULE = Path("/sys/module/kvm_pvm")


def is_usable() -> bool:
    """Whether /dev/kvm can be opened; it may still run stock guests badly."""
    return os.access(_DEVICE, os.R_OK | os.W_OK)


def is_pvm() -> bool:
    """Whether KVM here is PVM, which interprets every guest kernel but its own."""
    return _PVM_MODULE.exists()
