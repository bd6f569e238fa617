//! The KVM virtual machine itself: created over guest memory, its chips saved and put back.
//!
//! In the order of `docs/explanation/spawn.md`: what waits for a grace period in
//! the kernel (memory slots) comes before vCPUs exist, and nothing is registered
//! on KVM's I/O bus at all, since each registration is such a wait.  Devices are
//! reached through exits to user space.

use std::os::fd::{FromRawFd, IntoRawFd};

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data, kvm_irqchip,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Error;
use crate::layout;
use crate::sys::descriptors;

/// Opens KVM.
///
/// # Errors
///
/// [`Error::Io`].
pub fn open() -> Result<Kvm, Error> {
    let file = descriptors::open_kvm()?;
    // SAFETY: the descriptor is of KVM, ours, and in nothing else from now on.
    Ok(unsafe { Kvm::from_raw_fd(file.into_raw_fd()) })
}

/// Creates a VM with interrupt controllers over `memory`, without vCPUs.
///
/// # Errors
///
/// [`Error::Kvm`] naming the ioctl that failed.
pub fn create(kvm: &Kvm, memory: &GuestMemoryMmap) -> Result<VmFd, Error> {
    let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(Error::kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(layout::KVM_TSS).map_err(Error::kvm("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
    for (slot, region) in (0..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region stays mapped as long as any clone of `memory` lives, and the machine
        // that owns this VM owns one; regions do not overlap, by construction of the layout.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(Error::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    }
    Ok(vm)
}

/// Reads both PICs and the I/O APIC.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn save_irqchips(vm: &VmFd) -> Result<Vec<kvm_irqchip>, Error> {
    [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
        .into_iter()
        .map(|chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map_err(Error::kvm("KVM_GET_IRQCHIP"))?;
            Ok(chip)
        })
        .collect()
}

/// Puts back what [`save_irqchips`] read.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn restore_irqchips(vm: &VmFd, chips: &[kvm_irqchip]) -> Result<(), Error> {
    chips.iter().try_for_each(|chip| vm.set_irqchip(chip).map_err(Error::kvm("KVM_SET_IRQCHIP")))
}

/// Reads kvmclock.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn save_clock(vm: &VmFd) -> Result<kvm_clock_data, Error> {
    vm.get_clock().map_err(Error::kvm("KVM_GET_CLOCK"))
}

/// Lets kvmclock go on from where it was saved, so that the guest's monotonic time has no gap.
///
/// The time that has passed outside shows only in the wall clock, which the agent sets.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn restore_clock(vm: &VmFd, saved: &kvm_clock_data) -> Result<(), Error> {
    let clock = kvm_clock_data { clock: saved.clock, ..Default::default() };
    vm.set_clock(&clock).map_err(Error::kvm("KVM_SET_CLOCK"))
}
