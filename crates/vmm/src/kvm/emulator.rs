//! What differs where QEMU emulates the processor that KVM runs on.

use std::arch::x86_64::__cpuid;

use kvm_bindings::{CpuId, kvm_xcr, kvm_xcrs};
use kvm_ioctls::VcpuFd;

use crate::error::Error;

/// Whether QEMU emulates this processor.
#[must_use]
pub fn is_here() -> bool {
    const HYPERVISOR: u32 = 1 << 31;
    let leaf = __cpuid(0x4000_0000);
    let hypervisor = __cpuid(1).ecx & HYPERVISOR != 0;
    is_called(hypervisor.then_some([leaf.ebx, leaf.ecx, leaf.edx]))
}

/// `hypervisor` is what the one above us calls itself, if there is one.
fn is_called(hypervisor: Option<[u32; 3]>) -> bool {
    hypervisor == Some([*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes))
}

/// Has a fresh vCPU begin with all states of registers enabled that it is shown.
///
/// QEMU 7.2 does not tell KVM when a guest enables them (XSETBV), so KVM would show the guest the
/// size of a smaller save area, and save less of it.  The kernel of such a guest finds the sizes
/// inconsistent and does without XSAVE and AVX.  A guest that enables these states itself changes
/// nothing.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM refuses.
pub fn enable_states(vcpu: &VcpuFd, shown: &CpuId) -> Result<(), Error> {
    let Some(value) = states(shown) else { return Ok(()) };
    let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..Default::default() };
    xcrs.xcrs[0] = kvm_xcr { xcr: 0, value, ..Default::default() };
    vcpu.set_xcrs(&xcrs).map_err(Error::kvm("KVM_SET_XCRS"))
}

/// XCR0 with all states that a vCPU is shown; None if it has no XSAVE.
fn states(shown: &CpuId) -> Option<u64> {
    const XSAVE: u32 = 1 << 26;
    let entry = |function| shown.as_slice().iter().find(|entry| entry.function == function);
    let (features, states) = (entry(1)?, entry(0xd)?);
    (features.ecx & XSAVE != 0).then_some(u64::from(states.eax) | u64::from(states.edx) << 32)
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    #[test]
    fn an_emulator_is_known_by_its_name() {
        let kvm = [*b"KVMK", *b"VMKV", *b"M\0\0\0"].map(u32::from_le_bytes);
        let emulator = [*b"TCGT", *b"CGTC", *b"GTCG"].map(u32::from_le_bytes);

        assert_eq!([None, Some(kvm), Some(emulator)].map(is_called), [false, false, true]);
    }

    #[test]
    fn all_states_that_are_shown_are_enabled_where_there_is_xsave() {
        let shown = |ecx| {
            let entry =
                |function, eax, ecx| kvm_cpuid_entry2 { function, eax, ecx, ..Default::default() };
            CpuId::from_entries(&[entry(1, 0, ecx), entry(0xd, 7, 0)]).unwrap()
        };

        assert_eq!(states(&shown(1 << 26)), Some(7));
        assert_eq!(states(&shown(0)), None);
    }
}
