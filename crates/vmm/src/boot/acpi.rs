//! ACPI tables: how a guest finds its processors, its virtio-mmio devices and its generation id.
//!
//! Hardware-reduced ACPI (ACPI 6.5 §4.1): no PM timer, no fixed events, no
//! legacy interrupt controller that Linux would probe.  The DSDT lists
//!
//! - one `LNRO0005` per virtio-mmio slot (Linux `drivers/virtio/virtio_mmio.c`);
//! - the serial port, `PNP0501`;
//! - `VMGENCTR`, the VM generation id (Linux `drivers/virt/vmgenid.c`), whose page
//!   the VMM rewrites in every fork, and a generic event device (`ACPI0013`)
//!   whose interrupt makes the kernel look at it.

use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::Error;
use crate::layout;

const OEM: [u8; 6] = *b"FORKD ";
const TABLE: [u8; 8] = *b"FORKDVMM";
const REVISION: u32 = 1;
/// DSDT revision 2: 64-bit integers in AML.
const DSDT_REVISION: u8 = 2;

/// FADT `IAPC_BOOT_ARCH` (ACPI 6.5 table 5.10): no VGA, no CMOS clock; and no 8042, as bit 1
/// is clear.
const BOOT_ARCH_NO_VGA: u16 = 1 << 2;
const BOOT_ARCH_NO_CMOS: u16 = 1 << 5;

/// Writes the tables of a machine with `vcpus` processors, and returns the address of the RSDP.
///
/// # Errors
///
/// [`Error::GuestMemory`] if guest memory is too small to hold them.
pub fn write_tables(memory: &GuestMemoryMmap, vcpus: u8) -> Result<u64, Error> {
    let mut cursor = layout::ACPI_START + 64; // the RSDP goes first
    let mut place = |bytes: &[u8]| -> Result<u64, Error> {
        let at = cursor;
        memory.write_slice(bytes, GuestAddress(at)).map_err(Error::guest_memory)?;
        cursor = (at + bytes.len() as u64).next_multiple_of(16);
        Ok(at)
    };
    let dsdt = place(&dsdt())?;
    let fadt = place(&fadt(dsdt))?;
    let madt = place(&madt(vcpus))?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(&bytes_of(&xsdt))?;
    let rsdp = bytes_of(&Rsdp::new(OEM, xsdt));
    memory.write_slice(&rsdp, GuestAddress(layout::ACPI_START)).map_err(Error::guest_memory)?;
    Ok(layout::ACPI_START)
}

fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> Vec<u8> {
    let io =
        |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut builder = FADTBuilder::new(OEM, TABLE, REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    builder.iapc_boot_arch = (BOOT_ARCH_NO_VGA | BOOT_ARCH_NO_CMOS).into();
    builder.reset_reg = io(layout::RESET_PORT);
    builder.reset_value = layout::RESET_VALUE;
    builder.sleep_control_reg = io(layout::SLEEP_PORT);
    builder.sleep_status_reg = io(layout::SLEEP_PORT + 1);
    bytes_of(&builder.finalize())
}

fn madt(vcpus: u8) -> Vec<u8> {
    let mut madt =
        MADT::new(OEM, TABLE, REVISION, LocalInterruptController::Address(layout::LAPIC));
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IOAPIC, 0));
    bytes_of(&madt)
}

fn dsdt() -> Vec<u8> {
    let mut body = Vec::new();
    aml::Scope::new("_SB_".into(), vec![&Serial, &VirtioSlots, &GenerationId, &EventDevice])
        .to_aml_bytes(&mut body);
    let s5 = aml::Package::new(vec![&layout::SLEEP_TYPE_S5, &aml::ZERO, &aml::ZERO, &aml::ZERO]);
    aml::Name::new("_S5_".into(), &s5).to_aml_bytes(&mut body);

    let mut table = Sdt::new(*b"DSDT", 36, DSDT_REVISION, OEM, TABLE, REVISION);
    table.append_slice(&body);
    table.as_slice().to_vec()
}

struct Serial;

impl Aml for Serial {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let interrupt = edge(layout::SERIAL_GSI);
        let ports = aml::IO::new(layout::SERIAL_PORT, layout::SERIAL_PORT, 0, 8);
        let resources = aml::ResourceTemplate::new(vec![&interrupt, &ports]);
        aml::Device::new(
            "COM1".into(),
            vec![
                &aml::Name::new("_HID".into(), &aml::EISAName::new("PNP0501")),
                &aml::Name::new("_UID".into(), &aml::ZERO),
                &aml::Name::new("_CRS".into(), &resources),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct VirtioSlots;

impl Aml for VirtioSlots {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let (mut base, mut gsi) = (0xd000_0000_u32, layout::VIRTIO_GSI);
        for slot in 0..layout::VIRTIO_SLOTS {
            let (registers, interrupt) = (aml::Memory32Fixed::new(true, base, 0x1000), edge(gsi));
            let resources = aml::ResourceTemplate::new(vec![&registers, &interrupt]);
            let name = format!("VR{slot:02}");
            aml::Device::new(
                name.as_str().into(),
                vec![
                    &aml::Name::new("_HID".into(), &"LNRO0005"),
                    &aml::Name::new("_UID".into(), &slot),
                    &aml::Name::new("_CCA".into(), &aml::ONE),
                    &aml::Name::new("_CRS".into(), &resources),
                ],
            )
            .to_aml_bytes(sink);
            base += 0x1000;
            gsi += 1;
        }
    }
}

struct GenerationId;

impl Aml for GenerationId {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        // A package of two 32-bit halves; the page is below 1 MiB, so the upper is zero.
        let address = layout::VMGENID;
        aml::Device::new(
            "VGEN".into(),
            vec![
                &aml::Name::new("_HID".into(), &"VMGENCTR"),
                &aml::Name::new("_CID".into(), &"VM_Gen_Counter"),
                &aml::Name::new("_DDN".into(), &"VM_Gen_Counter"),
                &aml::Name::new("ADDR".into(), &aml::Package::new(vec![&address, &aml::ZERO])),
            ],
        )
        .to_aml_bytes(sink);
    }
}

struct EventDevice;

impl Aml for EventDevice {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        let interrupt = edge(layout::GED_GSI);
        let resources = aml::ResourceTemplate::new(vec![&interrupt]);
        aml::Device::new(
            "GED_".into(),
            vec![
                &aml::Name::new("_HID".into(), &"ACPI0013"),
                &aml::Name::new("_UID".into(), &aml::ZERO),
                &aml::Name::new("_CRS".into(), &resources),
                &aml::Method::new(
                    "_EVT".into(),
                    1,
                    true,
                    vec![&aml::Notify::new(&aml::Path::new("\\_SB_.VGEN"), &0x80_usize)],
                ),
            ],
        )
        .to_aml_bytes(sink);
    }
}

fn edge(gsi: u32) -> aml::Interrupt {
    aml::Interrupt::new(true, true, false, false, gsi)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |sum, byte| sum.wrapping_add(*byte))
    }

    #[test]
    fn every_table_sums_to_zero_and_states_its_length() {
        for table in [dsdt(), fadt(0x1000), madt(layout::VCPUS_MAX)] {
            let stated = u32::from_le_bytes(table[4..8].try_into().unwrap());

            assert_eq!((sum(&table), stated as usize), (0, table.len()));
        }
    }

    #[test]
    fn the_tables_end_below_the_generation_id() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();

        write_tables(&memory, layout::VCPUS_MAX).unwrap();

        let mut gap = vec![0_u8; 4096];
        memory.read_slice(&mut gap, GuestAddress(layout::VMGENID - 4096)).unwrap();
        assert!(gap.iter().all(|byte| *byte == 0));
    }
}
