//! The `state` file: everything a machine is, apart from its memory and its disk.
//!
//! The body is postcard.  Fields are only ever appended, under a new version of
//! the header; a golden file of every version stays readable.

use std::io::Write;
use std::path::Path;

use forkd_devices::virtio::mmio::MmioState;
use forkd_devices::virtio::vsock::VsockState;
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_clock_data, kvm_irqchip};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::kvm::cpu::VcpuState;
use crate::kvm::cpuid::physical_bits;
use crate::kvm::stored;
use crate::layout;
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};

/// Largest body of a state file; a vCPU needs about 25 KiB.
pub const STATE_BYTES_MAX: u64 = 16 << 20;

/// Most MSRs of a vCPU; KVM lists some hundred.
pub const MSRS_MAX: usize = 1024;

/// A stored machine.
#[derive(Debug, Serialize, Deserialize)]
pub struct MachineState {
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
    /// The vCPUs, by number.
    pub vcpus: Vec<VcpuState>,
    /// Both PICs and the I/O APIC.
    pub irqchips: Vec<kvm_irqchip>,
    /// kvmclock.
    pub clock: kvm_clock_data,
    /// The serial console.
    pub serial: SerialState,
    /// The disk's transport, and its size in bytes; `None` for a machine without a disk.
    pub block: Option<(MmioState, u64)>,
    /// The network device's transport, and its MAC address.
    pub net: (MmioState, [u8; 6]),
    /// The vsock device.
    pub vsock: (MmioState, VsockState),
    /// The entropy device.
    pub rng: MmioState,
    /// Forks between the boot and this machine.
    pub generation: u64,
}

/// Registers of the serial console, as `vm-superio` keeps them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the register names of the 16550 say it")]
pub struct SerialState {
    pub baud_divisor_low: u8,
    pub baud_divisor_high: u8,
    pub interrupt_enable: u8,
    pub interrupt_identification: u8,
    pub line_control: u8,
    pub line_status: u8,
    pub modem_control: u8,
    pub modem_status: u8,
    pub scratch: u8,
    pub in_buffer: Vec<u8>,
}

impl MachineState {
    /// Writes the state to `target`, durable and whole, or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn write(&self, target: &Path) -> Result<Written, Error> {
        let body = postcard::to_stdvec(self)
            .map_err(|error| Error::Damaged(format!("the state cannot be encoded: {error}")))?;
        let mut writer = BodyWriter::create(target, Kind::State)?;
        writer.write_all(&body).map_err(Error::io("write the state"))?;
        writer.commit()
    }

    /// Reads and verifies a state.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`], [`Error::TooNew`], [`Error::Damaged`] naming the file; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let mut reader = BodyReader::open(path, Kind::State)?;
        let name = reader.name().to_owned();
        if reader.left() > STATE_BYTES_MAX {
            return Err(Error::Damaged(format!(
                "{name}: a body of {} bytes; at most {STATE_BYTES_MAX} are possible",
                reader.left()
            )));
        }
        let mut body = vec![0; usize::try_from(reader.left()).unwrap_or(0)];
        reader.fill(&mut body)?;
        reader.finish()?;
        let state: Self = postcard::from_bytes(&body)
            .map_err(|error| Error::Damaged(format!("{name}: {error}")))?;
        state.check(&name)?;
        Ok(state)
    }

    /// A summary for people and programs: JSON with sizes, vCPUs and devices.
    #[must_use]
    pub fn describe(&self) -> serde_json::Value {
        let vcpu = self.vcpus.first();
        serde_json::json!({
            "memory_bytes": self.memory_bytes,
            "vcpus": self.vcpus.len(),
            "generation": self.generation,
            "msrs": vcpu.map_or(0, |vcpu| vcpu.msrs.len()),
            "tsc_khz": vcpu.map_or(0, |vcpu| vcpu.tsc_khz),
            "disk_bytes": self.block.as_ref().map(|(_, bytes)| bytes),
            "connections": self.vsock.1.connections.len(),
        })
    }

    /// A digest proves only that nobody changed the file by accident; so look at the values too.
    fn check(&self, name: &str) -> Result<(), Error> {
        let vcpus = self.vcpus.len();
        if vcpus == 0 || vcpus > usize::from(layout::VCPUS_MAX) || self.irqchips.len() != 3 {
            return Err(Error::Damaged(format!("{name}: {vcpus} vCPUs")));
        }
        let too_many = |vcpu: &VcpuState| {
            vcpu.msrs.len() > MSRS_MAX || vcpu.cpuid.len() > KVM_MAX_CPUID_ENTRIES
        };
        if self.vcpus.iter().any(too_many) {
            let how = "a vCPU has more MSRs or CPUID entries than there can be";
            return Err(Error::Damaged(format!("{name}: {how}")));
        }
        let cpuids = self.vcpus.iter().map(|vcpu| stored::check_cpuid(&vcpu.cpuid));
        let bits = self.vcpus.iter().map(|vcpu| physical_bits(&vcpu.cpuid));
        let reached = bits.map(|bits| layout::check_addresses(self.memory_bytes, bits));
        cpuids
            .chain([layout::check_memory_size(self.memory_bytes)])
            .chain(reached)
            .collect::<Result<(), Error>>()
            .map_err(|error| Error::Damaged(format!("{name}: {error}")))
    }
}
