//! Model specific registers: which are part of a snapshot, reading and writing them.
//!
//! A snapshot has those that are not as in a fresh vCPU of the same CPUID.  So one that KVM came
//! to know later, or that this host has and others have not, matters to guests that use it only.
//!
//! [`ALWAYS`] are those whose first value is the host's.

use std::collections::{BTreeMap, BTreeSet};

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

use crate::error::Error;
use crate::kvm::cpuid::{Vendor, arch_capabilities};

/// Most MSRs that one `KVM_GET_MSRS` takes (`MAX_IO_MSRS` in the kernel).
const PER_CALL: usize = 255;

/// Time stamp counter.
pub const IA32_TSC: u32 = 0x10;
/// When the LAPIC's timer goes off.
pub const IA32_TSC_DEADLINE: u32 = 0x6e0;
/// `Documentation/virt/kvm/x86/msr.rst`
const KVM_ASYNC_PF_EN: u32 = 0x4b56_4d02;
const IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;
const IA32_UCODE_REV: u32 = 0x8b;
const PLATFORM_INFO: u32 = 0xce;
/// Whether `LFENCE` serialises.
const AMD_DE_CFG: u32 = 0xc001_1029;

/// Those that a snapshot has whatever they are.
const ALWAYS: [u32; 7] = [
    IA32_TSC,
    IA32_TSC_DEADLINE,
    IA32_UCODE_REV,
    PLATFORM_INFO,
    arch_capabilities::MSR,
    IA32_MISC_ENABLE,
    AMD_DE_CFG,
];

/// Those that KVM keeps and does not list: of memory types, and what a machine check reports.
const UNLISTED: &[(u32, u32, usize)] = &[
    (0x200, 0x20f, 1),
    (0x250, 0x250, 1),
    (0x258, 0x259, 1),
    (0x268, 0x26f, 1),
    (MTRR_DEF_TYPE, MTRR_DEF_TYPE, 1),
    (0x17b, 0x17b, 1),
    // The first of each bank's four.
    (0x400, 0x47c, 4),
];

/// Those that are no part of a snapshot, since guests are not shown what they belong to.
const HIDDEN: &[(u32, u32)] = &[
    // The PMU's, as Intel has it and as AMD has it.
    (0xc1, 0xc8),
    (0x186, 0x18d),
    (0x309, 0x30c),
    (0x329, 0x329),
    (0x345, 0x345),
    (0x38d, 0x390),
    (0x3f1, 0x3f2),
    (0x600, 0x600),
    (0xc000_0300, 0xc000_0303),
    (0xc001_0000, 0xc001_0007),
    (0xc001_0200, 0xc001_020b),
    // WAITPKG, AMX, VMX, traces, CET, the LBR.
    (0xe1, 0xe1),
    (0x1c4, 0x1c5),
    (0x480, 0x4ff),
    (0x560, 0x58f),
    (0x6a0, 0x6a8),
    (0x14ce, 0x14cf),
    (0x1200, 0x121f),
    (0x1500, 0x151f),
    (0x1600, 0x161f),
];

/// What a fresh vCPU has in each MSR that is saved here.
pub type Defaults = [kvm_msr_entry];

/// The MSRs of which KVM may know, in the order in which they are to be restored.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM does not tell.
pub fn indices(kvm: &Kvm, vendor: Vendor) -> Result<Vec<u32>, Error> {
    let list = kvm.get_msr_index_list().map_err(Error::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    Ok(kept(list.as_slice(), vendor))
}

fn kept(listed: &[u32], vendor: Vendor) -> Vec<u32> {
    // KVM lists the TSC only on some kernels, and can read and write it on all.
    let moving = [IA32_TSC, IA32_TSC_DEADLINE];
    let unlisted = UNLISTED.iter().flat_map(|(first, last, step)| (*first..=*last).step_by(*step));
    let hidden = |index: &u32| {
        moving.contains(index)
            || HIDDEN.iter().any(|(first, last)| (first..=last).contains(&index))
            || *index == arch_capabilities::MSR && vendor == Vendor::Amd
    };
    let known: BTreeSet<u32> = listed.iter().copied().chain(unlisted).collect();
    known.into_iter().filter(|index| !hidden(index)).chain(moving).collect()
}

/// Reads MSRs of a vCPU, less those that it does not have.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM refuses the call as such.
pub fn read(
    vcpu: &VcpuFd,
    indices: impl IntoIterator<Item = u32>,
) -> Result<Vec<kvm_msr_entry>, Error> {
    let wanted: Vec<kvm_msr_entry> =
        indices.into_iter().map(|index| kvm_msr_entry { index, ..Default::default() }).collect();
    let mut read = Vec::with_capacity(wanted.len());
    let mut rest = wanted.as_slice();
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(PER_CALL)];
        let mut msrs = entries(chunk)?;
        let count = vcpu.get_msrs(&mut msrs).map_err(Error::kvm("KVM_GET_MSRS"))?;
        read.extend_from_slice(&msrs.as_slice()[..count]);
        // KVM stops at the first it cannot read: listed, but not for this CPUID.  Skip that one.
        let skipped = usize::from(count < chunk.len());
        rest = &rest[count + skipped..];
    }
    Ok(read)
}

/// Reads what a snapshot has of a vCPU's MSRs: those that it always has, and those that are not as
/// at first.
///
/// # Errors
///
/// As [`read`].
pub fn save(vcpu: &VcpuFd, defaults: &Defaults) -> Result<Vec<kvm_msr_entry>, Error> {
    let now = read(vcpu, defaults.iter().map(|msr| msr.index))?;
    Ok(changed(now, defaults))
}

fn changed(mut now: Vec<kvm_msr_entry>, defaults: &Defaults) -> Vec<kvm_msr_entry> {
    let first = values(defaults);
    now.retain(|msr| ALWAYS.contains(&msr.index) || first.get(&msr.index) != Some(&msr.data));
    now
}

/// What to write into a vCPU that has `now`, so that it has what was `saved`, in batches, in order.
///
/// Asynchronous page faults are enabled anew even if they are: this has KVM wake whatever in
/// the guest waits for a page of the host's, whose arrival nobody would tell it any more.
/// The TSC is not among them: its value alone does not put it back ([`crate::kvm::tsc`]).
///
/// # Errors
///
/// [`Error::Damaged`] if there are more than KVM could ever have listed.
pub fn to_write(
    saved: &[kvm_msr_entry],
    now: &[kvm_msr_entry],
    defaults: &Defaults,
) -> Result<Vec<Msrs>, Error> {
    let anew = [IA32_TSC_DEADLINE, KVM_ASYNC_PF_EN];
    let (has, keeps) = (values(now), values(saved));
    let forgotten = defaults.iter().filter(|msr| !keeps.contains_key(&msr.index));
    // Saved ones last: the deadline is the last of them.
    let differing: Vec<kvm_msr_entry> = forgotten
        .filter(|msr| has.get(&msr.index) != Some(&msr.data))
        .chain(
            saved
                .iter()
                .filter(|msr| anew.contains(&msr.index) || has.get(&msr.index) != Some(&msr.data)),
        )
        .filter(|msr| msr.index != IA32_TSC)
        .copied()
        .collect();
    differing.chunks(PER_CALL).map(entries).collect()
}

/// Writes what [`to_write`] says.
///
/// # Errors
///
/// [`Error::Kvm`]; [`Error::CpuMismatch`] naming an MSR that this host refuses.
pub fn write(vcpu: &VcpuFd, batches: &[Msrs]) -> Result<(), Error> {
    for batch in batches {
        let written = vcpu.set_msrs(batch).map_err(Error::kvm("KVM_SET_MSRS"))?;
        if let Some(refused) = batch.as_slice().get(written) {
            return Err(Error::CpuMismatch(format!("MSR {:#x}", refused.index)));
        }
    }
    Ok(())
}

/// Writes those of a vCPU that is about to boot; `capabilities` are what its guest is told of
/// weaknesses, if its processor is one that says so.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM refuses them.
pub fn set_up_boot(vcpu: &VcpuFd, capabilities: Option<u64>) -> Result<(), Error> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let mut msrs = vec![
        entry(IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK),
    ];
    msrs.extend(capabilities.map(|value| entry(arch_capabilities::MSR, value)));
    write(vcpu, &[entries(&msrs)?])
}

/// The value of one of `msrs`.
#[must_use]
pub fn value_of(msrs: &[kvm_msr_entry], index: u32) -> Option<u64> {
    msrs.iter().find(|msr| msr.index == index).map(|msr| msr.data)
}

fn values(msrs: &[kvm_msr_entry]) -> BTreeMap<u32, u64> {
    msrs.iter().map(|msr| (msr.index, msr.data)).collect()
}

fn entries(msrs: &[kvm_msr_entry]) -> Result<Msrs, Error> {
    Msrs::from_entries(msrs)
        .map_err(|_| Error::Damaged("the state holds more MSRs than KVM knows".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn msr(index: u32, data: u64) -> kvm_msr_entry {
        kvm_msr_entry { index, data, ..Default::default() }
    }

    fn written(saved: &[kvm_msr_entry], now: &[kvm_msr_entry]) -> Vec<(u32, u64)> {
        let defaults = [msr(0x48, 0), msr(0x174, 0), msr(0x277, 6)];
        let batches = to_write(saved, now, &defaults).unwrap();
        let all = batches.iter().flat_map(|batch| batch.as_slice().to_vec());
        all.map(|msr| (msr.index, msr.data)).collect()
    }

    #[test]
    fn an_msr_that_is_as_at_first_is_no_part_of_a_snapshot() {
        let defaults = [msr(0x48, 0), msr(0x277, 6), msr(PLATFORM_INFO, 9), msr(IA32_TSC, 0)];
        let now = vec![msr(0x48, 0), msr(0x277, 7), msr(PLATFORM_INFO, 9), msr(IA32_TSC, 5)];

        let saved = changed(now, &defaults);

        let indices: Vec<_> = saved.iter().map(|msr| msr.index).collect();
        assert_eq!(indices, [0x277, PLATFORM_INFO, IA32_TSC]);
    }

    #[test]
    fn what_a_guest_has_written_since_goes_back_to_what_it_was_at_first() {
        let saved = [msr(0x174, 3), msr(IA32_TSC, 50), msr(IA32_TSC_DEADLINE, 70)];

        let fresh = written(&saved, &[msr(0x48, 0), msr(0x174, 0), msr(0x277, 6)]);
        let used = written(&saved, &[msr(0x48, 1), msr(0x174, 3), msr(0x277, 7)]);

        assert_eq!(fresh, [(0x174, 3), (IA32_TSC_DEADLINE, 70)]);
        assert_eq!(used, [(0x48, 0), (0x277, 6), (IA32_TSC_DEADLINE, 70)]);
    }

    #[test]
    fn asynchronous_page_faults_are_enabled_anew() {
        let saved = [msr(KVM_ASYNC_PF_EN, 1)];
        let now = [msr(0x48, 0), msr(0x174, 0), msr(0x277, 6), msr(KVM_ASYNC_PF_EN, 1)];

        assert_eq!(written(&saved, &now), [(KVM_ASYNC_PF_EN, 1)]);
    }

    #[test]
    fn the_pmu_and_amds_capabilities_are_no_part_of_a_snapshot_and_memory_types_are() {
        let listed = [0xc1, 0x345, 0x10a, 0x48, IA32_TSC, 0xc001_0201, 0x480];

        let (amd, intel) = (kept(&listed, Vendor::Amd), kept(&listed, Vendor::Intel));

        assert!([0xc1, 0x345, 0x10a, 0xc001_0201, 0x480].iter().all(|msr| !amd.contains(msr)));
        assert!([0x48, 0x2ff, 0x250, 0x26f, 0x400, 0x404].iter().all(|msr| amd.contains(msr)));
        assert!(!amd.contains(&0x401));
        assert!(intel.contains(&0x10a) && !intel.contains(&0x345));
        assert_eq!(amd[amd.len() - 2..], [IA32_TSC, IA32_TSC_DEADLINE]);
    }
}
