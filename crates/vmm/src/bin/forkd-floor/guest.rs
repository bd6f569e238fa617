//! The least guest there is: page tables, a program, and a processor in long mode.

use std::error::Error;
use std::fs::File;
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use kvm_bindings::{CpuId, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{FileOffset, MmapRegion};

/// Whatever went wrong, in words.
pub type Failure = Box<dyn Error>;

/// Size of a page.
pub const PAGE_BYTES: u32 = 4096;
/// How much of the image is in memory from the start.
pub const RESIDENT_BYTES: u32 = 100 << 20;
/// The port that programs write to when they have something to say.
pub const PORT: u16 = 0x80;

const PML4: u32 = 0x2000;
const PDPT: u32 = 0x3000;
/// One directory for each GiB, one behind the other.
const PD: u32 = 0x4000;
const CODE: u32 = 0x1_0000;
const STACK_TOP: u32 = 0x2_0000;
const GIB: u64 = 1 << 30;
/// Where VT-x keeps a task state segment: three pages below the BIOS that no memslot covers.
const TSS: usize = 0xfffb_d000;

/// Returns an anonymous file of `bytes` that holds a guest: page tables, program, and some resident
/// memory.
pub fn image(bytes: u64, program: &[u8]) -> Result<File, Failure> {
    // SAFETY: the name is a C string that outlives the call, which changes no memory of ours.
    let descriptor = unsafe { libc::memfd_create(c"floor".as_ptr(), libc::MFD_CLOEXEC) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error().into());
    }
    // SAFETY: the kernel opened it for us a moment ago; nothing else knows its number.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(bytes)?;
    for page in 0..RESIDENT_BYTES / PAGE_BYTES {
        file.write_all_at(&[1], u64::from(page * PAGE_BYTES))?;
    }
    // Present, writable, user, accessed; the last level maps 2 MiB each and is dirty, too.
    file.write_all_at(&u64::from(PDPT | 0x27).to_le_bytes(), PML4.into())?;
    for (directory, at) in (0..bytes.div_ceil(GIB)).zip((u64::from(PD)..).step_by(4096)) {
        file.write_all_at(&(at | 0x27).to_le_bytes(), u64::from(PDPT) + 8 * directory)?;
        for entry in 0..512 {
            let target = (directory * GIB + (entry << 21)) | 0xe7;
            file.write_all_at(&target.to_le_bytes(), at + 8 * entry)?;
        }
    }
    file.write_all_at(program, CODE.into())?;
    Ok(file)
}

/// Maps `bytes` of `image` privately; a write to a page copies it.
pub fn map(image: File, bytes: usize) -> Result<MmapRegion, Failure> {
    let flags = libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let view = FileOffset::new(image, 0);
    Ok(MmapRegion::build(Some(view), bytes, protection, flags)?)
}

/// Gives `vm` memory: what is mapped at `start`, from guest address `address` on.
///
/// # Safety
///
/// The range stays mapped as long as the VM lives.
pub unsafe fn give(
    vm: &VmFd,
    slot: u32,
    address: u64,
    start: *mut u8,
    bytes: usize,
) -> Result<(), Failure> {
    let region = kvm_userspace_memory_region {
        slot,
        guest_phys_addr: address,
        memory_size: bytes as u64,
        userspace_addr: start as u64,
        ..Default::default()
    };
    // SAFETY: as the caller promises.
    unsafe { vm.set_user_memory_region(region) }?;
    Ok(())
}

/// Puts the interrupt controllers into a VM that was just made.
pub fn add_chips(vm: &VmFd) -> Result<(), Failure> {
    vm.set_tss_address(TSS)?;
    vm.create_irq_chip()?;
    Ok(())
}

/// Returns the processor's features.
pub fn cpuid(kvm: &Kvm) -> Result<CpuId, Failure> {
    Ok(kvm.get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)?)
}

/// Puts a vCPU before the program's first instruction, with `rsi` and `rcx` as it finds them.
pub fn set_state(vcpu: &VcpuFd, cpuid: &CpuId, rsi: u64, rcx: u64) -> Result<(), Failure> {
    vcpu.set_cpuid2(cpuid)?;
    let mut system = vcpu.get_sregs()?;
    (system.cr0, system.cr3, system.cr4, system.efer) = (0x8005_0033, PML4.into(), 0x620, 0xd01);
    let code = segment(0x10, 11, 1, 0);
    let data = segment(0x18, 3, 0, 1);
    system.cs = code;
    (system.ds, system.es, system.fs, system.gs, system.ss) = (data, data, data, data, data);
    vcpu.set_sregs(&system)?;
    vcpu.set_regs(&kvm_regs {
        rip: CODE.into(),
        rsp: STACK_TOP.into(),
        rsi,
        rcx,
        rflags: 2,
        ..Default::default()
    })?;
    Ok(())
}

fn segment(selector: u16, kind: u8, long: u8, wide: u8) -> kvm_segment {
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        l: long,
        db: wide,
        g: 1,
        ..Default::default()
    }
}
