//! What a state file may say of a vCPU: what we would have saved, and nothing else.
//!
//! KVM takes more than that.  It lets entries of CPUID differ in ways of which we look at one only,
//! and has MSRs that are no part of a snapshot.

use std::collections::BTreeSet;

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2, kvm_msr_entry};

use crate::error::Error;
use crate::kvm::msrs::Defaults;

/// The functions of CPUID that have an entry for each index; of all others there is one
/// (`cpuid_function_is_indexed` in `arch/x86/kvm/cpuid.c`).
const INDEXED: [u32; 15] =
    [0x4, 0x7, 0xb, 0xd, 0xf, 0x10, 0x12, 0x14, 0x17, 0x18, 0x1d, 0x1e, 0x1f, 0x24, 0x8000_001d];

/// Whether the guest sees `entry` exactly where its function and its index say: KVM ignores the
/// index without the flag, and shows one that a function does not have.
#[must_use]
pub fn is_plain(entry: &kvm_cpuid_entry2) -> bool {
    if INDEXED.contains(&entry.function) {
        entry.flags == KVM_CPUID_FLAG_SIGNIFCANT_INDEX
    } else {
        entry.flags == 0 && entry.index == 0
    }
}

/// `entries` without the empty ones at their end: where KVM does not say how many it has filled in,
/// they are saved, too.
#[must_use]
pub fn filled(entries: &[kvm_cpuid_entry2]) -> &[kvm_cpuid_entry2] {
    let empty = kvm_cpuid_entry2::default();
    let last = entries.iter().rposition(|entry| *entry != empty);
    &entries[..last.map_or(0, |at| at + 1)]
}

/// Refuses entries of CPUID that a guest would see in the place of those that we look at.
///
/// # Errors
///
/// [`Error::Damaged`] naming the first that is not plain ([`is_plain`]), or is there twice.
pub fn check_cpuid(entries: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    let mut known = BTreeSet::new();
    for entry in filled(entries) {
        let kvm_cpuid_entry2 { function, index, flags, .. } = *entry;
        let problem = if !is_plain(entry) {
            format!("is not one that is saved (flags {flags:#x})")
        } else if !known.insert((function, index)) {
            "is there twice".to_owned()
        } else {
            continue;
        };
        return Err(Error::Damaged(format!("CPUID {function:#x}.{index} {problem}")));
    }
    Ok(())
}

/// Refuses MSRs that are not among the `saved` ones.
///
/// # Errors
///
/// [`Error::CpuMismatch`] naming the first: it may be one of another host.
pub fn check_msrs(msrs: &[kvm_msr_entry], saved: &Defaults) -> Result<(), Error> {
    match msrs.iter().find(|msr| !saved.iter().any(|known| known.index == msr.index)) {
        None => Ok(()),
        Some(other) => {
            Err(Error::CpuMismatch(format!("MSR {:#x}, which is not saved here", other.index)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INDEX: u32 = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;

    fn entry(function: u32, index: u32, flags: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, flags, ..Default::default() }
    }

    #[test]
    fn an_entry_that_a_guest_sees_where_nobody_looks_is_refused_by_its_place() {
        let vendor = kvm_cpuid_entry2 { ebx: 7, ..entry(0, 0, 0) };
        let sound = [vendor, entry(1, 0, 0), entry(7, 0, INDEX), entry(7, 1, INDEX)];
        let decoys = [
            (entry(1, 1, 0), "CPUID 0x1.1 is not one that is saved (flags 0x0)"),
            (entry(1, 1, INDEX), "CPUID 0x1.1 is not one that is saved (flags 0x1)"),
            (entry(1, 0, INDEX), "CPUID 0x1.0 is not one that is saved (flags 0x1)"),
            (entry(0x8000_0001, 0, 2), "CPUID 0x80000001.0 is not one that is saved (flags 0x2)"),
            (entry(7, 2, 0), "CPUID 0x7.2 is not one that is saved (flags 0x0)"),
            (entry(7, 2, INDEX | 4), "CPUID 0x7.2 is not one that is saved (flags 0x5)"),
            (entry(1, 0, 0), "CPUID 0x1.0 is there twice"),
            (entry(7, 1, INDEX), "CPUID 0x7.1 is there twice"),
        ];
        assert!(check_cpuid(&sound).is_ok());
        assert!(check_cpuid(&[&sound[..], &[entry(0, 0, 0); 3]].concat()).is_ok());

        for (decoy, expected) in decoys {
            for at in [0, sound.len()] {
                let mut entries = sound.to_vec();
                entries.insert(at, decoy);
                let refused = check_cpuid(&entries).unwrap_err();
                assert_eq!(refused.to_string(), expected);
            }
        }
    }

    #[test]
    fn one_msr_that_is_not_saved_is_refused_by_its_number() {
        let msr = |index| kvm_msr_entry { index, ..Default::default() };
        let saved = [msr(0x10), msr(0x6e0)];

        assert!(check_msrs(&[msr(0x6e0), msr(0x10)], &saved).is_ok());
        let refused = check_msrs(&[msr(0x10), msr(0x3a)], &saved).unwrap_err();

        assert_eq!(refused.code(), forkd_proto::control::ErrorCode::CpuMismatch);
        assert!(refused.to_string().contains("MSR 0x3a"), "{refused}");
    }
}
