//! A fork point: everything that its forks share, prepared once.
//!
//! A zygote loads one from the files of a snapshot, or takes over that of its
//! parent and puts a delta on it; a seed makes one of the machine that it was a
//! moment ago.  From then on they are the same.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, OnceLock};

use forkd_proto::control::{Cpu, Derive, DiskConfig, ZygoteConfig};
use kvm_bindings::{CpuId, Msrs};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

use crate::disk::layers::Lower;
use crate::error::Error;
use crate::kvm::cpu::VcpuState;
use crate::kvm::cpuid::{self, Vendor, Wanted, arch_capabilities, compare};
use crate::kvm::msrs::{self, Defaults};
use crate::kvm::{stored, tsc, vm};
use crate::layout;
use crate::memory::question::Notebook;
use crate::memory::ram::Ram;
use crate::memory::seed_memory::SeedMemory;
use crate::memory::warmth::Warmth;
use crate::snapshot::pages::Lineage;
use crate::snapshot::state::MachineState;
use crate::sys::pagemap::Pagemap;

/// What this host's KVM gives a fresh vCPU, asked once.
#[derive(Clone, Debug)]
pub struct Host {
    /// The MSRs that can be saved, with what a fresh vCPU has in them.
    pub msr_defaults: Arc<Defaults>,
    /// The frequency to ask for: the one that the guest has seen.
    pub(super) tsc_khz: Option<u32>,
}

/// The fork point.
#[derive(Debug)]
pub struct ForkPlan {
    pub(super) kvm: Kvm,
    pub(super) state: MachineState,
    pub(super) ram: Ram,
    pub(super) lineage: Lineage,
    pub(super) lower: Option<Lower>,
    pub(super) cpuids: Vec<CpuId>,
    pub(super) msrs: Vec<Vec<Msrs>>,
    pub(super) host: Host,
    pub(super) warmth: OnceLock<Warmth>,
    pub(super) notebook: Arc<Notebook>,
    seed_memory: Option<SeedMemory>,
    awake: Option<Awake>,
}

/// A VM that a zygote keeps and never runs, so that its first child is not the host's first VM.
///
/// With the first one the kernel patches its own code (`preempt_notifier_key`, and the keys of
/// APICs that are off) and, before Linux 6.12 (`enable_virt_at_load`), switches virtualization on,
/// on all processors and by interrupts; with the end of the last one it takes all of that back.
///
/// Processes that are forked from the zygote close the descriptor by its number and never drop
/// the plan, which others may have taken by then.
type Awake = ManuallyDrop<VmFd>;

impl ForkPlan {
    /// Reads and verifies a snapshot, and checks it against this host.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`], [`Error::TooNew`], [`Error::Damaged`] naming a file;
    /// [`Error::CpuMismatch`] naming what this host lacks; [`Error::Kvm`], [`Error::Io`].
    pub fn load(config: &ZygoteConfig) -> Result<Self, Error> {
        let state = MachineState::read(&config.state)?;
        let kvm = vm::open()?;
        let (host, awake) = Host::admit(&kvm, &state)?;
        let lower = open_lower(&state, config.disk.as_ref(), None)?;
        let lineage = Lineage::of(&config.memory)?;
        let ram = Ram::load(state.memory_bytes, &config.memory)?;
        let plan = Self::new(kvm, state, ram, lineage, lower, host)?;
        Ok(Self { awake: Some(awake), ..plan })
    }

    /// Puts a delta over this one.  To be called in a process forked for the purpose: the memory
    /// of this plan becomes that of the result.
    ///
    /// # Errors
    ///
    /// As [`Self::load`].
    pub fn derive(&self, config: &Derive) -> Result<Self, Error> {
        if self.is_live() {
            return Err(Error::State("a seed holds what is in no file, so no delta is above it"));
        }
        let state = MachineState::read(&config.state)?;
        if state.memory_bytes != self.state.memory_bytes {
            return Err(Error::Damaged(format!(
                "{} is of a machine with {} bytes of memory, its parent has {}",
                config.state.display(),
                state.memory_bytes,
                self.state.memory_bytes
            )));
        }
        let kvm = vm::open()?;
        let (host, awake) = Host::admit(&kvm, &state)?;
        let lower = open_lower(&state, config.disk.as_ref(), self.lower.as_ref())?;
        let link = Lineage::of(std::slice::from_ref(&config.memory))?;
        let mut ram = self.ram.clone();
        ram.overlay(&config.memory)?;
        let plan = Self::new(kvm, state, ram, self.lineage.clone().with(link), lower, host)?;
        Ok(Self { awake: Some(awake), ..plan })
    }

    /// The fork point that a machine is at.  To be called in a process forked for the purpose,
    /// without the machine's descriptors of KVM: its memory becomes that of the result, and is what
    /// forks can go back to as long as the process lives.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] or [`Error::Io`] naming what the host refused.
    pub fn of_live(
        state: MachineState,
        ram: Ram,
        lower: Option<Lower>,
        origin: Option<&Self>,
    ) -> Result<Self, Error> {
        let lineage = origin.map(|plan| plan.lineage.clone()).unwrap_or_default();
        let kvm = vm::open()?;
        let host = match origin {
            Some(origin) => origin.host.clone(),
            // Its source has a VM.
            None => Host::ask(&kvm, &state.vcpus)?.0,
        };
        let mut plan = Self::new(kvm, state, ram, lineage, lower, host)?;
        plan.seed_memory = Some(SeedMemory::own()?);
        if let Some(origin) = origin {
            // Forks of forks write what forks write.
            plan.notebook = Arc::clone(&origin.notebook);
            if let Some(warmth) = origin.warmth.get() {
                drop(plan.warmth.set(warmth.clone()));
            }
        }
        Ok(plan)
    }

    fn new(
        kvm: Kvm,
        state: MachineState,
        ram: Ram,
        lineage: Lineage,
        lower: Option<Lower>,
        host: Host,
    ) -> Result<Self, Error> {
        let cpuids = state.vcpus.iter().map(VcpuState::kvm_cpuid).collect::<Result<Vec<_>, _>>()?;
        let msrs = state
            .vcpus
            .iter()
            .map(|vcpu| msrs::to_write(&vcpu.msrs, &host.msr_defaults, &host.msr_defaults))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            kvm,
            state,
            ram,
            lineage,
            lower,
            cpuids,
            msrs,
            host,
            warmth: OnceLock::new(),
            notebook: Arc::new(Notebook::new()?),
            seed_memory: None,
            awake: None,
        })
    }

    /// Bytes of guest memory, and number of vCPUs.
    #[must_use]
    pub fn size(&self) -> (u64, u8) {
        (self.state.memory_bytes, u8::try_from(self.cpuids.len()).unwrap_or(layout::VCPUS_MAX))
    }

    /// Whether it is of a machine that ran: its memory then is in no image that it could be had
    /// from again.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.seed_memory.is_some()
    }

    /// Memory at the fork point where no image has it: in the process that holds the plan.
    #[must_use]
    pub fn seed_memory(&self) -> Option<&SeedMemory> {
        self.seed_memory.as_ref()
    }

    /// The descriptor of the VM that a zygote keeps, which is of no use to its children.
    #[must_use]
    pub fn awake(&self) -> Option<RawFd> {
        self.awake.as_ref().map(|vm| vm.as_raw_fd())
    }

    /// The machine's state at the fork point.
    #[must_use]
    pub fn state(&self) -> &MachineState {
        &self.state
    }

    /// Memory at the fork point; in a fork, that fork's.
    #[must_use]
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// What the memory was loaded from.
    #[must_use]
    pub fn lineage(&self) -> &Lineage {
        &self.lineage
    }

    /// The disk's layers at the fork point.
    #[must_use]
    pub fn lower(&self) -> Option<&Lower> {
        self.lower.as_ref()
    }

    /// What was asked of this host.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// What forks write before they are ready, if it was learned.
    #[must_use]
    pub fn warmth(&self) -> Option<&Warmth> {
        self.warmth.get()
    }

    /// What forks know together of what their first clients have them write.
    #[must_use]
    pub fn notebook(&self) -> &Notebook {
        &self.notebook
    }

    /// Learns from the page map of a fork that has just become ready what forks write.  Once is
    /// enough.  Returns whether it has.
    pub fn learn(&self, fork: &Pagemap) -> bool {
        if self.warmth.get().is_none() {
            // A fork that has ended already teaches nothing; the next one will.
            if let Ok(warmth) = Warmth::learn(self.ram.view(), fork) {
                drop(self.warmth.set(warmth));
            }
        }
        self.warmth.get().is_some()
    }
}

impl Host {
    /// For a state that came from a file: also refuses what this host lacks, and MSRs that no
    /// machine here would have saved.
    fn admit(kvm: &Kvm, state: &MachineState) -> Result<(Self, Awake), Error> {
        let count = u8::try_from(state.vcpus.len()).unwrap_or(layout::VCPUS_MAX);
        let offered = cpuid::for_vcpu(kvm, Wanted { cpu: Cpu::Host, id: 0, vcpus: count })?;
        for vcpu in &state.vcpus {
            compare::check(&vcpu.cpuid, offered.as_slice())?;
        }
        let (host, vm) = Self::ask(kvm, &state.vcpus)?;
        let here = msrs::value_of(&host.msr_defaults, arch_capabilities::MSR);
        for vcpu in &state.vcpus {
            stored::check_msrs(&vcpu.msrs, &host.msr_defaults)?;
            if let Some(seen) = msrs::value_of(&vcpu.msrs, arch_capabilities::MSR) {
                arch_capabilities::check(seen, here.unwrap_or(0))?;
            }
        }
        Ok((host, ManuallyDrop::new(vm)))
    }

    /// Returns also the VM that was asked.
    fn ask(kvm: &Kvm, vcpus: &[VcpuState]) -> Result<(Self, VmFd), Error> {
        let scratch = Scratch::new(kvm)?;
        let tsc_khz = scratch.tsc_khz(vcpus, kvm.check_extension(Cap::TscControl))?;
        let mut vendor = Vendor::Intel;
        if let Some(vcpu) = vcpus.first() {
            vendor = Vendor::of(&vcpu.cpuid);
            scratch.vcpu.set_cpuid2(&vcpu.kvm_cpuid()?).map_err(Error::kvm("KVM_SET_CPUID2"))?;
        }
        // Each that cannot be read would end a call, whenever a machine of this plan is saved.
        let msr_defaults = msrs::read(&scratch.vcpu, msrs::indices(kvm, vendor)?)?.into();
        Ok((Self { msr_defaults, tsc_khz }, scratch.vm))
    }
}

/// A VM with one fresh vCPU, to ask what a fresh vCPU is like.
struct Scratch {
    vcpu: VcpuFd,
    vm: VmFd,
}

impl Scratch {
    fn new(kvm: &Kvm) -> Result<Self, Error> {
        let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
        vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
        let vcpu = vm.create_vcpu(0).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
        Ok(Self { vcpu, vm })
    }

    /// The frequency to ask KVM for, which takes it.
    fn tsc_khz(&self, vcpus: &[VcpuState], scales: bool) -> Result<Option<u32>, Error> {
        let saved = vcpus.first().map_or(0, |vcpu| vcpu.tsc_khz);
        let here = self.vcpu.get_tsc_khz().unwrap_or(0);
        let asked = tsc::frequency(saved, here, scales)?;
        if let Some(khz) = asked {
            self.vcpu.set_tsc_khz(khz).map_err(|_| tsc::cannot_scale(khz, here))?;
        }
        Ok(asked)
    }
}

/// Opens the layers that `config` names; what `parent` has open already is shared.
fn open_lower(
    state: &MachineState,
    config: Option<&DiskConfig>,
    parent: Option<&Lower>,
) -> Result<Option<Lower>, Error> {
    match (&state.block, config) {
        (None, _) => Ok(None),
        (Some((_, size)), Some(disk)) if *size == disk.size_bytes => {
            Lower::open(&disk.layers, disk.size_bytes, parent).map(Some)
        }
        (Some((_, size)), _) => Err(Error::Invalid {
            field: "disk",
            problem: format!("the snapshot has a disk of {size} bytes, the configuration has not"),
        }),
    }
}
