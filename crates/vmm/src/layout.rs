//! Where everything is in a machine's physical address space.
//!
//! ```text
//! 0x0000_0000  boot structures (zero page, page tables, GDT, command line)
//! 0x0009_fc00  end of conventional memory
//! 0x000e_0000  ACPI tables, and the VM generation id in the last page below 1 MiB
//! 0x0010_0000  the kernel; RAM up to MMIO_GAP_START
//! 0xc000_0000  MMIO gap: virtio-mmio devices, I/O APIC, local APIC, KVM's own pages
//! 0x1_0000_0000  the rest of RAM
//! ```
//!
//! A page of guest memory has an *index* that skips the gap: it is what the
//! memory file counts in.

use crate::error::Error;

/// Size of a page of guest memory, in bytes.
pub const PAGE_SIZE: u64 = 4096;

/// First address of the gap that no RAM covers.
pub const MMIO_GAP_START: u64 = 0xc000_0000;
/// First address after the gap.
pub const MMIO_GAP_END: u64 = 0x1_0000_0000;

/// Linux' boot parameters ("zero page").
pub const ZERO_PAGE: u64 = 0x7000;
/// Initial stack of the boot processor.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Top level of the identity-mapping page tables used before Linux builds its own.
pub const BOOT_PML4: u64 = 0x9000;
/// Second level.
pub const BOOT_PDPT: u64 = 0xa000;
/// Third level: one page maps the first GiB.
pub const BOOT_PD: u64 = 0xb000;
/// Global descriptor table for the first instructions.
pub const BOOT_GDT: u64 = 0x500;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Longest command line, terminator included.  Linux' own limit on `x86` (`COMMAND_LINE_SIZE`).
pub const CMDLINE_BYTES_MAX: usize = 2048;
/// End of conventional memory.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables; within the area that Linux scans for them.
pub const ACPI_START: u64 = 0xe_0000;
/// The page with the VM generation id.
pub const VMGENID: u64 = 0xf_f000;
/// Start of extended memory, where a kernel is loaded.
pub const HIGH_RAM_START: u64 = 0x10_0000;

/// First virtio-mmio device; each has [`VIRTIO_STRIDE`] bytes.
pub const VIRTIO_BASE: u64 = 0xd000_0000;
/// Bytes of address space per virtio-mmio device.
pub const VIRTIO_STRIDE: u64 = 0x1000;
/// Interrupt of the first virtio-mmio device; the following have the following ones.
pub const VIRTIO_GSI: u32 = 16;
/// How many virtio-mmio slots there are: block, net, vsock, rng, in this order.
pub const VIRTIO_SLOTS: usize = 4;
/// Interrupt of the generic event device that announces a new generation id.
pub const GED_GSI: u32 = 20;

/// First port of the serial console.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// ACPI sleep control register; the following port is its status register.
pub const SLEEP_PORT: u16 = 0x600;
/// ACPI reset register.
pub const RESET_PORT: u16 = 0x602;
/// Value that resets when written to [`RESET_PORT`].
pub const RESET_VALUE: u8 = 1;
/// Sleep type of S5 (soft off) in the DSDT.
pub const SLEEP_TYPE_S5: u8 = 5;

/// I/O APIC.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Local APIC.
pub const LAPIC: u32 = 0xfee0_0000;
/// Three pages that KVM needs on Intel hosts (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: usize = 0xfffb_d000;
/// One page that KVM needs on Intel hosts (`KVM_SET_IDENTITY_MAP_ADDR`).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;

/// Least memory of a machine: a stock kernel with its initramfs does not boot in less.
pub const MEMORY_BYTES_MIN: u64 = 128 << 20;
/// Most memory of a machine.
pub const MEMORY_BYTES_MAX: u64 = 1 << 40;
/// Memory comes in multiples of this, so that huge pages line up.
pub const MEMORY_GRANULE: u64 = 2 << 20;
/// Most vCPUs of a machine.
pub const VCPUS_MAX: u8 = 32;

/// RAM of a machine with `memory_bytes`: (guest address, length) of each region, ascending.
#[must_use]
pub fn ram_regions(memory_bytes: u64) -> Vec<(u64, u64)> {
    if memory_bytes <= MMIO_GAP_START {
        return vec![(0, memory_bytes)];
    }
    vec![(0, MMIO_GAP_START), (MMIO_GAP_END, memory_bytes - MMIO_GAP_START)]
}

/// Checks a size of guest memory.
///
/// # Errors
///
/// [`Error::Invalid`] naming the limits.
pub fn check_memory_size(memory_bytes: u64) -> Result<(), Error> {
    let allowed = MEMORY_BYTES_MIN..=MEMORY_BYTES_MAX;
    if allowed.contains(&memory_bytes) && memory_bytes.is_multiple_of(MEMORY_GRANULE) {
        return Ok(());
    }
    Err(Error::Invalid {
        field: "memory_bytes",
        problem: format!(
            "{memory_bytes} is not a multiple of {MEMORY_GRANULE} from {MEMORY_BYTES_MIN} to \
             {MEMORY_BYTES_MAX}"
        ),
    })
}

/// Checks that a processor's physical addresses, of so many bits, reach all of a guest's memory.
///
/// # Errors
///
/// [`Error::Invalid`] naming the most that they reach.
pub fn check_addresses(memory_bytes: u64, bits: u32) -> Result<(), Error> {
    let reached = 1_u64.checked_shl(bits).unwrap_or(u64::MAX);
    let end = ram_regions(memory_bytes).last().map_or(0, |(start, length)| start + length);
    if end <= reached {
        return Ok(());
    }
    let most = if reached > MMIO_GAP_END {
        reached - (MMIO_GAP_END - MMIO_GAP_START)
    } else {
        reached.min(MMIO_GAP_START)
    };
    Err(Error::Invalid {
        field: "memory_bytes",
        problem: format!(
            "{memory_bytes} is more than the {most} that a guest can have here: its processor has \
             physical addresses of {bits} bits"
        ),
    })
}

/// Guest address of the page with this index.
#[must_use]
pub fn address_of(page: u64) -> u64 {
    let offset = page * PAGE_SIZE;
    if offset < MMIO_GAP_START { offset } else { offset - MMIO_GAP_START + MMIO_GAP_END }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_the_gap_moves_above_4_gib() {
        let regions = ram_regions(6 << 30);

        assert_eq!(regions, [(0, 3 << 30), (4 << 30, 3 << 30)]);
    }

    #[test]
    fn memory_up_to_the_gap_is_one_region() {
        assert_eq!(ram_regions(3 << 30), [(0, 3 << 30)]);
    }

    #[test]
    fn a_page_above_the_gap_has_an_address_above_the_gap() {
        let last_below = MMIO_GAP_START / PAGE_SIZE - 1;

        assert_eq!(address_of(last_below) + PAGE_SIZE, MMIO_GAP_START);
        assert_eq!(address_of(last_below + 1), MMIO_GAP_END);
    }

    #[test]
    fn sizes_one_granule_outside_the_limits_are_refused() {
        let granule = MEMORY_GRANULE;

        assert!(check_memory_size(MEMORY_BYTES_MIN).is_ok());
        assert!(check_memory_size(MEMORY_BYTES_MIN - granule).is_err());
        assert!(check_memory_size(MEMORY_BYTES_MAX + granule).is_err());
        assert!(check_memory_size(MEMORY_BYTES_MIN + 4096).is_err());
    }

    #[test]
    fn memory_of_which_addresses_reach_all_but_one_granule_is_refused_by_name() {
        for (bits, most) in [(32, 3 << 30), (39, 511 << 30), (40, 1023 << 30), (46, 65535 << 30)] {
            assert!(check_addresses(most, bits).is_ok(), "{bits}");

            let refused = check_addresses(most + MEMORY_GRANULE, bits).unwrap_err().to_string();

            assert!(refused.contains("memory_bytes"), "{refused}");
            assert!(refused.contains(&format!("the {most} ")), "{refused}");
            assert!(refused.contains(&format!("{bits} bits")), "{refused}");
        }
        assert!(check_addresses(MEMORY_BYTES_MAX, 64).is_ok());
    }
}
