//! Mapping a guest's pages before the guest touches them (`KVM_PRE_FAULT_MEMORY`, since Linux
//! 6.12).
//!
//! Each page that a guest touches for the first time is an exit, unless KVM was asked to map it
//! before.

use std::os::fd::AsRawFd;

use kvm_bindings::{KVM_CAP_PRE_FAULT_MEMORY, kvm_pre_fault_memory};
use kvm_ioctls::{Kvm, VcpuFd};

const PRE_FAULT_MEMORY: libc::Ioctl = 0xc040_aed5;

/// Whether this host's KVM can.
#[must_use]
pub fn is_offered(kvm: &Kvm) -> bool {
    kvm.check_extension_raw(KVM_CAP_PRE_FAULT_MEMORY.into()) > 0
}

/// Maps `bytes` of what `vcpu` sees from `start` on.  Returns whether KVM did all of it: what is
/// left is mapped when the guest touches it.
#[must_use]
pub fn map(vcpu: &VcpuFd, start: u64, bytes: u64) -> bool {
    let mut left = kvm_pre_fault_memory { gpa: start, size: bytes, ..Default::default() };
    whole(&mut left, |left| {
        // SAFETY: KVM reads and writes the structure, which outlives the call, and takes the pages
        // of the guest's memory as if the guest read them.
        unsafe { libc::ioctl(vcpu.as_raw_fd(), PRE_FAULT_MEMORY, &raw mut *left) };
    })
}

/// Has `call` go on, which a signal may end before it has done anything or all, until nothing is
/// left or it makes no progress.
fn whole(left: &mut kvm_pre_fault_memory, mut call: impl FnMut(&mut kvm_pre_fault_memory)) -> bool {
    while left.size > 0 {
        let before = left.size;
        call(left);
        if left.size >= before {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(bytes: u64) -> kvm_pre_fault_memory {
        kvm_pre_fault_memory { gpa: 1 << 20, size: bytes, ..Default::default() }
    }

    fn advance(left: &mut kvm_pre_fault_memory, bytes: u64) {
        left.gpa += bytes;
        left.size -= bytes;
    }

    #[test]
    fn a_call_that_was_interrupted_goes_on_where_it_was() {
        let mut calls = Vec::new();
        let done = whole(&mut range(3 << 12), |left| {
            calls.push((left.gpa, left.size));
            advance(left, 1 << 12);
        });

        assert!(done);
        let page = 1 << 12;
        assert_eq!(calls, [0, 1, 2].map(|at| ((1 << 20) + at * page, (3 - at) * page)));
    }

    #[test]
    fn a_call_that_makes_no_progress_is_the_last() {
        let mut calls = 0;
        let done = whole(&mut range(3 << 12), |left| {
            calls += 1;
            if calls == 1 {
                advance(left, 1 << 12);
            }
        });

        assert_eq!((done, calls), (false, 2));
    }
}
