//! Guest memory: made fresh, saved to a file, loaded once, and shared by forks.
//!
//! A fresh machine runs on anonymous memory.  A zygote reads the chain of memory
//! files once, verifying each, into one memfd; that is *the image*.  It maps the
//! image privately, and a fork inherits the mapping: the kernel shares every page
//! until somebody writes to it.  Nothing on disk is needed after that, so nobody
//! can pull it from under a running child.

use std::fs::File;
use std::io::Write;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MemoryRegionAddress,
};

use crate::error::Error;
use crate::layout::{self, PAGE_SIZE};
use crate::process;
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};
use crate::snapshot::runs::{Collector, Run, Table};

/// Pages that are copied at a time.
const COPY_PAGES: u64 = 256;

/// Checks a size of guest memory.
///
/// # Errors
///
/// [`Error::Invalid`] naming the limits.
pub fn check_size(memory_bytes: u64) -> Result<(), Error> {
    let allowed = layout::MEMORY_BYTES_MIN..=layout::MEMORY_BYTES_MAX;
    if allowed.contains(&memory_bytes) && memory_bytes.is_multiple_of(layout::MEMORY_GRANULE) {
        return Ok(());
    }
    Err(Error::Invalid {
        field: "memory_bytes",
        problem: format!(
            "{memory_bytes} is not a multiple of {} from {} to {}",
            layout::MEMORY_GRANULE,
            layout::MEMORY_BYTES_MIN,
            layout::MEMORY_BYTES_MAX
        ),
    })
}

/// Memory of a machine that boots: anonymous, zero, not reserved.
///
/// # Errors
///
/// [`Error::GuestMemory`] if the address space does not hold it.
pub fn anonymous(memory_bytes: u64) -> Result<GuestMemoryMmap, Error> {
    build(memory_bytes, None)
}

/// A private view of `image`.
///
/// # Errors
///
/// [`Error::GuestMemory`] if the address space does not hold it.
pub fn private_view(memory_bytes: u64, image: &File) -> Result<GuestMemoryMmap, Error> {
    build(memory_bytes, Some(image))
}

fn build(memory_bytes: u64, image: Option<&File>) -> Result<GuestMemoryMmap, Error> {
    let mut offset = 0;
    let mut regions = Vec::new();
    for (start, length) in layout::ram_regions(memory_bytes) {
        let mapped = process::map_privately(length, layout::MEMORY_GRANULE, image, offset)?;
        let bytes = usize::try_from(length).map_err(Error::guest_memory)?;
        let mut builder = MmapRegionBuilder::new(bytes)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        if let Some(image) = image {
            let image = image.try_clone().map_err(Error::io("duplicate the image"))?;
            builder = builder.with_file_offset(FileOffset::new(image, offset));
        }
        // SAFETY: the range was mapped just now, for this region alone, and is never
        // unmapped: guest
        // memory lives as long as its process.
        let builder = unsafe { builder.with_raw_mmap_pointer(mapped) };
        let region = builder.build().map_err(Error::guest_memory)?;
        let region = GuestRegionMmap::new(region, GuestAddress(start))
            .ok_or_else(|| Error::GuestMemory("a region overflows the address space".into()))?;
        regions.push(region);
        offset += length;
    }
    GuestMemoryMmap::from_regions(regions).map_err(Error::guest_memory)
}

/// Loads a chain of memory files, base first.  Each is verified as it is read.
///
/// The result is what forks inherit; nobody writes to it any more.
///
/// # Errors
///
/// [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming the file at fault;
/// [`Error::Damaged`] if a file is of another size of memory; [`Error::Io`].
pub fn load(memory_bytes: u64, chain: &[PathBuf]) -> Result<GuestMemoryMmap, Error> {
    if process::huge_pages_on_request() {
        let memory = anonymous(memory_bytes)?;
        for region in memory.iter() {
            process::advise_huge_pages(region.as_ptr(), region.len());
        }
        load_chain(memory_bytes, chain, |page, bytes| {
            memory.write_slice(bytes, GuestAddress(address_of(page))).map_err(Error::guest_memory)
        })?;
        return Ok(memory);
    }
    let image = memfd(memory_bytes)?;
    load_chain(memory_bytes, chain, |page, bytes| {
        image.write_all_at(bytes, page * PAGE_SIZE).map_err(Error::io("fill the memory image"))
    })?;
    private_view(memory_bytes, &image)
}

/// Reads a chain, and hands its pages to `store`: the first one's index, and their bytes.
fn load_chain(
    memory_bytes: u64,
    chain: &[PathBuf],
    mut store: impl FnMut(u64, &[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut buffer = vec![0; usize::try_from(COPY_PAGES * PAGE_SIZE).unwrap_or(0)];
    for path in chain {
        let mut reader = BodyReader::open(path, Kind::Memory)?;
        let table = Table::read(&mut reader)?;
        if table.total_bytes != memory_bytes {
            return Err(Error::Damaged(format!(
                "{} covers {} bytes of memory, the machine has {memory_bytes}",
                reader.name(),
                table.total_bytes
            )));
        }
        for run in &table.runs {
            for part in pieces(*run) {
                let bytes = usize::try_from(part.count * PAGE_SIZE).unwrap_or(0);
                reader.fill(&mut buffer[..bytes])?;
                store(part.first, &buffer[..bytes])?;
            }
        }
        reader.finish()?;
    }
    Ok(())
}

/// Cuts a run into pieces that fit a buffer, none of which crosses the gap below 4 GiB.
fn pieces(run: Run) -> impl Iterator<Item = Run> {
    let end = run.first + run.count;
    let mut first = run.first;
    std::iter::from_fn(move || {
        let boundary = (first / COPY_PAGES + 1) * COPY_PAGES;
        let count = boundary.min(end).checked_sub(first).filter(|count| *count > 0)?;
        let piece = Run { first, count };
        first += count;
        Some(piece)
    })
}

/// An image of zeros.
///
/// # Errors
///
/// [`Error::Io`].
pub fn empty_image(bytes: u64) -> Result<File, Error> {
    memfd(bytes)
}

fn memfd(bytes: u64) -> Result<File, Error> {
    // SAFETY: the name is a NUL-terminated constant; the call has no other requirement.
    let fd = unsafe { libc::memfd_create(c"forkd-memory".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Error::last_os("memfd_create"));
    }
    // SAFETY: the kernel opened `fd` for us just now, and nothing else knows its number.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).map_err(Error::io("size the memory image"))?;
    Ok(file)
}

/// Writes all pages of `memory` that are not zero to `target`.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written; nothing is left under its name then.
pub fn save(memory: &GuestMemoryMmap, target: &std::path::Path) -> Result<Written, Error> {
    let mut total_bytes = 0;
    let mut collector = Collector::default();
    let mut page = [0_u8; 4096];
    let touched = Touched::open()?;
    for region in memory.iter() {
        let first_page = total_bytes / PAGE_SIZE;
        for index in touched.pages(region)? {
            read_page(region, index, &mut page)?;
            if page.iter().any(|byte| *byte != 0) {
                collector.add(first_page + index);
            }
        }
        total_bytes += region.len();
    }
    let table = Table { total_bytes, runs: collector.into_runs() };
    let mut writer = BodyWriter::create(target, Kind::Memory)?;
    table.write(&mut writer)?;
    copy_runs(memory, &table, &mut writer)?;
    writer.commit()
}

fn copy_runs(
    memory: &GuestMemoryMmap,
    table: &Table,
    writer: &mut BodyWriter,
) -> Result<(), Error> {
    let mut buffer = vec![0; usize::try_from(COPY_PAGES * PAGE_SIZE).unwrap_or(0)];
    for part in table.runs.iter().flat_map(|run| pieces(*run)) {
        let bytes = usize::try_from(part.count * PAGE_SIZE).unwrap_or(0);
        // A run may cross from below the gap to above it, a page never does.
        for (slot, page) in buffer[..bytes].chunks_mut(4096).zip(part.first..) {
            let address = GuestAddress(address_of(page));
            memory.read_slice(slot, address).map_err(Error::guest_memory)?;
        }
        writer.write_all(&buffer[..bytes]).map_err(Error::io("write the memory file"))?;
    }
    Ok(())
}

/// Guest address of the page with this index.
#[must_use]
pub fn address_of(page: u64) -> u64 {
    let offset = page * PAGE_SIZE;
    if offset < layout::MMIO_GAP_START {
        offset
    } else {
        offset - layout::MMIO_GAP_START + layout::MMIO_GAP_END
    }
}

fn read_page(region: &GuestRegionMmap, index: u64, page: &mut [u8; 4096]) -> Result<(), Error> {
    region.read_slice(page, MemoryRegionAddress(index * PAGE_SIZE)).map_err(Error::guest_memory)
}

/// `/proc/self/pagemap` (`Documentation/admin-guide/mm/pagemap.rst`): which pages exist at all.
///
/// Reading a page of anonymous memory that was never written would map the zero page: slow for a
/// machine of many GiB, and pointless.
struct Touched {
    pagemap: File,
}

impl Touched {
    fn open() -> Result<Self, Error> {
        let pagemap =
            File::open("/proc/self/pagemap").map_err(Error::io("open /proc/self/pagemap"))?;
        Ok(Self { pagemap })
    }

    /// Indices, within `region`, of pages that are present or swapped out; all of them for a
    /// region with a file behind it, whose pages may exist without being mapped here.
    fn pages(&self, region: &GuestRegionMmap) -> Result<Vec<u64>, Error> {
        const PRESENT_OR_SWAPPED: u64 = 3 << 62;
        let count = region.len() / PAGE_SIZE;
        if region.file_offset().is_some() {
            return Ok((0..count).collect());
        }
        let first = region.as_ptr() as u64 / PAGE_SIZE;
        let mut entries = vec![0; usize::try_from(count * 8).unwrap_or(0)];
        self.pagemap
            .read_exact_at(&mut entries, first * 8)
            .map_err(Error::io("read /proc/self/pagemap"))?;
        let touched = entries.chunks_exact(8).zip(0..).filter_map(|(entry, index)| {
            let entry = u64::from_le_bytes(entry.try_into().ok()?);
            (entry & PRESENT_OR_SWAPPED != 0).then_some(index)
        });
        Ok(touched.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("forkd-memory-{}-{name}", std::process::id()))
    }

    #[test]
    fn what_was_saved_is_what_a_view_of_the_image_shows() {
        let bytes = layout::MEMORY_BYTES_MIN;
        let memory = anonymous(bytes).unwrap();
        memory.write_slice(b"first", GuestAddress(10)).unwrap();
        memory.write_slice(b"last", GuestAddress(bytes - 4)).unwrap();
        let target = path("round-trip");

        let written = save(&memory, &target).unwrap();

        let view = load(bytes, std::slice::from_ref(&target)).unwrap();
        let (mut first, mut last) = ([0; 5], [0; 4]);
        view.read_slice(&mut first, GuestAddress(10)).unwrap();
        view.read_slice(&mut last, GuestAddress(bytes - 4)).unwrap();
        assert_eq!((&first, &last), (b"first", b"last"));
        assert!(written.bytes < 16384, "zero pages cost nothing: {}", written.bytes);
        std::fs::remove_file(target).unwrap();
    }

    #[test]
    fn writes_to_a_view_do_not_reach_the_image() {
        let bytes = layout::MEMORY_BYTES_MIN;
        let image = memfd(bytes).unwrap();
        let (left, right) =
            (private_view(bytes, &image).unwrap(), private_view(bytes, &image).unwrap());

        left.write_slice(b"mine", GuestAddress(0)).unwrap();

        assert_eq!(right.read_obj::<u32>(GuestAddress(0)).unwrap(), 0);
    }

    #[test]
    fn a_flipped_bit_in_a_page_is_found_when_loading() {
        let bytes = layout::MEMORY_BYTES_MIN;
        let memory = anonymous(bytes).unwrap();
        memory.write_slice(b"page", GuestAddress(0)).unwrap();
        let target = path("flipped");
        save(&memory, &target).unwrap();
        let mut stored = std::fs::read(&target).unwrap();
        let last = stored.len() - 1;
        stored[last] ^= 1;
        std::fs::write(&target, &stored).unwrap();

        let error = load(bytes, std::slice::from_ref(&target)).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::Damaged);
        std::fs::remove_file(target).unwrap();
    }

    #[test]
    fn a_page_above_the_gap_has_an_address_above_the_gap() {
        let last_below = layout::MMIO_GAP_START / PAGE_SIZE - 1;

        assert_eq!(address_of(last_below) + PAGE_SIZE, layout::MMIO_GAP_START);
        assert_eq!(address_of(last_below + 1), layout::MMIO_GAP_END);
    }

    #[test]
    fn sizes_one_granule_outside_the_limits_are_refused() {
        let granule = layout::MEMORY_GRANULE;

        assert!(check_size(layout::MEMORY_BYTES_MIN).is_ok());
        assert!(check_size(layout::MEMORY_BYTES_MIN - granule).is_err());
        assert!(check_size(layout::MEMORY_BYTES_MAX + granule).is_err());
        assert!(check_size(layout::MEMORY_BYTES_MIN + 4096).is_err());
    }
}
