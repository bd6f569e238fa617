//! A machine: memory, vCPUs and devices, made by booting a kernel or by forking a snapshot.
//!
//! Both ways end in the same value, with all vCPUs parked.  What differs between
//! them is in [`Machine::boot`] and [`ForkPlan::fork`]; everything later (pause,
//! save, metrics) does not know which it was.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use forkd_devices::virtio::VirtioDevice;
use forkd_devices::virtio::block::Block;
use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::net::Net;
use forkd_devices::virtio::rng::Rng;
use forkd_devices::virtio::vsock::Vsock;
use forkd_proto::control::{
    Child, MachineConfig, MachineState as RunState, MachineStatus, Metrics, SaveReply, SavedFile,
    TapConfig, ZygoteConfig,
};
use kvm_bindings::{CpuId, Msrs};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::GuestMemoryMmap;
use vm_superio::Serial;
use vmm_sys_util::epoll::Epoll;

use crate::bus::{Bus, Console, Devices, Line, Lines};
use crate::console::ConsoleLog;
use crate::cpu::{self, VcpuState};
use crate::disk::{HostDisk, Lower};
use crate::entropy::KernelEntropy;
use crate::error::Error;
use crate::memory::Ram;
use crate::snapshot::header::Written;
use crate::snapshot::pages::{self, Lineage};
use crate::snapshot::state::{MachineState, SerialState};
use crate::tap::Tap;
use crate::vcpu::Vcpus;
use crate::vsock_host::VsockHost;
use crate::warmth::Warmth;
use crate::{acpi, boot, generation, layout, memory, process, vm};

/// What every kernel is told, before the configuration's own words.
///
/// `quiet`, since each byte on the serial port is an exit; `panic=-1` and `reboot=t`, so that
/// a dead
/// guest ends its machine at once; no PCI, no i8042, no second serial port: there are none.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t pci=off i8042.noaux i8042.nokbd \
                       8250.nr_uarts=1 random.trust_cpu=on tsc=reliable no_timer_check";
/// MAC address of a machine that was given none; locally administered.
const MAC_DEFAULT: [u8; 6] = [0x02, 0xf0, 0x4b, 0xd0, 0x00, 0x01];
/// Largest payload of a frame, in bytes; the guest is told.
const MTU: u16 = 1500;
/// Twenty bytes that the guest sees as the serial number of its disk.
const DISK_ID: [u8; 20] = *b"forkd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
/// Largest difference of TSC frequencies that needs no scaling: 1 in this many.
const TSC_TOLERANCE: u32 = 100;

/// A machine whose vCPUs are threads of this process.
#[derive(Debug)]
pub struct Machine {
    // First, so that the threads end before what they work on goes.
    vcpus: Vcpus,
    bus: Arc<Bus>,
    vm: Arc<VmFd>,
    ram: Ram,
    lineage: Lineage,
    vcpu_count: u8,
    lower: Option<Lower>,
    started: Instant,
    paused_since: Option<Instant>,
    generation: u64,
}

/// Where a machine's files are, and who watches its sockets.
#[derive(Clone, Debug)]
pub struct Place {
    /// The machine's folder.
    pub directory: PathBuf,
    /// The poll loop's descriptor.
    pub epoll: Arc<Epoll>,
    /// What sets vsock tokens apart from others in that loop.
    pub vsock_tag: u64,
}

impl Machine {
    /// Makes a machine that is about to execute the first instruction of a kernel.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] naming the member of `config` at fault; [`Error::Kvm`] or [`Error::Io`].
    pub fn boot(config: &MachineConfig, place: &Place) -> Result<Self, Error> {
        memory::check_size(config.memory_bytes)?;
        let kvm = Kvm::new().map_err(Error::kvm("open /dev/kvm"))?;
        let ram = Ram::fresh(config.memory_bytes)?;
        let memory = ram.view();
        let vm = Arc::new(vm::create(&kvm, memory)?);
        let rsdp = acpi::write_tables(memory, config.vcpus)?;
        let entry = boot::load(
            memory,
            config.memory_bytes,
            &config.kernel,
            config.initramfs.as_deref(),
            &format!("{CMDLINE} {}", config.cmdline.as_deref().unwrap_or_default()),
            rsdp,
        )?;
        generation::renew(memory)?;
        let fds = (0..config.vcpus)
            .map(|id| boot_vcpu(&kvm, &vm, memory, id, config.vcpus, entry))
            .collect::<Result<Vec<_>, _>>()?;
        let lower = config
            .disk
            .as_ref()
            .map(|disk| Lower::open(&disk.layers, disk.size_bytes))
            .transpose()?;
        let limit = config.disk.as_ref().and_then(|disk| disk.top_limit_bytes);
        let disk = lower
            .as_ref()
            .map(|lower| HostDisk::new(lower, &place.directory, limit))
            .transpose()?;
        let lines = Arc::new(Lines::new(&vm));
        let devices = fresh_devices(&lines, place, disk, config.network.as_ref())?;
        let bus = Arc::new(Bus::new(lines, memory.clone(), devices)?);
        let vcpus = Vcpus::start(fds, &bus, cpu::msr_indices(&kvm)?)?;
        Ok(Self {
            vcpus,
            bus,
            vm,
            lineage: Lineage::default(),
            ram,
            vcpu_count: config.vcpus,
            lower,
            started: Instant::now(),
            paused_since: Some(Instant::now()),
            generation: 0,
        })
    }

    /// The devices.
    #[must_use]
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Lets the guest run.  Returns for how long it stood still, in milliseconds, if it did.
    pub fn resume(&mut self) -> Option<f64> {
        let since = self.paused_since.take()?;
        self.vcpus.resume();
        Some(since.elapsed().as_secs_f64() * 1e3)
    }

    /// Stops all vCPUs.  Devices act only for a vCPU or for a client, and clients are served by the
    /// thread that calls this, so they stand still as well.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if a vCPU does not stop.
    pub fn pause(&mut self) -> Result<(), Error> {
        if self.paused_since.is_none() {
            self.vcpus.pause()?;
            self.paused_since = Some(Instant::now());
        }
        Ok(())
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
    /// [`Error::State`] while it runs, [`Error::Invalid`] if the folder is not there or not empty,
    /// [`Error::Io`] if the disk is full; then none of the three files is left.
    pub fn save(&self, directory: &Path) -> Result<SaveReply, Error> {
        if self.paused_since.is_none() {
            return Err(Error::State("the machine is running; pause it first"));
        }
        check_empty(directory)?;
        let started = Instant::now();
        let saved = self.save_files(directory);
        if saved.is_err() {
            for name in ["state", "memory", "disk.layer"] {
                // What was not written yet is not there to be removed.
                drop(std::fs::remove_file(directory.join(name)));
            }
        }
        Ok(SaveReply { files: saved?, duration_ms: started.elapsed().as_secs_f64() * 1e3 })
    }

    fn save_files(&self, directory: &Path) -> Result<Vec<SavedFile>, Error> {
        let mut files = Vec::new();
        let mut record = |name: &str, written: Written| {
            let Written { bytes, digest } = written;
            files.push(SavedFile { name: name.to_owned(), bytes, digest });
        };
        if let Some(block) = self.bus.block() {
            record("disk.layer", block.device().disk().save(&directory.join("disk.layer"))?);
        }
        record("memory", pages::save(&self.ram, &self.lineage, &[], &directory.join("memory"))?);
        record("state", self.state()?.write(&directory.join("state"))?);
        Ok(files)
    }

    fn state(&self) -> Result<MachineState, Error> {
        // vCPUs first: KVM delivers what is pending in them to the chips while they are read.
        let vcpus = self.vcpus.save()?;
        let net = self.bus.net();
        let block = self.bus.block();
        Ok(MachineState {
            memory_bytes: self.ram.bytes(),
            vcpus,
            irqchips: vm::save_irqchips(&self.vm)?,
            clock: vm::save_clock(&self.vm)?,
            serial: save_serial(&self.bus.serial()),
            block: block
                .map(|block| (block.save(), self.lower.as_ref().map_or(0, Lower::size_bytes))),
            net: (net.save(), mac_of(net.device())),
            vsock: self.bus.vsock(|vsock| (vsock.device().save(), vsock.device().device().save())),
            rng: self.bus.rng().save(),
            generation: self.generation,
        })
    }
}

/// Everything that forks of one snapshot share, prepared once.
#[derive(Debug)]
pub struct ForkPlan {
    kvm: Kvm,
    state: MachineState,
    ram: Ram,
    lineage: Lineage,
    lower: Option<Lower>,
    cpuids: Vec<CpuId>,
    msrs: Vec<Vec<Msrs>>,
    msr_indices: Vec<u32>,
    tsc_khz: Option<u32>,
    warmth: Warmth,
}

impl ForkPlan {
    /// Reads and verifies a snapshot, and checks it against this host.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`], [`Error::TooNew`], [`Error::Damaged`] naming a file;
    /// [`Error::CpuMismatch`] naming what this host lacks; [`Error::Kvm`], [`Error::Io`].
    pub fn load(config: &ZygoteConfig) -> Result<Self, Error> {
        let state = MachineState::read(&config.state)?;
        let kvm = Kvm::new().map_err(Error::kvm("open /dev/kvm"))?;
        let count = u8::try_from(state.vcpus.len()).unwrap_or(layout::VCPUS_MAX);
        let host = cpu::cpuid_for(&kvm, 0, count)?;
        for vcpu in &state.vcpus {
            cpu::check_features(&vcpu.cpuid, host.as_slice())?;
        }
        let lower = open_lower(&state, config)?;
        let lineage = Lineage::of(&config.memory)?;
        let ram = Ram::load(state.memory_bytes, &config.memory)?;
        let msr_indices = cpu::msr_indices(&kvm)?;
        let scratch = Scratch::new(&kvm)?;
        let tsc_khz = scratch.tsc_scaling(&state.vcpus)?;
        let mut plan = Self {
            cpuids: state.vcpus.iter().map(VcpuState::kvm_cpuid).collect::<Result<_, _>>()?,
            msrs: Vec::new(),
            kvm,
            state,
            ram,
            lineage,
            lower,
            msr_indices,
            tsc_khz,
            warmth: Warmth::default(),
        };
        plan.msrs = scratch.msrs_to_write(&plan)?;
        Ok(plan)
    }

    /// Bytes of guest memory, and number of vCPUs.
    #[must_use]
    pub fn size(&self) -> (u64, u8) {
        (self.state.memory_bytes, u8::try_from(self.cpuids.len()).unwrap_or(layout::VCPUS_MAX))
    }

    /// Bytes of the snapshot's memory that are in memory.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        self.ram.resident_bytes()
    }

    /// Learns from `pid`, a fork that has just become ready, what forks write.  Once is enough.
    pub fn learn(&mut self, pid: i32) {
        if self.warmth.is_empty() {
            // A fork that has ended already teaches nothing; the next one will.
            self.warmth = Warmth::learn(self.ram.view(), pid).unwrap_or_default();
        }
    }

    /// Makes a machine of its own out of this process's view of the snapshot.
    ///
    /// To be called once, in a process forked for the purpose: the memory of the plan becomes the
    /// machine's.
    ///
    /// # Errors
    ///
    /// [`Error::Kvm`] or [`Error::Io`] naming what the host refused, [`Error::Invalid`] naming the
    /// member of `child` at fault, [`Error::Damaged`] if a device refuses its saved state.
    pub fn fork(&self, child: &Child, place: &Place) -> Result<Machine, Error> {
        self.warmth.apply();
        let vm = Arc::new(vm::create(&self.kvm, self.ram.view())?);
        let fds = (0..self.cpuids.len() as u64)
            .map(|id| vm.create_vcpu(id).map_err(Error::kvm("KVM_CREATE_VCPU")))
            .collect::<Result<Vec<_>, _>>()?;
        vm::restore_irqchips(&vm, &self.state.irqchips)?;
        vm::restore_clock(&vm, &self.state.clock)?;
        for (index, fd) in fds.iter().enumerate() {
            if let Some(khz) = self.tsc_khz {
                fd.set_tsc_khz(khz).map_err(Error::kvm("KVM_SET_TSC_KHZ"))?;
            }
            self.state.vcpus[index].restore(fd, &self.cpuids[index], &self.msrs[index])?;
        }
        let limit = child.top_limit_bytes;
        let disk = self
            .lower
            .as_ref()
            .map(|lower| HostDisk::new(lower, &place.directory, limit))
            .transpose()?;
        let tap = child.network.as_ref().map(|network| network.tap.as_str());
        let lines = Arc::new(Lines::new(&vm));
        let devices = saved_devices(&self.state, &lines, place, disk, tap)?;
        generation::renew(self.ram.view())?;
        let bus = Arc::new(Bus::new(lines, self.ram.view().clone(), devices)?);
        let vcpus = Vcpus::start(fds, &bus, self.msr_indices.clone())?;
        bus.raise_pending();
        bus.announce_generation();
        let (_, vcpu_count) = self.size();
        Ok(Machine {
            vcpus,
            bus,
            vm,
            ram: self.ram.clone(),
            lineage: self.lineage.clone(),
            vcpu_count,
            lower: self.lower.clone(),
            started: Instant::now(),
            paused_since: Some(Instant::now()),
            generation: self.state.generation + 1,
        })
    }
}

/// A VM with one fresh vCPU, to ask what a fresh vCPU is like.
struct Scratch {
    vcpu: VcpuFd,
    _vm: VmFd,
}

impl Scratch {
    fn new(kvm: &Kvm) -> Result<Self, Error> {
        let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
        vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
        let vcpu = vm.create_vcpu(0).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
        Ok(Self { vcpu, _vm: vm })
    }

    /// The frequency to ask KVM for, if the saved one differs by more than the tolerance.
    fn tsc_scaling(&self, vcpus: &[VcpuState]) -> Result<Option<u32>, Error> {
        let saved = vcpus.first().map_or(0, |vcpu| vcpu.tsc_khz);
        let here = self.vcpu.get_tsc_khz().unwrap_or(saved);
        if saved == 0 || saved.abs_diff(here) <= here / TSC_TOLERANCE {
            return Ok(None);
        }
        self.vcpu.set_tsc_khz(saved).map(|()| Some(saved)).map_err(|_| {
            Error::CpuMismatch(format!(
                "a TSC of {saved} kHz; this one runs at {here} and cannot be scaled"
            ))
        })
    }

    fn msrs_to_write(&self, plan: &ForkPlan) -> Result<Vec<Vec<Msrs>>, Error> {
        if let Some(cpuid) = plan.cpuids.first() {
            self.vcpu.set_cpuid2(cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
        }
        let defaults = cpu::read_msrs(&self.vcpu, &plan.msr_indices)?;
        plan.state.vcpus.iter().map(|vcpu| vcpu.msrs_beyond(&defaults)).collect()
    }
}

fn open_lower(state: &MachineState, config: &ZygoteConfig) -> Result<Option<Lower>, Error> {
    match (&state.block, &config.disk) {
        (None, _) => Ok(None),
        (Some((_, size)), Some(disk)) if *size == disk.size_bytes => {
            Lower::open(&disk.layers, disk.size_bytes).map(Some)
        }
        (Some((_, size)), _) => Err(Error::Invalid {
            field: "disk",
            problem: format!("the snapshot has a disk of {size} bytes, the configuration has not"),
        }),
    }
}

fn boot_vcpu(
    kvm: &Kvm,
    vm: &VmFd,
    memory: &GuestMemoryMmap,
    id: u8,
    vcpus: u8,
    entry: boot::Entry,
) -> Result<VcpuFd, Error> {
    let fd = vm.create_vcpu(u64::from(id)).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
    fd.set_cpuid2(&cpu::cpuid_for(kvm, id, vcpus)?).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    cpu::set_boot_msrs(&fd)?;
    if id == 0 {
        let mut sregs = fd.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
        boot::long_mode(memory, &mut sregs)?;
        fd.set_sregs(&sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
        fd.set_regs(&boot::registers(entry)).map_err(Error::kvm("KVM_SET_REGS"))?;
    }
    Ok(fd)
}

fn console_log(place: &Place) -> ConsoleLog {
    ConsoleLog::new(place.directory.join("console.log"))
}

fn vsock_host(device: Mmio<Vsock>, place: &Place) -> VsockHost {
    let path = place.directory.join("vsock.sock");
    VsockHost::new(device, path, Arc::clone(&place.epoll), place.vsock_tag)
}

fn fresh_devices(
    lines: &Arc<Lines>,
    place: &Place,
    disk: Option<HostDisk>,
    network: Option<&TapConfig>,
) -> Result<Devices, Error> {
    let tap = network.map(|network| process::open_tap(&network.tap)).transpose()?;
    let mac = network.map_or(Ok(MAC_DEFAULT), |network| parse_mac(&network.mac))?;
    Ok(Devices {
        serial: Serial::new(Line::new(lines, layout::SERIAL_GSI), console_log(place)),
        block: disk.map(|disk| Mmio::new(Block::new(disk, DISK_ID))),
        net: Mmio::new(Net::new(Tap::new(tap), mac, MTU)),
        vsock: vsock_host(Mmio::new(Vsock::new()), place),
        rng: Mmio::new(Rng::new(KernelEntropy)),
    })
}

fn saved_devices(
    state: &MachineState,
    lines: &Arc<Lines>,
    place: &Place,
    disk: Option<HostDisk>,
    tap: Option<&str>,
) -> Result<Devices, Error> {
    let damaged = |what: &'static str| {
        move |error: &dyn std::fmt::Display| Error::Damaged(format!("state of {what}: {error}"))
    };
    let tap = Tap::new(tap.map(process::open_tap).transpose()?);
    let block = match (&state.block, disk) {
        (Some((transport, _)), Some(disk)) => Some(
            Mmio::restore(transport, Block::new(disk, DISK_ID))
                .map_err(|error| damaged("the disk")(&error))?,
        ),
        _ => None,
    };
    let vsock = Vsock::restore(&state.vsock.1).map_err(|error| damaged("vsock")(&error))?;
    Ok(Devices {
        serial: restore_serial(
            &state.serial,
            Line::new(lines, layout::SERIAL_GSI),
            console_log(place),
        )?,
        block,
        net: Mmio::restore(&state.net.0, Net::new(tap, state.net.1, MTU))
            .map_err(|error| damaged("the network")(&error))?,
        vsock: vsock_host(
            Mmio::restore(&state.vsock.0, vsock).map_err(|error| damaged("vsock")(&error))?,
            place,
        ),
        rng: Mmio::restore(&state.rng, Rng::new(KernelEntropy))
            .map_err(|error| damaged("the entropy device")(&error))?,
    })
}

fn save_serial(serial: &Console) -> SerialState {
    let state = serial.state();
    SerialState {
        baud_divisor_low: state.baud_divisor_low,
        baud_divisor_high: state.baud_divisor_high,
        interrupt_enable: state.interrupt_enable,
        interrupt_identification: state.interrupt_identification,
        line_control: state.line_control,
        line_status: state.line_status,
        modem_control: state.modem_control,
        modem_status: state.modem_status,
        scratch: state.scratch,
        in_buffer: state.in_buffer,
    }
}

fn restore_serial(saved: &SerialState, line: Line, log: ConsoleLog) -> Result<Console, Error> {
    let state = vm_superio::serial::SerialState {
        baud_divisor_low: saved.baud_divisor_low,
        baud_divisor_high: saved.baud_divisor_high,
        interrupt_enable: saved.interrupt_enable,
        interrupt_identification: saved.interrupt_identification,
        line_control: saved.line_control,
        line_status: saved.line_status,
        modem_control: saved.modem_control,
        modem_status: saved.modem_status,
        scratch: saved.scratch,
        in_buffer: saved.in_buffer.clone(),
    };
    Serial::from_state(&state, line, vm_superio::serial::NoEvents, log)
        .map_err(|error| Error::Damaged(format!("state of the serial console: {error:?}")))
}

fn check_empty(directory: &Path) -> Result<(), Error> {
    let invalid = |problem: String| Error::Invalid { field: "directory", problem };
    let mut entries = std::fs::read_dir(directory)
        .map_err(|error| invalid(format!("{}: {error}", directory.display())))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(invalid(format!("{} is not empty", directory.display()))),
    }
}

/// The MAC address is the first field of the device's configuration space (virtio 1.2 §5.1.4).
fn mac_of(net: &Net<Tap>) -> [u8; 6] {
    let mut mac = [0; 6];
    net.read_config(0, &mut mac);
    mac
}

fn parse_mac(text: &str) -> Result<[u8; 6], Error> {
    let bytes: Vec<u8> =
        text.split(':').filter_map(|part| u8::from_str_radix(part, 16).ok()).collect();
    <[u8; 6]>::try_from(bytes.as_slice()).map_err(|_| Error::Invalid {
        field: "mac",
        problem: format!("{text:?} is not six hex bytes with colons"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_has_six_bytes() {
        assert_eq!(parse_mac("02:00:00:00:00:ff").unwrap(), [2, 0, 0, 0, 0, 255]);
        assert!(parse_mac("02:00:00:00:00").is_err());
        assert!(parse_mac("02:00:00:00:00:00:00").is_err());
    }

    #[test]
    fn a_folder_with_something_in_it_is_not_saved_into() {
        let folder = std::env::temp_dir().join(format!("forkd-save-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(check_empty(&folder).is_ok());

        std::fs::write(folder.join("precious"), "x").unwrap();

        assert!(check_empty(&folder).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
