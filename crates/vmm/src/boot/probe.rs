//! Whether this host's KVM can run a stock guest natively: found out by trying.
//!
//! A `/dev/kvm` that opens and creates VMs proves little: PVM, for one, does both,
//! and then interprets a stock guest instruction by instruction.  So a guest in long
//! mode, with paging, counts down a register.  Any processor with virtualisation
//! does that in milliseconds; an interpreter needs seconds.

use std::time::{Duration, Instant};

use forkd_proto::control::Cpu;
use kvm_ioctls::{Cap, Kvm, VcpuExit};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use crate::boot::kernel;
use crate::error::Error;
use crate::kvm::cpuid::{self, Wanted};
use crate::kvm::vm;
use crate::layout;
use crate::memory::ram::Ram;
use crate::sys::process;

/// Rounds of the loop.  At one cycle a round this is 20 ms on a slow processor.
const ROUNDS: u32 = 50_000_000;
/// A guest that needs longer is not run by the processor.  An emulated processor with emulated
/// virtualisation, as in the helper machine, needs about half a second.
const NATIVE_MAX_S: u32 = 3;
/// Port that the guest writes to when it is done.
const DONE_PORT: u16 = 0x80;

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Whether a stock guest runs here.
    pub ok: bool,
    /// Why not, or how fast.
    pub reason: String,
    /// Time of the loop, in milliseconds, if it ended.
    pub loop_ms: Option<f64>,
}

/// Tries.
#[must_use]
pub fn probe() -> Finding {
    match try_guest() {
        Ok(took) if took <= Duration::from_secs(NATIVE_MAX_S.into()) => Finding {
            ok: true,
            reason: "a guest in long mode runs at the processor's speed".into(),
            loop_ms: Some(took.as_secs_f64() * 1e3),
        },
        Ok(took) => Finding {
            ok: false,
            reason: "KVM interprets a stock guest instead of running it, as PVM does".into(),
            loop_ms: Some(took.as_secs_f64() * 1e3),
        },
        Err(error) => Finding { ok: false, reason: error.to_string(), loop_ms: None },
    }
}

fn try_guest() -> Result<Duration, Error> {
    let kvm = Kvm::new().map_err(Error::kvm("open /dev/kvm"))?;
    for (capability, name) in [
        (Cap::Irqchip, "an in-kernel interrupt controller"),
        (Cap::UserMemory, "user memory"),
        (Cap::ImmediateExit, "immediate exits"),
    ] {
        if !kvm.check_extension(capability) {
            return Err(Error::CpuMismatch(format!("KVM has no {name}")));
        }
    }
    let ram = Ram::fresh(layout::MEMORY_BYTES_MIN)?;
    let memory = ram.view();
    let vm = vm::create(&kvm, memory)?;
    let mut vcpu = vm.create_vcpu(0).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
    let shown = cpuid::for_vcpu(&kvm, Wanted { cpu: Cpu::Host, id: 0, vcpus: 1 })?;
    vcpu.set_cpuid2(&shown).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    let mut sregs = vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
    kernel::long_mode(memory, &mut sregs)?;
    vcpu.set_sregs(&sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
    let mut registers = kernel::registers(kernel::Entry { rip: layout::HIGH_RAM_START });
    registers.rcx = u64::from(ROUNDS);
    vcpu.set_regs(&registers).map_err(Error::kvm("KVM_SET_REGS"))?;
    // dec ecx; jnz -4; out 0x80, al; hlt
    let code = [0xff, 0xc9, 0x75, 0xfc, 0xe6, 0x80, 0xf4];
    memory.write_slice(&code, GuestAddress(layout::HIGH_RAM_START)).map_err(Error::guest_memory)?;

    let started = Instant::now();
    process::alarm_after(NATIVE_MAX_S + 1)?;
    match vcpu.run() {
        Ok(VcpuExit::IoOut(DONE_PORT, _) | VcpuExit::Intr) => Ok(started.elapsed()),
        Err(error) if error.errno() == libc::EINTR => Ok(started.elapsed()),
        Ok(exit) => Err(Error::CpuMismatch(format!("a test guest ended with {exit:?}"))),
        Err(error) => Err(Error::Kvm { what: "KVM_RUN", source: error }),
    }
}
