//! A machine: memory, vCPUs and devices, made by booting a kernel or by forking a snapshot.
//!
//! Both ways end in the same value, with all vCPUs parked.  What differs between
//! them is in [`Machine::boot`] and in [`crate::fork::child`]; everything later (pause,
//! save, metrics) does not know which it was.

pub mod devices;
pub mod place;
pub mod save;
pub mod vcpu;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forkd_proto::control::{
    MachineConfig, MachineState as RunState, MachineStatus, Metrics, SaveLink, SaveReply,
};
use kvm_bindings::kvm_msr_entry;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;

use crate::boot::{acpi, generation, kernel};
use crate::disk::host_disk::HostDisk;
use crate::disk::layers::Lower;
use crate::disk::top::Tops;
use crate::error::Error;
use crate::io::bus::{Bus, Lines};
use crate::jail::filter::{self, Role};
use crate::kvm::cpu::{self, VcpuState};
use crate::kvm::cpuid::{self, Vendor, Wanted, arch_capabilities};
use crate::kvm::emulator;
use crate::kvm::msrs::{self, Defaults};
use crate::kvm::tsc;
use crate::kvm::vm;
use crate::layout;
use crate::machine::devices::{fresh_devices, mac_of, save_serial};
use crate::machine::place::Place;
use crate::machine::save::Still;
use crate::machine::vcpu::Vcpus;
use crate::memory::ram::Ram;
use crate::snapshot::pages::Lineage;
use crate::snapshot::state::MachineState;
use crate::sys::handed::{self, Keep};
use crate::sys::sharing;

/// What every kernel is told, before the configuration's own words.
///
/// `quiet`, since each byte on the serial port is an exit; `panic=-1`, so that a dead guest ends
/// its machine at once, and `reboot=a`, by our reset register, so that a triple fault is never
/// meant; no PCI, no i8042, no second serial port: there are none.
/// `nowatchdog` and `psi=0`, since each wakes a guest that has nothing to do every few seconds,
/// and a thousand siblings together all the time; `deferred_probe_timeout=0`, since every fork of
/// a snapshot younger than ten seconds would wake to look for devices that there are not.
/// `init_on_alloc=0`, since a page that is cleared is no longer shared with the siblings, and a
/// guest that is limited to a part of its memory must not write to the rest.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=a pci=off i8042.noaux i8042.nokbd \
                       8250.nr_uarts=1 random.trust_cpu=on tsc=reliable no_timer_check \
                       deferred_probe_timeout=0 nowatchdog psi=0 init_on_alloc=0";

/// What a machine is at one instant, apart from its memory.
#[derive(Debug)]
pub struct Frozen {
    /// vCPUs, chips and devices.
    pub state: MachineState,
    /// The layers of its disk, and how many of them were given.
    pub disk: Option<(Lower, usize)>,
}

/// A machine whose vCPUs are threads of this process.
#[derive(Debug)]
pub struct Machine {
    // First, so that the threads end before what they work on goes.
    pub(crate) vcpus: Vcpus,
    pub(crate) bus: Arc<Bus>,
    pub(crate) vm: Arc<VmFd>,
    pub(crate) ram: Ram,
    pub(crate) vcpu_count: u8,
    pub(crate) started: Instant,
    pub(crate) paused_since: Option<Instant>,
    pub(crate) generation: u64,
    pub(crate) msr_defaults: Arc<Defaults>,
    /// What its memory was loaded from; nothing if it booted.
    pub(crate) lineage: Lineage,
}

impl Machine {
    /// Makes a machine that is about to execute the first instruction of a kernel; this process
    /// is under a filter of system calls from now on.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] naming the member of `config` at fault; [`Error::Kvm`] or [`Error::Io`].
    pub fn boot(config: &MachineConfig, place: &Place) -> Result<Self, Error> {
        let booted = Self::boot_from(config, place);
        handed::keep_only(Keep::Always);
        booted
    }

    fn boot_from(config: &MachineConfig, place: &Place) -> Result<Self, Error> {
        layout::check_memory_size(config.memory_bytes)?;
        filter::put_on(Role::Process)?;
        sharing::own_core()?;
        let kvm = vm::open()?;
        let wanted = |id| Wanted { cpu: config.cpu, id, vcpus: config.vcpus };
        let bits = cpuid::physical_bits(cpuid::for_vcpu(&kvm, wanted(0))?.as_slice());
        layout::check_addresses(config.memory_bytes, bits)?;
        let ram = Ram::fresh(config.memory_bytes)?;
        let memory = ram.view();
        let vm = Arc::new(vm::create(&kvm, memory)?);
        let rsdp = acpi::write_tables(memory, config.vcpus)?;
        let entry = kernel::load(
            memory,
            config.memory_bytes,
            &config.kernel,
            config.initramfs.as_deref(),
            &format!("{CMDLINE} {}", config.cmdline.as_deref().unwrap_or_default()),
            rsdp,
        )?;
        generation::renew(memory)?;
        let made = (0..config.vcpus)
            .map(|id| boot_vcpu(&kvm, &vm, memory, wanted(id), entry))
            .collect::<Result<Vec<_>, _>>()?;
        let (fds, mut msr_defaults): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        let lower = config
            .disk
            .as_ref()
            .map(|disk| Lower::open(&disk.layers, disk.size_bytes, None))
            .transpose()?;
        let disk = lower
            .as_ref()
            .zip(config.disk.as_ref())
            .map(|(lower, disk)| {
                let (folder, reserve_bytes) =
                    (disk.top_directory.as_deref(), disk.top_reserve_bytes);
                let tops = Tops::new(folder, &place.directory, reserve_bytes)?;
                HostDisk::new(lower, tops, disk.top_limit_bytes)
            })
            .transpose()?;
        let lines = Arc::new(Lines::new(&vm));
        let devices = fresh_devices(&lines, place, disk, config.network.as_ref())?;
        let bus = Arc::new(Bus::new(lines, memory.clone(), devices)?);
        let run_bytes = kvm.get_vcpu_mmap_size().map_err(Error::kvm("KVM_GET_VCPU_MMAP_SIZE"))?;
        let vcpus = Vcpus::start(fds, &bus, run_bytes)?;
        Ok(Self {
            vcpus,
            bus,
            vm,
            ram,
            vcpu_count: config.vcpus,
            started: Instant::now(),
            paused_since: Some(Instant::now()),
            generation: 0,
            msr_defaults: msr_defaults.swap_remove(0).into(),
            lineage: Lineage::default(),
        })
    }

    /// The devices.
    #[must_use]
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Whether the guest runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.paused_since.is_none()
    }

    /// Lets the guest run.  Returns for how long it was paused, in milliseconds, if it did.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if a vCPU does not run.
    pub fn resume(&mut self) -> Result<Option<f64>, Error> {
        let Some(since) = self.paused_since else { return Ok(None) };
        self.vcpus.resume()?;
        self.paused_since = None;
        Ok(Some(since.elapsed().as_secs_f64() * 1e3))
    }

    /// Tells the guest, if it is paused, that its clocks went on meanwhile.  Forks and resets have
    /// clocks without a gap, and pauses for a branch are short: they say nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`].
    pub fn tell_of_pause(&self) -> Result<(), Error> {
        if self.paused_since.is_some() {
            self.vcpus.each(|_, fd| tsc::tell_of_a_gap(fd))?;
        }
        Ok(())
    }

    /// Stops all vCPUs.  Devices act only for a vCPU or for a client, and clients are served by the
    /// thread that calls this, so they are paused as well.
    ///
    /// # Errors
    ///
    /// [`Error::Stuck`] if a vCPU does not stop; the guest goes on then.
    pub fn pause(&mut self) -> Result<(), Error> {
        if self.paused_since.is_none() {
            self.vcpus.pause()?;
            self.paused_since = Some(Instant::now());
        }
        Ok(())
    }

    /// Whether the guest, which runs, has stopped all its processors for good.  It is paused for
    /// the look.
    ///
    /// # Errors
    ///
    /// Those of [`Self::pause`] and [`Self::resume`]; [`Error::Kvm`].
    pub fn has_halted(&mut self) -> Result<bool, Error> {
        self.pause()?;
        let looked = self.vcpus.each(|_, fd| cpu::is_dead(fd));
        self.resume()?;
        Ok(looked?.into_iter().all(|dead| dead))
    }

    /// As [`Self::pause`]; returns the vCPUs as they are then.
    ///
    /// # Errors
    ///
    /// Those of [`Vcpus::pause_and_save`].  [`Self::resume`] lets the guest go on, if it does not.
    pub fn pause_and_save(&mut self) -> Result<Vec<VcpuState>, Error> {
        if self.paused_since.is_some() {
            return self.vcpus.save(&self.msr_defaults);
        }
        let since = Instant::now();
        let saved = self.vcpus.pause_and_save(&self.msr_defaults);
        if !matches!(saved, Err(Error::Stuck)) {
            self.paused_since = Some(since);
        }
        saved
    }

    /// Answer to `status`.
    #[must_use]
    pub fn status(&self) -> MachineStatus {
        MachineStatus {
            state: if self.paused_since.is_some() { RunState::Paused } else { RunState::Running },
            pid: std::process::id(),
            vcpus: self.vcpu_count,
            memory_bytes: self.ram.bytes(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            generation: self.generation,
        }
    }

    /// Answer to `metrics`.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        let (exits, unclaimed) = self.bus.counters();
        let mut rejected = BTreeMap::from([
            ("bus".to_owned(), unclaimed),
            ("net".to_owned(), self.bus.net().rejected()),
            ("rng".to_owned(), self.bus.rng().rejected()),
            ("vsock".to_owned(), self.bus.vsock(|vsock| vsock.device().rejected())),
        ]);
        let disk = self.bus.block().map(|block| {
            rejected.insert("block".to_owned(), block.rejected());
            block.device().disk().metrics()
        });
        Metrics { exits, rejected, disk }
    }

    /// Writes the paused machine into `directory`: `state`, `memory` and `disk.layer`.
    ///
    /// # Errors
    ///
    /// [`Error::State`] while it runs; those of [`save::save`].
    pub fn save(&self, directory: &Path) -> Result<SaveReply, Error> {
        self.check_paused()?;
        save::check_empty(directory)?;
        let Frozen { state, disk } = *self.instant(self.vcpus.save(&self.msr_defaults)?)?;
        let (lower, disk_layers) = disk.map_or((None, 0), |(lower, given)| (Some(lower), given));
        let still =
            Still { state: &state, ram: &self.ram, lineage: &self.lineage, lower: lower.as_ref() };
        let to = SaveLink { directory: directory.to_path_buf(), memory: Vec::new(), disk_layers };
        save::save(still, &to)
    }

    /// Writes what the disk of the paused machine has above its `above` lowest layers.
    ///
    /// # Errors
    ///
    /// As [`Self::save`]; [`Error::Invalid`] if there are not so many layers.
    pub fn save_disk(&self, directory: &Path, above: usize) -> Result<SaveReply, Error> {
        self.check_paused()?;
        save::check_empty(directory)?;
        self.bus.settle();
        let Some(mut block) = self.bus.block() else {
            return Err(Error::State("the machine has no disk"));
        };
        let disk = block.device_mut().disk_mut();
        disk.freeze()?;
        save::save_disk(disk.lower(), directory, above)
    }

    fn check_paused(&self) -> Result<(), Error> {
        match self.paused_since {
            Some(_) => Ok(()),
            None => Err(Error::State("the machine is running; pause it first")),
        }
    }

    /// What it is at this instant.  Its disk's top is a layer of its own from now on.
    ///
    /// It must be paused; `vcpus` are as they have been since.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] naming what cannot be read; [`Error::Io`] if the top cannot be frozen.
    // On the heap, and in a frame of its own: whatever pages of the stack are written to after a
    // fork have to be copied before the guest goes on.
    #[inline(never)]
    pub fn instant(&self, vcpus: Vec<VcpuState>) -> Result<Box<Frozen>, Error> {
        // A device that had something left to do has raised an interrupt.
        let vcpus = if self.bus.settle() { self.vcpus.save(&self.msr_defaults)? } else { vcpus };
        let state = self.state(vcpus)?;
        let disk = self
            .bus
            .block()
            .map(|mut block| {
                let disk = block.device_mut().disk_mut();
                disk.freeze().map(|()| (disk.lower().clone(), disk.given()))
            })
            .transpose()?;
        Ok(Box::new(Frozen { state, disk }))
    }

    /// Everything that it is, apart from memory and disk.
    ///
    /// `vcpus` were read before: KVM delivers what is pending in them to the chips meanwhile.
    fn state(&self, vcpus: Vec<VcpuState>) -> Result<MachineState, Error> {
        let net = self.bus.net();
        let block = self.bus.block();
        Ok(MachineState {
            memory_bytes: self.ram.bytes(),
            vcpus,
            irqchips: vm::save_irqchips(&self.vm)?,
            clock: vm::save_clock(&self.vm)?,
            serial: save_serial(&self.bus.serial()),
            block: block.map(|block| (block.save(), block.device().disk().lower().size_bytes())),
            net: (net.save(), mac_of(net.device())),
            vsock: self.bus.vsock(|vsock| (vsock.device().save(), vsock.device().device().save())),
            rng: self.bus.rng().save(),
            generation: self.generation,
        })
    }
}

fn boot_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    memory: &GuestMemoryMmap,
    wanted: Wanted,
    entry: kernel::Entry,
) -> Result<(VcpuFd, Vec<kvm_msr_entry>), Error> {
    let fd = vm.create_vcpu(wanted.id.into()).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
    let shown = cpuid::for_vcpu(kvm, wanted)?;
    fd.set_cpuid2(&shown).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    if emulator::is_here() {
        emulator::enable_states(&fd, &shown)?;
    }
    let defaults = msrs::read(&fd, msrs::indices(kvm, Vendor::of(shown.as_slice()))?)?;
    let capabilities = msrs::value_of(&defaults, arch_capabilities::MSR);
    let capabilities = capabilities.map(|value| arch_capabilities::shown(value, wanted.cpu));
    msrs::set_up_boot(&fd, capabilities)?;
    if wanted.id == 0 {
        let mut sregs = fd.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
        kernel::long_mode(memory, &mut sregs)?;
        fd.set_sregs(&sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
        fd.set_regs(&kernel::registers(entry)).map_err(Error::kvm("KVM_SET_REGS"))?;
    }
    Ok((fd, defaults))
}
