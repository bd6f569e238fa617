//! One vCPU's state: what CPUID shows, what a snapshot keeps, and the order of putting it back.
//!
//! The order of restoring matters and is documented nowhere in one place; it is
//! that of the dependencies in `arch/x86/kvm`:
//!
//! 1. CPUID, since it decides which of the later values are legal;
//! 2. special registers, which hold the APIC base;
//! 3. XCR0, then XSAVE, which is checked against it;
//! 4. LAPIC, the TSC ([`crate::kvm::tsc`]), then MSRs: `IA32_TSC_DEADLINE` is dropped unless the
//!    LAPIC timer is already in deadline mode, and it is relative to the TSC, so it is the last;
//! 5. pending events, and at the end the run state.

use std::collections::BTreeMap;

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE,
    KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::kvm::stored;
use crate::kvm::tsc::{Counter, Counters};
use crate::layout::PAGE_SIZE;

/// Most MSRs that one `KVM_GET_MSRS` takes (`MAX_IO_MSRS` in the kernel).
const MSRS_PER_CALL: usize = 255;

/// Time stamp counter.
pub const MSR_IA32_TSC: u32 = 0x10;
const MSR_IA32_TSC_DEADLINE: u32 = 0x6e0;
/// `Documentation/virt/kvm/x86/msr.rst`
const MSR_KVM_ASYNC_PF_EN: u32 = 0x4b56_4d02;
const MSR_IA32_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLED_WRITE_BACK: u64 = (1 << 11) | 6;

/// RFLAGS: interrupts are let through.
const RFLAGS_IF: u64 = 1 << 9;

/// Whether nothing can have a vCPU, which must not be running, execute another instruction, unless
/// another one does so: it was halted without interrupts, or was never started.
///
/// An NMI could, but nobody sends one in a guest of which all vCPUs have come to this.
///
/// # Errors
///
/// [`Error::Kvm`].
pub fn is_dead(vcpu: &VcpuFd) -> Result<bool, Error> {
    let state = vcpu.get_mp_state().map_err(Error::kvm("KVM_GET_MP_STATE"))?.mp_state;
    let rflags = vcpu.get_regs().map_err(Error::kvm("KVM_GET_REGS"))?.rflags;
    Ok(is_dead_as(state, rflags))
}

fn is_dead_as(mp_state: u32, rflags: u64) -> bool {
    match mp_state {
        KVM_MP_STATE_UNINITIALIZED => true,
        KVM_MP_STATE_HALTED => rflags & RFLAGS_IF == 0,
        _ => false,
    }
}

/// Everything that is kept of one vCPU.
#[expect(clippy::unsafe_derive_deserialize, reason = "no method relies on what the fields hold")]
#[derive(Debug, Serialize, Deserialize)]
pub struct VcpuState {
    /// What CPUID shows to this vCPU.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// General registers.
    pub regs: kvm_regs,
    /// Segments, control registers, APIC base.
    pub sregs: kvm_sregs,
    /// FPU, SSE and AVX registers.
    pub xsave: kvm_xsave,
    /// XCR0.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug: kvm_debugregs,
    /// Local APIC.
    pub lapic: kvm_lapic_state,
    /// Every MSR that KVM lists and lets be read; the TSC and then its deadline are last.
    pub msrs: Vec<kvm_msr_entry>,
    /// Exceptions, interrupts and NMIs under way.
    pub events: kvm_vcpu_events,
    /// Running, halted, or waiting for the start-up IPI.
    pub mp_state: kvm_mp_state,
    /// TSC frequency, in kHz.
    pub tsc_khz: u32,
    /// What its TSC had more than the host's, if the kernel told.
    pub tsc_offset: Option<u64>,
}

/// A vCPU that is put back, and the counters of all of its machine.
#[derive(Clone, Copy, Debug)]
pub struct Numbered<'a> {
    /// Its number.
    pub id: usize,
    /// KVM's.
    pub fd: &'a VcpuFd,
    /// Those of the same machine.
    pub counters: &'a Counters,
}

impl VcpuState {
    /// Reads a vCPU that is not running and has completed its last exit.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] naming the ioctl that failed.
    pub fn save(vcpu: &VcpuFd, msr_indices: &[u32]) -> Result<Self, Error> {
        // Events before registers: KVM may fold a pending exception into them on reading.
        let mp_state = vcpu.get_mp_state().map_err(Error::kvm("KVM_GET_MP_STATE"))?;
        let events = vcpu.get_vcpu_events().map_err(Error::kvm("KVM_GET_VCPU_EVENTS"))?;
        let cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm("KVM_GET_CPUID2"))?;
        let cpuid = stored::filled(cpuid.as_slice()).to_vec();
        // The deadline before the LAPIC: a timer that goes off in between is then in both, and not
        // in neither.
        let mut msrs = read_msrs(vcpu, msr_indices)?;
        let lapic = vcpu.get_lapic().map_err(Error::kvm("KVM_GET_LAPIC"))?;
        renew_deadline(&mut msrs, &lapic, mp_state.mp_state);
        Ok(Self {
            cpuid,
            regs: vcpu.get_regs().map_err(Error::kvm("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?,
            xsave: vcpu.get_xsave().map_err(Error::kvm("KVM_GET_XSAVE"))?,
            xcrs: vcpu.get_xcrs().map_err(Error::kvm("KVM_GET_XCRS"))?,
            debug: vcpu.get_debug_regs().map_err(Error::kvm("KVM_GET_DEBUGREGS"))?,
            lapic,
            msrs,
            events,
            mp_state,
            tsc_khz: vcpu.get_tsc_khz().unwrap_or(0),
            tsc_offset: vcpu.offset()?,
        })
    }

    /// The TSC when it was read.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        value_of(&self.msrs, MSR_IA32_TSC).unwrap_or(0)
    }

    /// Puts the state into a fresh vCPU; see the module's documentation for the order.
    ///
    /// `msrs` come from [`Self::msrs_beyond`], `cpuid` from [`Self::kvm_cpuid`]: prepared once for
    /// all forks of a snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] naming the ioctl that failed, [`Error::CpuMismatch`] naming an MSR that this
    /// host refuses.
    pub fn restore(&self, vcpu: &Numbered, cpuid: &CpuId, msrs: &[Msrs]) -> Result<(), Error> {
        vcpu.fd.set_cpuid2(cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
        self.write(vcpu, msrs)
    }

    fn write(&self, to: &Numbered, msrs: &[Msrs]) -> Result<(), Error> {
        let vcpu = to.fd;
        vcpu.set_sregs(&self.sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
        vcpu.set_regs(&self.regs).map_err(Error::kvm("KVM_SET_REGS"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(Error::kvm("KVM_SET_XCRS"))?;
        // SAFETY: AMX, whose state would exceed the 4 KiB of `kvm_xsave`, is masked from CPUID.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(Error::kvm("KVM_SET_XSAVE"))?;
        vcpu.set_debug_regs(&self.debug).map_err(Error::kvm("KVM_SET_DEBUGREGS"))?;
        vcpu.set_lapic(&self.lapic).map_err(Error::kvm("KVM_SET_LAPIC"))?;
        to.counters.put_back(to.id, vcpu)?;
        write_msrs(vcpu, msrs)?;
        vcpu.set_vcpu_events(&self.events).map_err(Error::kvm("KVM_SET_VCPU_EVENTS"))?;
        vcpu.set_mp_state(self.mp_state).map_err(Error::kvm("KVM_SET_MP_STATE"))
    }

    /// Puts the state back into a vCPU that has run since it had it.
    ///
    /// # Errors
    ///
    /// As [`Self::restore`].
    pub fn reinstate(&self, vcpu: &Numbered, msr_indices: &[u32]) -> Result<(), Error> {
        let msrs = self.msrs_beyond(&read_msrs(vcpu.fd, msr_indices)?)?;
        // Its TLB holds what the guest's page tables have said since, and KVM does not see that we
        // have written them back.  It forgets translations where CR3 changes.
        let elsewhere = kvm_sregs { cr3: self.sregs.cr3 ^ PAGE_SIZE, ..self.sregs };
        vcpu.fd.set_sregs(&elsewhere).map_err(Error::kvm("KVM_SET_SREGS"))?;
        // CPUID cannot change once a vCPU has run, and has not.
        self.write(vcpu, &msrs)
    }

    /// The MSRs to write into a vCPU that already has `defaults`, in batches, in order.
    ///
    /// Asynchronous page faults are enabled anew even if they are: this has KVM wake whatever in
    /// the guest waits for a page of the host's, whose arrival nobody would tell it any more.
    /// The TSC is not among them: its value alone does not put it back ([`Counters`]).
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if there are more than KVM could ever have listed.
    pub fn msrs_beyond(&self, defaults: &[kvm_msr_entry]) -> Result<Vec<Msrs>, Error> {
        let known: BTreeMap<u32, u64> = defaults.iter().map(|msr| (msr.index, msr.data)).collect();
        let always = [MSR_IA32_TSC_DEADLINE, MSR_KVM_ASYNC_PF_EN];
        let changed: Vec<kvm_msr_entry> = self
            .msrs
            .iter()
            .filter(|msr| msr.index != MSR_IA32_TSC)
            .filter(|msr| always.contains(&msr.index) || known.get(&msr.index) != Some(&msr.data))
            .copied()
            .collect();
        changed
            .chunks(MSRS_PER_CALL)
            .map(|chunk| Msrs::from_entries(chunk).map_err(|_| too_many("MSRs")))
            .collect()
    }

    /// The CPUID entries as KVM takes them.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if there are more than KVM could ever have listed.
    pub fn kvm_cpuid(&self) -> Result<CpuId, Error> {
        CpuId::from_entries(stored::filled(&self.cpuid)).map_err(|_| too_many("CPUID entries"))
    }
}

/// Has a timer that may have been lost go off: its deadline is zero, so it has, and its interrupt
/// is neither pending nor under way.
///
/// A vCPU that is halted had no timer, and is left alone: it would wake up once for nothing.  One
/// that runs without a timer takes the interrupt, and finds nothing due.
fn renew_deadline(msrs: &mut [kvm_msr_entry], lapic: &kvm_lapic_state, mp_state: u32) {
    const TIMER: usize = 0x320;
    const MASKED: u32 = 1 << 16;
    const MODE: u32 = 3 << 17;
    const DEADLINE_MODE: u32 = 2 << 17;
    const IN_SERVICE: usize = 0x100;
    const REQUESTED: usize = 0x200;
    let register = |at: usize| {
        let byte = |number: usize| lapic.regs[at + number].cast_unsigned();
        u32::from_le_bytes(std::array::from_fn(byte))
    };
    let timer = register(TIMER);
    let vector = timer & 0xff;
    let (word, bit) = (vector as usize / 32 * 16, 1 << (vector % 32));
    let known = (register(IN_SERVICE + word) | register(REQUESTED + word)) & bit != 0;
    let armed = timer & MASKED == 0 && timer & MODE == DEADLINE_MODE;
    if !armed || known || mp_state != KVM_MP_STATE_RUNNABLE {
        return;
    }
    let now = value_of(msrs, MSR_IA32_TSC);
    let deadline = msrs.iter_mut().find(|msr| msr.index == MSR_IA32_TSC_DEADLINE);
    if let (Some(now), Some(deadline)) = (now, deadline.filter(|msr| msr.data == 0)) {
        deadline.data = now;
    }
}

fn value_of(msrs: &[kvm_msr_entry], index: u32) -> Option<u64> {
    msrs.iter().find(|msr| msr.index == index).map(|msr| msr.data)
}

fn too_many(what: &str) -> Error {
    Error::Damaged(format!("the state holds more {what} than KVM knows"))
}

/// Reads the MSRs that this host lists, of a vCPU that may be fresh.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM refuses the call as such.
pub fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, Error> {
    let mut read = Vec::with_capacity(indices.len());
    let mut rest = indices;
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(MSRS_PER_CALL)];
        let wanted: Vec<kvm_msr_entry> = chunk
            .iter()
            .map(|index| kvm_msr_entry { index: *index, ..Default::default() })
            .collect();
        let mut msrs = Msrs::from_entries(&wanted).map_err(|_| too_many("MSRs"))?;
        let count = vcpu.get_msrs(&mut msrs).map_err(Error::kvm("KVM_GET_MSRS"))?;
        read.extend_from_slice(&msrs.as_slice()[..count]);
        // KVM stops at the first it cannot read: listed, but not for this CPUID.  Skip that one.
        let skipped = usize::from(count < chunk.len());
        rest = &rest[count + skipped..];
    }
    Ok(read)
}

fn write_msrs(vcpu: &VcpuFd, batches: &[Msrs]) -> Result<(), Error> {
    for batch in batches {
        let written = vcpu.set_msrs(batch).map_err(Error::kvm("KVM_SET_MSRS"))?;
        if let Some(refused) = batch.as_slice().get(written) {
            return Err(Error::CpuMismatch(format!("MSR {:#x}", refused.index)));
        }
    }
    Ok(())
}

/// The MSRs that this host's KVM lists, in the order in which they are to be restored.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM does not tell.
pub fn msr_indices(kvm: &Kvm) -> Result<Vec<u32>, Error> {
    let list = kvm.get_msr_index_list().map_err(Error::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    let moving = [MSR_IA32_TSC, MSR_IA32_TSC_DEADLINE];
    let mut indices: Vec<u32> =
        list.as_slice().iter().copied().filter(|index| !moving.contains(index)).collect();
    // KVM lists the TSC only on some kernels, and can read and write it on all.
    indices.extend(moving);
    Ok(indices)
}

/// MSRs of a vCPU that is about to boot.
///
/// # Errors
///
/// [`Error::Kvm`] if KVM refuses them.
pub fn set_boot_msrs(vcpu: &VcpuFd) -> Result<(), Error> {
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let msrs = Msrs::from_entries(&[
        entry(MSR_IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MSR_MTRR_DEF_TYPE, MTRR_ENABLED_WRITE_BACK),
    ])
    .map_err(|_| too_many("MSRs"))?;
    write_msrs(vcpu, &[msrs])
}

/// What vCPU `id` of `vcpus` is shown: all that this host's KVM supports, less what we cannot save,
/// or would not take back ([`stored::is_plain`]).
///
/// # Errors
///
/// [`Error::Kvm`] if KVM does not tell what it supports.
pub fn cpuid_for(kvm: &Kvm, id: u8, vcpus: u8) -> Result<CpuId, Error> {
    let mut cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))?;
    cpuid.retain(stored::is_plain);
    let deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    for entry in cpuid.as_mut_slice() {
        shape(entry, id, vcpus, deadline);
    }
    Ok(cpuid)
}

fn shape(entry: &mut kvm_cpuid_entry2, id: u8, vcpus: u8, deadline: bool) {
    const VMX: u32 = 1 << 5;
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const HTT: u32 = 1 << 28;
    const SVM: u32 = 1 << 2;
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    const AMX_EDX: u32 = (1 << 22) | (1 << 24) | (1 << 25);
    const AMX_XCR0: u32 = 3 << 17;
    let (id, count) = (u32::from(id), u32::from(vcpus));
    match (entry.function, entry.index) {
        (1, _) => {
            entry.ebx = (entry.ebx & 0xffff) | (count << 16) | (id << 24);
            entry.ecx = (entry.ecx & !VMX) | HYPERVISOR;
            if deadline {
                entry.ecx |= TSC_DEADLINE;
            }
            entry.edx = if vcpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
        }
        // Cache sharing: each vCPU is a core of one package.
        (4, _) => entry.eax = (entry.eax & 0x03ff_ffff & !(0xfff << 14)) | ((count - 1) << 26),
        // AMX state does not fit into what we save.
        (7, 0) => entry.edx &= !AMX_EDX,
        (0xb, index) => {
            (entry.eax, entry.ebx) = if index == 0 { (0, 1) } else { (8, count) };
            entry.ecx = index | if index == 0 { 1 << 8 } else { 2 << 8 };
            entry.edx = id;
        }
        (0xd, 0) => entry.eax &= !AMX_XCR0,
        // Nested guests are not part of a snapshot.
        (0x8000_0001, _) => entry.ecx &= !(SVM | TOPOLOGY_EXTENSIONS),
        (0x8000_0008, _) => entry.ecx = count - 1,
        _ => {}
    }
}

/// Refuses to go on if this host lacks a CPU feature that `seen` shows.
///
/// Registers that hold feature bits are compared bit by bit, the vendor as a whole; what merely
/// describes (caches, topology, addresses) is not compared.
///
/// # Errors
///
/// [`Error::CpuMismatch`] naming each register with the missing bits.
pub fn check_features(seen: &[kvm_cpuid_entry2], host: &[kvm_cpuid_entry2]) -> Result<(), Error> {
    type Part = (u32, u32, &'static str, fn(&kvm_cpuid_entry2) -> u32);
    const FEATURES: [Part; 13] = [
        (1, 0, "ecx", |entry| entry.ecx & !((1 << 27) | (1 << 31) | (1 << 24))),
        (1, 0, "edx", |entry| entry.edx & !(1 << 28)),
        (7, 0, "ebx", |entry| entry.ebx),
        (7, 0, "ecx", |entry| entry.ecx & !(1 << 4)),
        (7, 0, "edx", |entry| entry.edx),
        (7, 1, "eax", |entry| entry.eax),
        (0xd, 0, "eax", |entry| entry.eax),
        (0xd, 1, "eax", |entry| entry.eax),
        (0x8000_0001, 0, "ecx", |entry| entry.ecx),
        (0x8000_0001, 0, "edx", |entry| entry.edx),
        (0x8000_0007, 0, "edx", |entry| entry.edx),
        (0x8000_0008, 0, "ebx", |entry| entry.ebx),
        (0x4000_0001, 0, "eax", |entry| entry.eax),
    ];
    let find = |table: &[kvm_cpuid_entry2], function: u32, index: u32| {
        table.iter().find(|entry| entry.function == function && entry.index == index).copied()
    };
    let mut missing = Vec::new();
    for (function, index, register, bits) in FEATURES {
        let wanted = find(seen, function, index).map_or(0, |entry| bits(&entry));
        let offered = find(host, function, index).map_or(0, |entry| bits(&entry));
        let lacking = wanted & !offered;
        if lacking != 0 {
            missing.push(format!("CPUID {function:#x}.{index} {register} bits {lacking:#x}"));
        }
    }
    let vendor = |table: &[kvm_cpuid_entry2]| {
        find(table, 0, 0).map(|entry| (entry.ebx, entry.ecx, entry.edx))
    };
    if vendor(seen) != vendor(host) {
        missing.push("the vendor of the CPU differs".into());
    }
    if missing.is_empty() { Ok(()) } else { Err(Error::CpuMismatch(missing.join(", "))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, ..Default::default() }
    }

    #[test]
    fn only_a_vcpu_that_waits_for_no_interrupt_is_dead() {
        let flags = [0x2, 0x202];
        assert_eq!(flags.map(|flags| is_dead_as(KVM_MP_STATE_HALTED, flags)), [true, false]);
        assert_eq!(flags.map(|flags| is_dead_as(KVM_MP_STATE_UNINITIALIZED, flags)), [true; 2]);
        assert_eq!(flags.map(|flags| is_dead_as(KVM_MP_STATE_RUNNABLE, flags)), [false; 2]);
    }

    #[test]
    fn a_timer_that_is_neither_ahead_nor_pending_goes_off_again() {
        const VECTOR: usize = 0xec;
        const ARMED: u32 = 2 << 17 | 0xec;
        let case = |timer: u32, pending: Option<usize>, deadline, mp_state| {
            let mut lapic = kvm_lapic_state::default();
            for (byte, of) in lapic.regs[0x320..].iter_mut().zip(timer.to_le_bytes()) {
                *byte = of.cast_signed();
            }
            if let Some(register) = pending {
                lapic.regs[register + VECTOR / 32 * 16 + VECTOR % 32 / 8] = 1 << (VECTOR % 8);
            }
            let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
            let mut msrs = [msr(MSR_IA32_TSC, 70), msr(MSR_IA32_TSC_DEADLINE, deadline)];
            renew_deadline(&mut msrs, &lapic, mp_state);
            msrs[1].data
        };

        assert_eq!(case(ARMED, None, 0, KVM_MP_STATE_RUNNABLE), 70);
        assert_eq!(case(ARMED, None, 99, KVM_MP_STATE_RUNNABLE), 99);
        assert_eq!(case(ARMED, None, 0, KVM_MP_STATE_HALTED), 0);
        assert_eq!(case(ARMED | 1 << 16, None, 0, KVM_MP_STATE_RUNNABLE), 0);
        assert_eq!(case(1 << 17 | 0xec, None, 0, KVM_MP_STATE_RUNNABLE), 0);
        for register in [0x100, 0x200] {
            assert_eq!(case(ARMED, Some(register), 0, KVM_MP_STATE_RUNNABLE), 0);
        }
    }

    #[test]
    fn a_feature_that_the_guest_saw_and_the_host_lacks_is_named() {
        let seen = [kvm_cpuid_entry2 { ebx: 0b110, ..leaf(7, 0) }];
        let host = [kvm_cpuid_entry2 { ebx: 0b010, ..leaf(7, 0) }];

        let error = check_features(&seen, &host).unwrap_err();

        assert!(error.to_string().contains("CPUID 0x7.0 ebx bits 0x4"), "{error}");
    }

    #[test]
    fn more_features_than_the_guest_saw_are_welcome() {
        let seen = [kvm_cpuid_entry2 { ebx: 0b010, ..leaf(7, 0) }];
        let host = [kvm_cpuid_entry2 { ebx: 0b110, ..leaf(7, 0) }];

        assert!(check_features(&seen, &host).is_ok());
    }

    #[test]
    fn another_vendor_is_refused() {
        let seen = [kvm_cpuid_entry2 { ebx: 1, ..leaf(0, 0) }];

        assert!(check_features(&seen, &[leaf(0, 0)]).is_err());
    }

    #[test]
    fn each_vcpu_is_told_its_own_number() {
        let mut entry = leaf(1, 0);

        shape(&mut entry, 3, 4, true);

        assert_eq!((entry.ebx >> 24, (entry.ebx >> 16) & 0xff), (3, 4));
    }
}
