"""Decide how QEMU runs the helper machine's code: on the processor, or by emulating it.

KVM can do it where it opens, runs stock guests (PVM does not: it has no nested
virtualisation to give) and lets a guest have a KVM of its own.  Anywhere else
QEMU emulates a processor of AMD's, with nested paging.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MODULES = Path("/sys/module")

KVM_MODULES = ("kvm_amd", "kvm_intel")
"""The two whose guests can be stock Linux."""


class Accel(StrEnum):
    """How QEMU runs the helper machine's code."""

    KVM = "kvm"
    TCG = "tcg"


@dataclass(frozen=True, slots=True)
class KvmFacts:
    """What this host's KVM is.

    Attributes:
        opens: /dev/kvm can be opened for reading and writing.
        paravirtual: It is PVM's.
        nests: It lets a guest have a KVM of its own.
    """

    opens: bool
    paravirtual: bool
    nests: bool


def choose_accel(facts: KvmFacts) -> Accel:
    """Return the fastest way in which the machine has a KVM of its own."""
    usable = facts.opens and not facts.paravirtual and facts.nests
    return Accel.KVM if usable else Accel.TCG


def look_at_kvm(modules: Path = MODULES) -> KvmFacts:
    """Find out what this host's KVM is."""
    return KvmFacts(
        opens=os.access("/dev/kvm", os.R_OK | os.W_OK),
        paravirtual=(modules / "kvm_pvm").exists(),
        nests=any(_says_yes(modules / name / "parameters/nested") for name in KVM_MODULES),
    )


def default_accel() -> Accel:
    """Return how this host runs a helper machine best."""
    return choose_accel(look_at_kvm())


def _says_yes(parameter: Path) -> bool:
    try:
        return parameter.read_text(encoding="ascii").strip() in ("1", "Y")
    except OSError:
        return False
