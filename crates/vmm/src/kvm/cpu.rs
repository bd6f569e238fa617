//! One vCPU's state: what a snapshot keeps of it, and the order of putting it back.
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

use forkd_proto::control::CpuSeen;
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MP_STATE_HALTED, KVM_MP_STATE_RUNNABLE,
    KVM_MP_STATE_UNINITIALIZED, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::kvm::cpuid::{self, arch_capabilities};
use crate::kvm::msrs::{self, Defaults, IA32_TSC, IA32_TSC_DEADLINE};
use crate::kvm::stored;
use crate::kvm::tsc::{Counter, Counters};
use crate::layout::PAGE_SIZE;

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
    /// MSRs that are not as in a fresh vCPU ([`msrs::save`]); the TSC and its deadline are last.
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
    pub fn save(vcpu: &VcpuFd, defaults: &Defaults) -> Result<Self, Error> {
        // Events before registers: KVM may fold a pending exception into them on reading.
        let mp_state = vcpu.get_mp_state().map_err(Error::kvm("KVM_GET_MP_STATE"))?;
        let events = vcpu.get_vcpu_events().map_err(Error::kvm("KVM_GET_VCPU_EVENTS"))?;
        let cpuid = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm("KVM_GET_CPUID2"))?;
        let cpuid = stored::filled(cpuid.as_slice()).to_vec();
        // The deadline before the LAPIC: a timer that goes off in between is then in both, and not
        // in neither.
        let mut msrs = msrs::save(vcpu, defaults)?;
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
        msrs::value_of(&self.msrs, IA32_TSC).unwrap_or(0)
    }

    /// Puts the state into a fresh vCPU; see the module's documentation for the order.
    ///
    /// `msrs` come from [`msrs::to_write`], `cpuid` from [`Self::kvm_cpuid`]: prepared once for
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
        // A processor without XSAVE has none, and KVM refuses to set none.
        if self.xcrs.nr_xcrs > 0 {
            vcpu.set_xcrs(&self.xcrs).map_err(Error::kvm("KVM_SET_XCRS"))?;
        }
        // SAFETY: AMX, whose state would exceed the 4 KiB of `kvm_xsave`, is masked from CPUID.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(Error::kvm("KVM_SET_XSAVE"))?;
        vcpu.set_debug_regs(&self.debug).map_err(Error::kvm("KVM_SET_DEBUGREGS"))?;
        vcpu.set_lapic(&self.lapic).map_err(Error::kvm("KVM_SET_LAPIC"))?;
        to.counters.put_back(to.id, vcpu)?;
        msrs::write(vcpu, msrs)?;
        vcpu.set_vcpu_events(&self.events).map_err(Error::kvm("KVM_SET_VCPU_EVENTS"))?;
        vcpu.set_mp_state(self.mp_state).map_err(Error::kvm("KVM_SET_MP_STATE"))
    }

    /// Puts the state back into a vCPU that has run since it had it.
    ///
    /// # Errors
    ///
    /// As [`Self::restore`].
    pub fn reinstate(&self, vcpu: &Numbered, defaults: &Defaults) -> Result<(), Error> {
        let now = msrs::read(vcpu.fd, defaults.iter().map(|msr| msr.index))?;
        let msrs = msrs::to_write(&self.msrs, &now, defaults)?;
        // Its TLB holds what the guest's page tables have said since, and KVM does not see that we
        // have written them back.  It forgets translations where CR3 changes.
        let elsewhere = kvm_sregs { cr3: self.sregs.cr3 ^ PAGE_SIZE, ..self.sregs };
        vcpu.fd.set_sregs(&elsewhere).map_err(Error::kvm("KVM_SET_SREGS"))?;
        // CPUID cannot change once a vCPU has run, and has not.
        self.write(vcpu, &msrs)
    }

    /// What its guest has seen of the processor.
    #[must_use]
    pub fn seen(&self) -> CpuSeen {
        let capabilities = msrs::value_of(&self.msrs, arch_capabilities::MSR);
        cpuid::seen(&self.cpuid, capabilities, self.tsc_khz)
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
    let now = msrs::value_of(msrs, IA32_TSC);
    let deadline = msrs.iter_mut().find(|msr| msr.index == IA32_TSC_DEADLINE);
    if let (Some(now), Some(deadline)) = (now, deadline.filter(|msr| msr.data == 0)) {
        deadline.data = now;
    }
}

fn too_many(what: &str) -> Error {
    Error::Damaged(format!("the state holds more {what} than KVM knows"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let mut msrs = [msr(IA32_TSC, 70), msr(IA32_TSC_DEADLINE, deadline)];
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
}
