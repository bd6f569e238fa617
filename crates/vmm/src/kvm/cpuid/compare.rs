//! Whether a host can show a guest what it has seen: exactly, or not at all.

use kvm_bindings::kvm_cpuid_entry2;

use super::table::{Feature, Register, What};
use super::{find, value, vendor_id, what};
use crate::error::Error;
use crate::kvm::stored;

/// Bits that change while a guest runs, or with the number of its vCPUs: OSXSAVE, OSPKE, APIC, HTT,
/// `CmpLegacy`.
const MOVING: [(u32, Register, u32); 5] = [
    (0x1, Register::Ecx, 1 << 27),
    (0x1, Register::Edx, 1 << 9 | 1 << 28),
    (0x7, Register::Ecx, 1 << 4),
    (0x8000_0001, Register::Ecx, 1 << 1),
    (0x8000_0001, Register::Edx, 1 << 9),
];

/// Refuses to go on if a vCPU here, which is shown `offered`, cannot be shown what was `seen`.
///
/// # Errors
///
/// [`Error::CpuMismatch`] naming everything that is missing, or that is not the same.
pub fn check(seen: &[kvm_cpuid_entry2], offered: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    let problems = differences(seen, offered);
    if problems.is_empty() { Ok(()) } else { Err(Error::CpuMismatch(problems.join(", "))) }
}

/// What of `seen` cannot be shown where `offered` is.
#[must_use]
pub fn differences(seen: &[kvm_cpuid_entry2], offered: &[kvm_cpuid_entry2]) -> Vec<String> {
    let (vendor, here) = (vendor_id(seen), vendor_id(offered));
    if vendor != here {
        return vec![format!("the vendor {vendor}; here it is {here}")];
    }
    let mut problems = Vec::new();
    for entry in stored::filled(seen) {
        for register in [Register::Eax, Register::Ebx, Register::Ecx, Register::Edx] {
            problems.extend(difference(entry, register, offered));
        }
    }
    problems
}

fn difference(
    entry: &kvm_cpuid_entry2,
    register: Register,
    offered: &[kvm_cpuid_entry2],
) -> Option<String> {
    let (function, index) = (entry.function, entry.index);
    let wanted = value(entry, register);
    let there = find(offered, function, index);
    let here = there.map_or(0, |entry| value(entry, register));
    let place = || format!("CPUID {function:#x}.{index} {}", name_of(register));
    match what(function, index, register) {
        Some(What::Features(features)) => {
            let lacking = wanted & !here & !moving(function, register);
            (lacking != 0).then(|| format!("{} ({})", listed(features, lacking), place()))
        }
        // Without the state that it describes, that is what is missing.
        Some(What::Same) if function == 0xd && there.is_none() => None,
        Some(What::Same) => (wanted != here)
            .then(|| format!("{wanted:#x} in {}, where there is {here:#x} here", place())),
        Some(What::Addresses) => {
            let (needed, has) = (wanted & 0xff, here & 0xff);
            let rest = wanted >> 8 != here >> 8;
            if needed > has {
                return Some(format!("physical addresses of {needed} bits; here they have {has}"));
            }
            rest.then(|| format!("{wanted:#x} in {}, where there is {here:#x} here", place()))
        }
        Some(What::Made) if function == 1 && register == Register::Ebx => {
            let line = |value: u32| (value >> 8 & 0xff) * 8;
            (line(wanted) != line(here)).then(|| {
                format!("cache lines of {} bytes; here they have {}", line(wanted), line(here))
            })
        }
        Some(What::Made | What::Describes) => None,
        None => (wanted != 0).then(|| format!("{wanted:#x} in {}, which is not shown", place())),
    }
}

/// The bits of a register that are no promise to the guest.
pub(super) fn moving(function: u32, register: Register) -> u32 {
    MOVING
        .iter()
        .filter(|(of, which, _)| (*of, *which) == (function, register))
        .fold(0, |mask, (.., bits)| mask | bits)
}

/// The names of some bits, or their numbers.
fn listed(features: &[Feature], bits: u32) -> String {
    let name = |bit: u8| {
        let known = features.iter().find(|(at, ..)| *at == bit);
        known.map_or_else(|| format!("bit {bit}"), |(_, name, _)| (*name).to_owned())
    };
    let names: Vec<_> = (0..32).filter(|bit| bits & 1 << bit != 0).map(name).collect();
    names.join(" ")
}

fn name_of(register: Register) -> &'static str {
    match register {
        Register::Eax => "eax",
        Register::Ebx => "ebx",
        Register::Ecx => "ecx",
        Register::Edx => "edx",
    }
}
