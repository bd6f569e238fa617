//! Which pages of guest memory a process has as its own (`/proc/pid/pagemap`).
//!
//! Guest memory is mapped privately, of a file in memory or of zeros.  The kernel
//! tells a page of the file from a copy of it, so the copies are exactly what a
//! machine has written, without a log of writes and what that costs
//! (`Documentation/admin-guide/mm/pagemap.rst`).
//!
//! The map has an entry for each page that there could be.  Since Linux 6.7 the kernel
//! says where the private ones are (`PAGEMAP_SCAN`), and only their entries are read;
//! so what is done takes as long as what was written, not as the guest is large.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Error;
use crate::layout::PAGE_SIZE;
use crate::sys::handed;

/// This process's own.
pub const OWN: &str = "/proc/self/pagemap";

/// The request by which the kernel is asked where pages of some kinds are:
/// `_IOWR('f', 16, struct pm_scan_arg)` in `include/uapi/linux/fs.h`.
pub const PAGEMAP_SCAN: u32 = 0xc060_6610;
const _: () = assert!(size_of::<Scan>() == 0x60);

/// Entries read at a time.
const ENTRIES_MAX: u64 = 1 << 16;
/// Most stretches of so many entries that are read one by one; with more, all of them are read at
/// once, which takes about as long.
const STRETCHES_MAX: usize = 256;
/// Most private pages of so many that are looked for; with more, all entries are read, and the scan
/// has looked at few of them for nothing.
const SCANNED_MAX: u64 = 1 << 12;
/// Entries between two stretches that are read with them, which costs less than another call.
const GAP_ENTRIES_MAX: u64 = 64;
/// Kinds of pages, as a scan has them.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;
/// Number of the host's page, where it is shown.
const FRAME: u64 = (1 << 55) - 1;
/// Bytes of an entry.
const ENTRY_BYTES: usize = 8;

/// A page that a process has as its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// Its index in guest memory.
    pub page: u64,
    /// Where it is mapped.
    pub address: u64,
    /// Whether no other process maps it as well: one that was forked from this one, or that this
    /// one was forked from.
    pub exclusive: bool,
}

/// A page that this process has as its own, or had when it was forked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Its index in guest memory.
    pub page: u64,
    /// Where it is mapped.
    pub address: u64,
    /// Whether the other process has a copy, which it may differ from; else that has what the
    /// memory was loaded with.
    pub theirs: bool,
}

/// The page map of a process.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    name: String,
    /// Whether the kernel is asked where to look.
    scans: bool,
}

impl From<File> for Pagemap {
    /// One that another process opened and passed on; whether it is one shows when it is read.
    fn from(file: File) -> Self {
        Self { file, name: "a page map that was passed on".to_owned(), scans: true }
    }
}

impl AsRawFd for Pagemap {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Pagemap {
    /// This process's.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if `/proc` does not show it.
    pub fn own() -> Result<Self, Error> {
        let file = handed::open(Path::new(OWN)).map_err(Error::io(format!("open {OWN}")))?;
        Ok(Self { file, name: OWN.to_owned(), scans: true })
    }

    /// Calls `found` for each private page of `memory`, ascending, as long as it returns true.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the map cannot be read, for one because its process has ended.
    pub fn private(
        &self,
        memory: &GuestMemoryMmap,
        mut found: impl FnMut(Private) -> bool,
    ) -> Result<(), Error> {
        let mut buffer = Vec::new();
        for chunk in chunks(memory) {
            for Chunk { page, address, count } in self.scan(chunk).unwrap_or_else(|| vec![chunk]) {
                for (at, entry) in (0..).zip(self.read(address, count, &mut buffer)?) {
                    if !is_private(entry) {
                        continue;
                    }
                    let (page, address) = (page + at, address + at * PAGE_SIZE);
                    if !found(Private { page, address, exclusive: entry & EXCLUSIVE != 0 }) {
                        return Ok(());
                    }
                }
            }
        }
        self.check_lives()
    }

    /// Calls `found` for each page of `memory` in which this process, which `other` forked or which
    /// was forked beside it, may differ from `other`; ascending.
    ///
    /// What both still map to one page of the host is no difference.  The kernel shows which that
    /// is to those who may administer it; to others it shows nothing, and all seems to differ.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if a map cannot be read, for one because its process has ended.
    pub fn differing(
        &self,
        other: &Self,
        memory: &GuestMemoryMmap,
        mut found: impl FnMut(Changed),
    ) -> Result<(), Error> {
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for chunk in chunks(memory) {
            let either = self.scan(chunk).zip(other.scan(chunk));
            let either = either.map(|(ours, others)| joined([ours, others].concat()));
            for Chunk { page, address, count } in either.unwrap_or_else(|| vec![chunk]) {
                let entries = self.read(address, count, &mut ours)?;
                let entries = entries.zip(other.read(address, count, &mut others)?);
                for (at, (our, other)) in (0..).zip(entries) {
                    let theirs = is_private(other);
                    if (theirs || is_private(our)) && !are_one(our, other) {
                        let (page, address) = (page + at, address + at * PAGE_SIZE);
                        found(Changed { page, address, theirs });
                    }
                }
            }
        }
        self.check_lives()?;
        other.check_lives()
    }

    /// The parts of `chunk` outside of which no page is private; `None` if the kernel does not say,
    /// or there are too many.
    ///
    /// A process that has ended has none.
    fn scan(&self, chunk: Chunk) -> Option<Vec<Chunk>> {
        if !self.scans {
            return None;
        }
        let mut found = [[0_u64; 3]; STRETCHES_MAX];
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: chunk.address,
            end: chunk.address + chunk.count * PAGE_SIZE,
            vec: found.as_mut_ptr() as u64,
            vec_len: STRETCHES_MAX as u64,
            max_pages: SCANNED_MAX,
            category_inverted: IS_FILE,
            category_mask: IS_FILE,
            category_anyof_mask: IS_PRESENT | IS_SWAPPED,
            ..Scan::default()
        };
        // SAFETY: the kernel writes to `scan`, and at most `vec_len` entries to `found`; both
        // outlive the call.  A file of another kind refuses the request.
        let count = unsafe { libc::ioctl(self.as_raw_fd(), PAGEMAP_SCAN.into(), &raw mut scan) };
        let found = found.get(..usize::try_from(count).ok()?)?;
        if scan.walk_end < scan.end {
            return None;
        }
        let parts = found.iter().map(|[start, end, _]| chunk.part(*start, *end));
        parts.collect::<Option<Vec<_>>>().map(joined)
    }

    /// A scan finds nothing in a process that has ended, where a read fails.
    fn check_lives(&self) -> Result<(), Error> {
        if self.lives()? {
            return Ok(());
        }
        let source = std::io::ErrorKind::UnexpectedEof.into();
        Err(Error::Io { what: format!("read {}", self.name), source })
    }

    /// Whether the process that it is of lives.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the kernel does not say.
    pub fn lives(&self) -> Result<bool, Error> {
        let read = self.file.read_at(&mut [0; ENTRY_BYTES], 0);
        read.map(|bytes| bytes > 0).map_err(Error::io(format!("read {}", self.name)))
    }

    fn read<'a>(
        &self,
        address: u64,
        count: u64,
        buffer: &'a mut Vec<u8>,
    ) -> Result<impl Iterator<Item = u64> + use<'a>, Error> {
        buffer.resize(usize::try_from(count).unwrap_or(0) * ENTRY_BYTES, 0);
        let offset = address / PAGE_SIZE * ENTRY_BYTES as u64;
        let read = self.file.read_exact_at(buffer, offset);
        read.map_err(Error::io(format!("read {}", self.name)))?;
        let entry = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        Ok(buffer.chunks_exact(ENTRY_BYTES).map(entry))
    }
}

/// What the kernel is asked (`struct pm_scan_arg`).
#[derive(Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Consecutive pages of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    page: u64,
    address: u64,
    count: u64,
}

impl Chunk {
    fn end(self) -> u64 {
        self.address + self.count * PAGE_SIZE
    }

    /// The part of it from one address to another, if it is one.
    fn part(self, start: u64, end: u64) -> Option<Self> {
        let before = start.checked_sub(self.address)? / PAGE_SIZE;
        let count = end.checked_sub(start)? / PAGE_SIZE;
        let part = Self { page: self.page + before, address: start, count };
        (end <= self.end()).then_some(part)
    }
}

/// Parts of one region in order, those that overlap or have little between them as one.
fn joined(mut parts: Vec<Chunk>) -> Vec<Chunk> {
    parts.sort_unstable_by_key(|part| part.page);
    let mut joined: Vec<Chunk> = Vec::with_capacity(parts.len());
    for part in parts {
        match joined.last_mut() {
            Some(last) if part.page <= last.page + last.count + GAP_ENTRIES_MAX => {
                last.count = last.count.max(part.page + part.count - last.page);
            }
            _ => joined.push(part),
        }
    }
    joined
}

fn chunks(memory: &GuestMemoryMmap) -> impl Iterator<Item = Chunk> + '_ {
    let mut first = 0;
    memory.iter().flat_map(move |region| {
        let (start, pages, before) = (region.as_ptr() as u64, region.len() / PAGE_SIZE, first);
        first += pages;
        (0..pages.div_ceil(ENTRIES_MAX)).map(move |number| {
            let at = number * ENTRIES_MAX;
            let count = ENTRIES_MAX.min(pages - at);
            Chunk { page: before + at, address: start + at * PAGE_SIZE, count }
        })
    })
}

fn is_private(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE_OR_SHARED == 0
}

/// Whether two processes map one page of the host.  It may move while its two entries are read, so
/// the one must say besides that it is shared.
fn are_one(our: u64, other: u64) -> bool {
    let present = our & other & PRESENT != 0 && our & EXCLUSIVE == 0;
    present && our & FRAME != 0 && our & FRAME == other & FRAME
}

#[cfg(test)]
mod tests {
    use std::process;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::layout::{self, address_of};
    use crate::memory::delta::save;
    use crate::memory::ram::Ram;
    use crate::memory::seed_memory::tests::Seed;
    use crate::snapshot::pages::Lineage;

    const GRANULE_PAGES: u64 = layout::MEMORY_GRANULE / PAGE_SIZE;

    /// Memory with an image in each other granule of the first few, and zeros elsewhere.
    fn memory(name: &str) -> Ram {
        let bytes = layout::MEMORY_BYTES_MIN;
        let source = Ram::fresh(bytes).unwrap();
        for granule in [0, 1, 3, 8] {
            write(source.view(), granule * GRANULE_PAGES + 5);
        }
        let path = std::env::temp_dir().join(format!("forkd-pagemap-{}-{name}", process::id()));
        save(&source, &Lineage::default(), &[], &path).unwrap();
        let ram = Ram::load(bytes, std::slice::from_ref(&path)).unwrap();
        std::fs::remove_file(path).unwrap();
        ram
    }

    fn write(view: &GuestMemoryMmap, page: u64) {
        view.write_obj(7_u8, GuestAddress(address_of(page))).unwrap();
    }

    fn read(view: &GuestMemoryMmap, page: u64) {
        let _: u8 = view.read_obj(GuestAddress(address_of(page))).unwrap();
    }

    fn found(map: &Pagemap, view: &GuestMemoryMmap) -> Vec<Private> {
        let mut found = Vec::new();
        let mut note = |page| {
            found.push(page);
            true
        };
        map.private(view, &mut note).unwrap();
        found
    }

    /// This process's, as it is read where the kernel does not scan.
    fn read_whole() -> Pagemap {
        Pagemap { scans: false, ..Pagemap::own().unwrap() }
    }

    /// Whether the kernel scans.
    fn scans() -> bool {
        let nothing = Ram::load(layout::MEMORY_BYTES_MIN, &[]).unwrap();
        Pagemap::own().unwrap().scan(chunks(nothing.view()).next().unwrap()).is_some()
    }

    const PAGES: u64 = layout::MEMORY_BYTES_MIN / PAGE_SIZE;

    #[test]
    fn a_scan_finds_what_reading_all_finds() {
        let ram = memory("all");
        let view = ram.view();
        let image = [0, 1, 5, 511, 512, 3 * GRANULE_PAGES + 5, 8 * GRANULE_PAGES + 9];
        for page in image {
            read(view, page);
        }
        read(view, PAGES - 7);
        for written in [
            vec![],
            vec![5, 6, 600, PAGES - 1],
            (4096..4096 + 70).step_by(3).collect(),
            (4 * GRANULE_PAGES..5 * GRANULE_PAGES).collect(),
            (16384..=16384 + SCANNED_MAX).collect(),
            (8192..8192 + 300 * (GAP_ENTRIES_MAX + 2)).step_by(66).collect(),
        ] {
            for page in &written {
                write(view, *page);
            }

            let by_scan = found(&Pagemap::own().unwrap(), view);

            assert_eq!(by_scan, found(&read_whole(), view));
            assert!(written.iter().all(|page| by_scan.iter().any(|each| each.page == *page)));
        }
    }

    #[test]
    fn a_scan_finds_the_differences_that_reading_all_finds() {
        let ram = memory("differences");
        let view = ram.view();
        for page in [5, 6, 900] {
            write(view, page);
        }
        let seed = Seed::fork();
        let seed = seed.memory();
        for page in [6, 7, 9000, PAGES - 1] {
            write(view, page);
        }
        let differing = |map: &Pagemap| {
            let mut found = Vec::new();
            map.differing(seed.pagemap(), view, |changed| found.push(changed)).unwrap();
            found
        };

        let by_scan = differing(&Pagemap::own().unwrap());

        assert_eq!(by_scan, differing(&read_whole()));
        assert!([6, 7, 9000, PAGES - 1].iter().all(|at| by_scan.iter().any(|it| it.page == *at)));
    }

    #[test]
    fn of_a_large_guest_only_what_it_has_is_read_where_the_kernel_scans() {
        let ram = Ram::fresh(64 << 30).unwrap();
        let last = (64 << 30) / PAGE_SIZE - 1;
        for page in [3, last] {
            write(ram.view(), page);
        }
        let own = Pagemap::own().unwrap();

        let parts: Vec<_> =
            chunks(ram.view()).filter_map(|chunk| own.scan(chunk)).flatten().collect();
        let pages: Vec<_> = found(&own, ram.view()).iter().map(|found| found.page).collect();

        assert!(pages.contains(&3) && pages.contains(&last), "{pages:?}");
        let read: u64 = parts.iter().map(|part| part.count).sum();
        assert!(!scans() || read <= 2 * GRANULE_PAGES, "{parts:?}");
    }

    #[test]
    fn a_chunk_with_one_page_too_many_is_read_whole() {
        let ram = Ram::load(layout::MEMORY_BYTES_MIN, &[]).unwrap();
        let scan = || Pagemap::own().unwrap().scan(chunks(ram.view()).next().unwrap());
        (0..SCANNED_MAX - 1).for_each(|page| write(ram.view(), page));
        assert!(!scans() || scan().is_some());

        (SCANNED_MAX - 1..=SCANNED_MAX).for_each(|page| write(ram.view(), page));

        assert_eq!(scan(), None);
        assert_eq!(found(&Pagemap::own().unwrap(), ram.view()).len() as u64, SCANNED_MAX + 1);
    }

    #[test]
    fn a_chunk_with_too_many_stretches_is_read_whole() {
        let ram = Ram::load(layout::MEMORY_BYTES_MIN, &[]).unwrap();
        let stretch = |number: usize| number as u64 * 2;
        (0..STRETCHES_MAX - 1).for_each(|number| write(ram.view(), stretch(number)));
        let scan = || Pagemap::own().unwrap().scan(chunks(ram.view()).next().unwrap());
        assert!(!scans() || scan().is_some());

        (STRETCHES_MAX - 1..=STRETCHES_MAX).for_each(|number| write(ram.view(), stretch(number)));

        assert_eq!(scan(), None);
        assert_eq!(found(&Pagemap::own().unwrap(), ram.view()).len(), STRETCHES_MAX + 1);
    }

    #[test]
    fn parts_that_overlap_or_nearly_touch_are_one() {
        let part = |page, count| Chunk { page, address: page * PAGE_SIZE, count };
        let gap = GAP_ENTRIES_MAX;

        assert_eq!(joined(vec![part(4, 6), part(0, 5)]), [part(0, 10)]);
        assert_eq!(joined(vec![part(0, 10), part(2, 3)]), [part(0, 10)]);
        assert_eq!(joined(vec![part(0, 1), part(1 + gap, 1)]), [part(0, 2 + gap)]);
        assert_eq!(joined(vec![part(0, 1), part(2 + gap, 1)]).len(), 2);
    }

    #[test]
    fn the_map_of_a_process_that_has_ended_has_nothing_to_say() {
        let ram = Ram::fresh(layout::MEMORY_BYTES_MIN).unwrap();
        let process = Seed::fork();
        let seed = process.memory();
        drop(process);

        assert!(seed.pagemap().private(ram.view(), |_| true).is_err());
        assert!(Pagemap::own().unwrap().differing(seed.pagemap(), ram.view(), |_| ()).is_err());
    }

    #[test]
    fn pages_in_memory_or_swapped_out_are_private_and_those_of_a_file_are_not() {
        assert!(is_private(PRESENT) && is_private(SWAPPED | EXCLUSIVE));
        assert!(!is_private(0) && !is_private(PRESENT | FILE_OR_SHARED));
    }

    #[test]
    fn two_entries_are_of_one_page_only_if_its_number_is_shown_and_it_is_shared() {
        assert!(are_one(PRESENT | 7, PRESENT | 7));
        assert!(!are_one(PRESENT | 7, PRESENT | 8));
        assert!(!are_one(PRESENT, PRESENT), "not shown");
        assert!(!are_one(PRESENT | EXCLUSIVE | 7, PRESENT | 7), "it moved meanwhile");
        assert!(!are_one(SWAPPED | 7, SWAPPED | 7));
    }
}
