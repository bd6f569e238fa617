//! Direct boot of Linux: kernel, initramfs, command line, zero page, first registers.
//!
//! The 64-bit boot protocol of Linux (`Documentation/arch/x86/boot.rst`, "64-bit
//! boot protocol"): a bzImage is entered 0x200 after its start, a vmlinux at its
//! ELF entry, with identity-mapped pages, a flat GDT and the zero page in `rsi`.

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::{BzImage, Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::Error;
use crate::layout;
use crate::sys::handed;

/// Largest initramfs, in bytes.
pub const INITRAMFS_BYTES_MAX: u64 = 512 << 20;

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = 0x5372_6448; // "HdrS"
const LOADER_UNDEFINED: u8 = 0xff;
/// `xloadflags` bit 0: the kernel has the 64-bit entry point at 0x200.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64: u64 = 0x200;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// What the boot processor starts with.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Address of the first instruction.
    pub rip: u64,
}

/// Places kernel, initramfs and boot parameters in guest memory.
///
/// # Errors
///
/// [`Error::Invalid`] naming `kernel`, `initramfs` or `cmdline` if the file is not a 64-bit Linux
/// kernel, does not fit, or the line is too long; [`Error::Io`] if a file cannot be read.
pub fn load(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    kernel: &Path,
    initramfs: Option<&Path>,
    cmdline: &str,
    rsdp: u64,
) -> Result<Entry, Error> {
    let (entry, header, kernel_end) = load_kernel(memory, kernel)?;
    let mut params = boot_params { hdr: header, acpi_rsdp_addr: rsdp, ..Default::default() };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.boot_flag = BOOT_FLAG;
    params.hdr.header = HEADER_MAGIC;
    params.hdr.cmd_line_ptr = u32_of(layout::CMDLINE);
    params.hdr.cmdline_size = write_cmdline(memory, cmdline)?;
    if let Some(path) = initramfs {
        let (start, length) = load_initramfs(memory, memory_bytes, kernel_end, path)?;
        params.hdr.ramdisk_image = u32_of(start);
        params.hdr.ramdisk_size = u32_of(length);
    }
    add_e820(&mut params, memory_bytes);
    memory.write_obj(params, GuestAddress(layout::ZERO_PAGE)).map_err(Error::guest_memory)?;
    Ok(entry)
}

fn load_kernel(memory: &GuestMemoryMmap, path: &Path) -> Result<(Entry, setup_header, u64), Error> {
    let invalid = |problem: String| Error::Invalid { field: "kernel", problem };
    let name = path.display();
    let mut file = handed::open(path).map_err(Error::io(format!("open kernel {name}")))?;
    let mut magic = [0; 4];
    file.read_exact(&mut magic)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .map_err(|_| invalid(format!("{name} is no kernel: it is shorter than 4 bytes")))?;
    let start = Some(GuestAddress(layout::HIGH_RAM_START));
    if magic == *b"\x7fELF" {
        let loaded = Elf::load(memory, None, &mut file, start)
            .map_err(|error| invalid(format!("{name} is no bootable vmlinux: {error}")))?;
        let header = setup_header { kernel_alignment: 0x0100_0000, ..Default::default() };
        return Ok((Entry { rip: loaded.kernel_load.0 }, header, loaded.kernel_end));
    }
    let loaded = BzImage::load(memory, None, &mut file, start)
        .map_err(|error| invalid(format!("{name} is neither a bzImage nor a vmlinux: {error}")))?;
    let header = loaded.setup_header.unwrap_or_default();
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(invalid(format!("{name} has no 64-bit entry point; use a 64-bit kernel")));
    }
    // The kernel unpacks itself in place and wants `init_size` bytes for that.
    let end =
        loaded.kernel_end.max(header.pref_address.saturating_add(u64::from(header.init_size)));
    Ok((Entry { rip: loaded.kernel_load.0 + ENTRY_64 }, header, end))
}

fn load_initramfs(
    memory: &GuestMemoryMmap,
    memory_bytes: u64,
    kernel_end: u64,
    path: &Path,
) -> Result<(u64, u64), Error> {
    let name = path.display();
    let mut file = handed::open(path).map_err(Error::io(format!("open initramfs {name}")))?;
    let length = file.metadata().map_err(Error::io(format!("read initramfs {name}")))?.len();
    let top = memory_bytes.min(layout::MMIO_GAP_START);
    let start = top.saturating_sub(length) & !(layout::PAGE_SIZE - 1);
    if length == 0 || length > INITRAMFS_BYTES_MAX || start < kernel_end {
        return Err(Error::Invalid {
            field: "initramfs",
            problem: format!(
                "{name} has {length} bytes; between the kernel and the end of memory there is \
                 room for {}",
                top.saturating_sub(kernel_end)
            ),
        });
    }
    let mut at = start;
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut buffer).map_err(Error::io(format!("read initramfs {name}")))?;
        if read == 0 {
            return Ok((start, length));
        }
        memory.write_slice(&buffer[..read], GuestAddress(at)).map_err(Error::guest_memory)?;
        at += read as u64;
    }
}

fn write_cmdline(memory: &GuestMemoryMmap, cmdline: &str) -> Result<u32, Error> {
    let bytes = cmdline.as_bytes();
    if bytes.len() >= layout::CMDLINE_BYTES_MAX || bytes.contains(&0) {
        return Err(Error::Invalid {
            field: "cmdline",
            problem: format!(
                "{} bytes, or a zero byte within; at most {} are allowed",
                bytes.len(),
                layout::CMDLINE_BYTES_MAX - 1
            ),
        });
    }
    memory.write_slice(bytes, GuestAddress(layout::CMDLINE)).map_err(Error::guest_memory)?;
    memory
        .write_obj(0_u8, GuestAddress(layout::CMDLINE + bytes.len() as u64))
        .map_err(Error::guest_memory)?;
    Ok(u32_of(bytes.len() as u64))
}

fn add_e820(params: &mut boot_params, memory_bytes: u64) {
    let mut add = |addr: u64, end: u64, kind: u32| {
        let entry = boot_e820_entry { addr, size: end - addr, r#type: kind };
        params.e820_table[usize::from(params.e820_entries)] = entry;
        params.e820_entries += 1;
    };
    add(0, layout::LOW_RAM_END, E820_RAM);
    add(layout::LOW_RAM_END, layout::HIGH_RAM_START, E820_RESERVED);
    for (start, length) in layout::ram_regions(memory_bytes) {
        add(start.max(layout::HIGH_RAM_START), start + length, E820_RAM);
    }
}

/// General registers of the boot processor.
#[must_use]
pub fn registers(entry: Entry) -> kvm_regs {
    kvm_regs {
        rflags: 2, // bit 1 is always set
        rip: entry.rip,
        rsp: layout::BOOT_STACK,
        rbp: layout::BOOT_STACK,
        rsi: layout::ZERO_PAGE,
        ..Default::default()
    }
}

/// Writes GDT and page tables, and turns `sregs` into long mode over them.
///
/// # Errors
///
/// [`Error::GuestMemory`] if guest memory does not reach that far.
pub fn long_mode(memory: &GuestMemoryMmap, sregs: &mut kvm_sregs) -> Result<(), Error> {
    const CODE: u64 = 0x00af_9b00_0000_ffff;
    const DATA: u64 = 0x00cf_9300_0000_ffff;
    const CR0_PE: u64 = 1;
    const CR0_PG: u64 = 1 << 31;
    const CR4_PAE: u64 = 1 << 5;
    const EFER_LME_LMA: u64 = 0x500;
    const PRESENT_WRITABLE: u64 = 0x3;
    const LARGE: u64 = 0x83;

    let put = |value: u64, at: u64| {
        memory.write_obj(value, GuestAddress(at)).map_err(Error::guest_memory)
    };
    // Linux wants __BOOT_CS = 0x10 and __BOOT_DS = 0x18.
    put(CODE, layout::BOOT_GDT + 0x10)?;
    put(DATA, layout::BOOT_GDT + 0x18)?;
    put(layout::BOOT_PDPT | PRESENT_WRITABLE, layout::BOOT_PML4)?;
    put(layout::BOOT_PD | PRESENT_WRITABLE, layout::BOOT_PDPT)?;
    for entry in 0..512 {
        put((entry << 21) | LARGE, layout::BOOT_PD + entry * 8)?;
    }

    sregs.gdt.base = layout::BOOT_GDT;
    sregs.gdt.limit = 0x1f;
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = segment(0x10, 11);
    sregs.cs.l = 1;
    let data = kvm_segment { db: 1, ..segment(0x18, 3) };
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.cr3 = layout::BOOT_PML4;
    sregs.cr4 |= CR4_PAE;
    sregs.cr0 |= CR0_PE | CR0_PG;
    sregs.efer |= EFER_LME_LMA;
    Ok(())
}

fn segment(selector: u16, kind: u8) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    }
}

/// Addresses below 4 GiB, by construction of the layout.
fn u32_of(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 128 << 20)]).unwrap()
    }

    fn load_bytes(bytes: &[u8]) -> Error {
        let path = std::env::temp_dir().join(format!("forkd-boot-{}", bytes.len()));
        std::fs::write(&path, bytes).unwrap();
        let error = load(&memory(), 128 << 20, &path, None, "", 0).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        error
    }

    #[test]
    fn a_file_that_is_no_kernel_is_refused_by_name() {
        for bytes in [&b"no"[..], &[0; 4096], b"\x7fELF and then nothing"] {
            let error = load_bytes(bytes);

            assert!(matches!(error, Error::Invalid { field: "kernel", .. }), "{error}");
        }
    }

    #[test]
    fn a_command_line_one_byte_too_long_is_refused() {
        let fits = "x".repeat(layout::CMDLINE_BYTES_MAX - 1);

        assert!(write_cmdline(&memory(), &fits).is_ok());
        assert!(write_cmdline(&memory(), &(fits + "x")).is_err());
    }

    #[test]
    fn the_memory_map_leaves_out_the_gap() {
        let mut params = boot_params::default();

        add_e820(&mut params, 4 << 30);

        let table = params.e820_table;
        let entries: Vec<_> =
            table[..4].iter().map(|entry| (entry.addr, entry.size, entry.r#type)).collect();
        assert_eq!(entries[2], (1 << 20, (3 << 30) - (1 << 20), 1));
        assert_eq!(entries[3], (4 << 30, 1 << 30, 1));
    }
}
