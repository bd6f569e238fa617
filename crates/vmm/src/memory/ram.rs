//! Guest memory: made fresh, loaded once, and shared by forks.
//!
//! A fresh machine runs on zeros.  A zygote reads the chain of memory files once,
//! verifying each, into a file in memory; that is *the image*.  It maps the image
//! privately, where it has anything at all, and zeros elsewhere; a fork inherits
//! the mapping.  So
//!
//! - a fork copies no page table: the kernel finds a file's pages again;
//! - the pages that the kernel has copied are what a machine has written
//!   ([`crate::sys::pagemap`]), and dropping them takes it back;
//! - nothing on disk is needed after that, so nobody can pull it from under a
//!   running child;
//! - the image is sealed once it is loaded: a fork has its descriptor, and can no
//!   more change with it what its siblings see than with its mapping.
//!
//! The image is in huge pages where the host has any for files in memory
//! (`Documentation/admin-guide/mm/transhuge.rst`, `shmem_enabled`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

use crate::error::Error;
use crate::layout::{self, PAGE_SIZE, address_of};
use crate::memory::seed_memory::SeedMemory;
use crate::memory::sheet::{GRANULE_BYTES, GRANULE_PAGES, Sealed, Sheet, pages_by_granule};
use crate::snapshot::pages::MemoryFile;
use crate::snapshot::runs::Run;
use crate::sys::mapping;
use crate::sys::meminfo;
use crate::sys::pagemap::{Changed, Pagemap, Private};

/// A granule of which a delta holds at least so many pages is made anew in a file; below that the
/// pages are copied one by one.  A fork pays for each copied page, and memory for each granule.
const DENSE_PAGES: u64 = GRANULE_PAGES / 4;

/// Most of the memory that the host has available which an image may take, in percent.
///
/// An image has a whole granule for each that holds anything, so a file of 2 GiB may ask for a
/// tebibyte.
const AVAILABLE_PERCENT_MAX: u64 = 90;
/// Most bytes that are read at a time of what another process holds.
const STRETCH_BYTES_MAX: u64 = 1 << 20;

/// A machine's memory, as this process maps it.
#[derive(Clone, Debug)]
pub struct Ram {
    view: GuestMemoryMmap,
    bytes: u64,
    // Granules behind which there is a file, and where in it they are.
    granules: BTreeMap<u64, Source>,
    // Pages of deltas that were copied one by one, and where they can be had again.
    sparse: BTreeMap<u64, Source>,
}

/// A file in memory, and an offset.
type Source = (Arc<File>, u64);

impl Ram {
    /// Memory of a machine that boots: zero, not reserved, in huge pages where there are any.
    ///
    /// # Errors
    ///
    /// [`Error::GuestMemory`] if the address space does not hold it.
    pub fn fresh(bytes: u64) -> Result<Self, Error> {
        let ram = Self::zeros(bytes)?;
        for region in ram.view.iter() {
            mapping::advise_huge_pages(region.as_ptr(), region.len());
        }
        Ok(ram)
    }

    fn zeros(bytes: u64) -> Result<Self, Error> {
        let mut regions = Vec::new();
        for (start, length) in layout::ram_regions(bytes) {
            let mapped = mapping::map_zeros(length, GRANULE_BYTES)?;
            let builder =
                MmapRegionBuilder::new(usize::try_from(length).map_err(Error::guest_memory)?)
                    .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                    .with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_NORESERVE);
            // SAFETY: the range was mapped just now, for this region alone, and is never
            // unmapped: guest memory lives as long as its process.
            let builder = unsafe { builder.with_raw_mmap_pointer(mapped) };
            let region = builder.build().map_err(Error::guest_memory)?;
            let region = GuestRegionMmap::new(region, GuestAddress(start))
                .ok_or_else(|| Error::GuestMemory("a region overflows the address space".into()))?;
            regions.push(region);
        }
        let view = GuestMemoryMmap::from_regions(regions).map_err(Error::guest_memory)?;
        Ok(Self { view, bytes, granules: BTreeMap::new(), sparse: BTreeMap::new() })
    }

    /// Loads a chain of memory files, base first.  Each is verified as it is read.
    ///
    /// The result is what forks inherit; nobody writes to it any more.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming the file at fault;
    /// [`Error::Damaged`] if a file is of another size of memory; [`Error::Capacity`] if the host
    /// has not enough memory available, before any is taken; [`Error::Io`].
    pub fn load(bytes: u64, chain: &[PathBuf]) -> Result<Self, Error> {
        Self::load_within(meminfo::available_bytes()?, bytes, chain)
    }

    fn load_within(available: u64, bytes: u64, chain: &[PathBuf]) -> Result<Self, Error> {
        let mut granules = BTreeSet::new();
        for path in chain {
            let file = MemoryFile::open(path, bytes)?;
            granules.extend(pages_by_granule(file.runs()).into_keys());
        }
        check_room(granules.len() as u64 * GRANULE_BYTES, available)?;
        let mut ram = Self::zeros(bytes)?;
        let Some(mut sheet) = Sheet::new(&granules)? else { return Ok(ram) };
        for path in chain {
            MemoryFile::open(path, bytes)?.read(|page, bytes| sheet.write(page, bytes))?;
        }
        ram.lay(&sheet.seal()?)?;
        Ok(ram)
    }

    /// Writes the pages of a delta over this memory, which must not be in use.
    ///
    /// # Errors
    ///
    /// As [`Self::load`]; the memory is of no use then.
    pub fn overlay(&mut self, delta: &Path) -> Result<(), Error> {
        let file = MemoryFile::open(delta, self.bytes)?;
        let (dense, sparse): (BTreeMap<_, _>, BTreeMap<_, _>) =
            pages_by_granule(file.runs()).into_iter().partition(|(_, pages)| *pages >= DENSE_PAGES);
        // A sparse page is both in a file in memory and in this process.
        let copied = 2 * PAGE_SIZE * sparse.into_values().sum::<u64>();
        let room = meminfo::available_bytes()?;
        check_room(dense.len() as u64 * GRANULE_BYTES + copied, room)?;
        let dense = dense.into_keys().collect();
        let mut sheet = Sheet::new(&dense)?;
        if let Some(sheet) = &mut sheet {
            sheet.copy_from(&self.view)?;
        }
        let scattered = Arc::new(mapping::memory_file(0)?);
        let mut end = 0;
        file.read(|page, bytes| match &mut sheet {
            Some(sheet) if sheet.holds(page) => sheet.write(page, bytes),
            _ => {
                let stored = scattered.write_all_at(bytes, end);
                stored.map_err(Error::io("keep a delta's pages"))?;
                for (page, offset) in (page..).zip((0..bytes.len() as u64).step_by(4096)) {
                    self.sparse.insert(page, (Arc::clone(&scattered), end + offset));
                }
                end += bytes.len() as u64;
                put(&self.view, page, bytes)
            }
        })?;
        mapping::seal(&scattered)?;
        let Some(sheet) = sheet else { return Ok(()) };
        self.sparse.retain(|page, _| !sheet.holds(*page));
        self.lay(&sheet.seal()?)
    }

    /// Takes back every write since the memory was loaded, or since it was what `seed` has.  `own`
    /// is this process's page map.
    ///
    /// Pages that `keep` names are filled again where they are: whoever writes to them soon need
    /// not have them copied, nor mapped, once more.  So are those that `seed` has a copy of, which
    /// are nowhere else.  Others are given back.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] or [`Error::GuestMemory`]; the memory is of no use then.
    pub fn rewind(
        &self,
        own: &Pagemap,
        seed: Option<&SeedMemory>,
        keep: impl Fn(u64) -> bool,
    ) -> Result<(), Error> {
        let (mut refill, mut copy) = (Vec::new(), Vec::new());
        let mut give_back: Vec<(u64, u64)> = Vec::new();
        let mut sort = |Changed { page, address, theirs }: Changed| {
            if theirs {
                Stretch::extend(&mut copy, page, address);
            } else if self.sparse.contains_key(&page) || keep(address) {
                refill.push(page);
            } else {
                match give_back.last_mut() {
                    Some((start, bytes)) if *start + *bytes == address => *bytes += PAGE_SIZE,
                    _ => give_back.push((address, PAGE_SIZE)),
                }
            }
        };
        match seed {
            Some(seed) => own.differing(seed.pagemap(), &self.view, &mut sort)?,
            None => own.private(&self.view, |Private { page, address, .. }| {
                sort(Changed { page, address, theirs: false });
                true
            })?,
        }
        for (start, bytes) in give_back {
            mapping::drop_private(start, bytes)?;
        }
        if let Some(seed) = seed {
            self.copy_from(seed, &copy)?;
        }
        let mut bytes = [0; 4096];
        for page in refill {
            self.original(page, &mut bytes)?;
            put(&self.view, page, &bytes)?;
        }
        Ok(())
    }

    /// Makes pages what they are in `seed`.  One that is that already is not written: it may still
    /// be shared, and would be copied for nothing.
    fn copy_from(&self, seed: &SeedMemory, stretches: &[Stretch]) -> Result<(), Error> {
        let mut theirs = vec![0; usize::try_from(STRETCH_BYTES_MAX).unwrap_or(0)];
        let mut ours = [0; 4096];
        for Stretch { page, address, bytes } in stretches {
            let theirs = &mut theirs[..usize::try_from(*bytes).unwrap_or(0)];
            seed.read(*address, theirs)?;
            for (page, theirs) in (*page..).zip(theirs.chunks_exact(ours.len())) {
                let at = GuestAddress(address_of(page));
                self.view.read_slice(&mut ours, at).map_err(Error::guest_memory)?;
                if ours != theirs {
                    put(&self.view, page, theirs)?;
                }
            }
        }
        Ok(())
    }

    /// Fills `bytes` with a page as it was loaded.
    fn original(&self, page: u64, bytes: &mut [u8; 4096]) -> Result<(), Error> {
        let granule = self.granules.get(&(page / GRANULE_PAGES));
        let source = self.sparse.get(&page).map(|(file, offset)| (file, *offset)).or_else(|| {
            granule.map(|(file, offset)| (file, offset + page % GRANULE_PAGES * PAGE_SIZE))
        });
        match source {
            None => bytes.fill(0),
            Some((file, offset)) => {
                file.read_exact_at(bytes, offset).map_err(Error::io("read a page of the image"))?;
            }
        }
        Ok(())
    }

    /// Maps what a sheet holds in the place of what was there.
    fn lay(&mut self, sheet: &Sealed) -> Result<(), Error> {
        for (run, slot) in sheet.runs() {
            let address = GuestAddress(address_of(run.first * GRANULE_PAGES));
            let start = self.view.get_host_address(address).map_err(Error::guest_memory)?;
            mapping::cover(start, run.count * GRANULE_BYTES, &sheet.file, slot * GRANULE_BYTES)?;
        }
        for (granule, slot) in &sheet.slots {
            let source = (Arc::clone(&sheet.file), slot * GRANULE_BYTES);
            self.granules.insert(*granule, source);
        }
        Ok(())
    }

    /// The memory, by guest address.
    #[must_use]
    pub fn view(&self) -> &GuestMemoryMmap {
        &self.view
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The descriptors of the files that it was loaded into.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        let files = self.granules.values().chain(self.sparse.values()).map(|(file, _)| file);
        let descriptors: BTreeSet<i32> = files.map(AsRawFd::as_raw_fd).collect();
        descriptors.into_iter()
    }

    /// Pages that come from the image unless they were written since; others are zero unless they
    /// were.
    pub fn backed(&self) -> impl Iterator<Item = Run> + '_ {
        let pages = |granule: &u64| Run { first: granule * GRANULE_PAGES, count: GRANULE_PAGES };
        self.granules.keys().map(pages)
    }

    /// Bytes of the files in memory that it was loaded into, and of what was copied of them since.
    #[must_use]
    pub fn loaded_bytes(&self) -> u64 {
        self.granules.len() as u64 * GRANULE_BYTES + 2 * self.sparse.len() as u64 * PAGE_SIZE
    }
}

/// Consecutive pages that are mapped one after the other.
#[derive(Debug)]
struct Stretch {
    page: u64,
    address: u64,
    bytes: u64,
}

impl Stretch {
    /// Adds a page, which is above all others, to the last of `stretches`, or begins another.
    fn extend(stretches: &mut Vec<Self>, page: u64, address: u64) {
        match stretches.last_mut() {
            Some(last)
                if last.address + last.bytes == address && last.bytes < STRETCH_BYTES_MAX =>
            {
                last.bytes += PAGE_SIZE;
            }
            _ => stretches.push(Self { page, address, bytes: PAGE_SIZE }),
        }
    }
}

/// Refuses to take `needed` bytes of the `available` ones if that is too much.
fn check_room(needed: u64, available: u64) -> Result<(), Error> {
    if needed <= available / 100 * AVAILABLE_PERCENT_MAX {
        Ok(())
    } else {
        Err(Error::Capacity { needed_bytes: needed, available_bytes: available })
    }
}

fn put(view: &GuestMemoryMmap, page: u64, bytes: &[u8]) -> Result<(), Error> {
    view.write_slice(bytes, GuestAddress(address_of(page))).map_err(Error::guest_memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::delta::save;
    use crate::memory::seed_memory::tests::Seed;
    use crate::snapshot::pages::Lineage;
    use std::io::Write;
    use std::os::fd::BorrowedFd;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("forkd-memory-{}-{name}", std::process::id()))
    }

    fn own() -> Pagemap {
        Pagemap::own().unwrap()
    }

    fn byte(ram: &Ram, page: u64) -> u8 {
        ram.view().read_obj(GuestAddress(address_of(page))).unwrap()
    }

    fn set(ram: &Ram, page: u64, value: u8) {
        ram.view().write_obj(value, GuestAddress(address_of(page))).unwrap();
    }

    /// A base with ones in `pages`, loaded again.
    fn loaded(name: &str, pages: &[u64]) -> (Ram, PathBuf) {
        let ram = Ram::fresh(layout::MEMORY_BYTES_MIN).unwrap();
        for page in pages {
            set(&ram, *page, 1);
        }
        let target = path(name);
        save(&ram, &Lineage::default(), &[], &target).unwrap();
        (Ram::load(ram.bytes(), std::slice::from_ref(&target)).unwrap(), target)
    }

    #[test]
    fn what_was_saved_is_what_is_loaded() {
        let last = layout::MEMORY_BYTES_MIN / PAGE_SIZE - 1;
        let (ram, file) = loaded("round-trip", &[0, 700, last]);

        assert_eq!([0, 1, 700, last].map(|page| byte(&ram, page)), [1, 0, 1, 1]);
        assert!(std::fs::metadata(&file).unwrap().len() < 16384, "zero pages cost nothing");
        assert_eq!(ram.backed().map(|run| run.count).sum::<u64>(), 3 * GRANULE_PAGES);
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn an_image_of_one_granule_more_than_the_host_has_is_refused() {
        let (ram, file) = loaded("room", &[0, 700]);
        let chain = std::slice::from_ref(&file);
        let enough = 2 * GRANULE_BYTES * 100 / AVAILABLE_PERCENT_MAX + 100;
        let load = |available| Ram::load_within(available, ram.bytes(), chain);

        assert!(load(enough).is_ok());
        let refused = load(enough - GRANULE_BYTES).unwrap_err();

        assert_eq!(refused.code(), forkd_proto::control::ErrorCode::Capacity);
        std::fs::remove_file(file).unwrap();
    }

    #[test]
    fn a_delta_over_a_base_is_what_was_saved_whether_sparse_or_dense() {
        let (ram, base) = loaded("base", &[0, 1, 700]);
        let delta = path("delta");
        set(&ram, 1, 2);
        set(&ram, 700, 0);
        (5 * GRANULE_PAGES..6 * GRANULE_PAGES).for_each(|page| set(&ram, page, 3));
        let chain = std::slice::from_ref(&base);
        let lineage = Lineage::of(chain).unwrap();

        save(&ram, &lineage, chain, &delta).unwrap();

        let mut derived = Ram::load(ram.bytes(), chain).unwrap();
        derived.overlay(&delta).unwrap();
        let both = Ram::load(ram.bytes(), &[base.clone(), delta.clone()]).unwrap();
        for page in [0, 1, 2, 700, 5 * GRANULE_PAGES, 6 * GRANULE_PAGES - 1, 6 * GRANULE_PAGES] {
            let expected = byte(&ram, page);
            assert_eq!([byte(&derived, page), byte(&both, page)], [expected; 2], "{page}");
        }
        let pages = (std::fs::metadata(&delta).unwrap().len() - 96) / PAGE_SIZE;
        assert_eq!(pages, 2 + GRANULE_PAGES);
        std::fs::remove_file(base).unwrap();
        std::fs::remove_file(delta).unwrap();
    }

    #[test]
    fn memory_goes_back_to_what_was_loaded_deltas_included() {
        let (ram, base) = loaded("rewound", &[3]);
        let chain = std::slice::from_ref(&base);
        let lineage = Lineage::of(chain).unwrap();
        let delta = path("rewound-delta");
        set(&ram, 4, 2);
        (1024..1536).for_each(|page| set(&ram, page, 5));
        save(&ram, &lineage, chain, &delta).unwrap();
        let mut derived = Ram::load(ram.bytes(), chain).unwrap();
        derived.overlay(&delta).unwrap();
        let pages = [3, 4, 5, 1024, 9000];
        for page in pages {
            set(&derived, page, 9);
        }

        let kept = derived.view().get_host_address(GuestAddress(3 * PAGE_SIZE)).unwrap() as u64;
        derived.rewind(&own(), None, |address| address == kept).unwrap();

        let mut private = Vec::new();
        let mut note = |found: Private| {
            private.push(found.page);
            true
        };
        Pagemap::own().unwrap().private(derived.view(), &mut note).unwrap();
        assert_eq!(private, [3, 4], "what is kept, and what is in no file");
        assert_eq!(pages.map(|page| byte(&derived, page)), [1, 2, 0, 5, 0]);
        std::fs::remove_file(base).unwrap();
        std::fs::remove_file(delta).unwrap();
    }

    /// What can be done to the file behind `fd`, of the ways there are to change it.
    fn changes(fd: i32) -> Vec<&'static str> {
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the memory that the descriptor is of lives as long as this test.
        let inherited = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
        let mut file = File::from(inherited);
        let again = File::options().write(true).open(format!("/proc/self/fd/{fd}")).unwrap();
        // SAFETY: the descriptor is open; the call takes no pointers.
        let punched = unsafe { libc::fallocate(fd, punch, 0, 4096) } >= 0;
        let done = [
            ("write", file.write(&[9]).is_ok()),
            ("pwrite", file.write_at(&[9], 0).is_ok()),
            ("pwrite once opened again", again.write_at(&[9], 0).is_ok()),
            ("mmap", mapping::Shared::map(&file, 4096, 4096).is_ok()),
            ("punch", punched),
            ("grow", file.set_len(1 << 30).is_ok()),
            ("shrink", file.set_len(0).is_ok()),
        ];
        done.into_iter().filter(|(_, done)| *done).map(|(what, _)| what).collect()
    }

    #[test]
    fn nobody_changes_an_image_by_its_descriptor_that_of_a_delta_included() {
        let (ram, base) = loaded("sealed", &[0, 3]);
        let chain = std::slice::from_ref(&base);
        let delta = path("sealed-delta");
        set(&ram, 4, 2);
        (1024..1536).for_each(|page| set(&ram, page, 5));
        save(&ram, &Lineage::of(chain).unwrap(), chain, &delta).unwrap();
        let mut derived = Ram::load(ram.bytes(), chain).unwrap();
        derived.overlay(&delta).unwrap();

        let descriptors: Vec<i32> = ram.descriptors().chain(derived.descriptors()).collect();
        let changed: Vec<_> = descriptors.iter().map(|fd| changes(*fd)).collect();

        assert_eq!(changed, vec![Vec::<&str>::new(); 4], "its base, the base, dense and sparse");
        std::fs::remove_file(base).unwrap();
        std::fs::remove_file(delta).unwrap();
    }

    fn private(ram: &Ram) -> Vec<(u64, bool)> {
        let mut found = Vec::new();
        let note = |Private { page, exclusive, .. }| {
            found.push((page, exclusive));
            true
        };
        Pagemap::own().unwrap().private(ram.view(), note).unwrap();
        found
    }

    #[test]
    fn memory_goes_back_to_what_another_process_holds() {
        let (ram, base) = loaded("seed", &[3, 4, 700]);
        let ours = [4, 5, 600, 601, 602];
        for page in ours {
            set(&ram, page, 2);
        }
        let process = Seed::fork();
        // One of the image, one of zeros, and some that only the process has as they were.
        let written = [3, 4, 9, 601, 602, 700];
        for page in written {
            set(&ram, page, 9);
        }
        set(&ram, 602, 2);

        ram.rewind(&own(), Some(&process.memory()), |_| false).unwrap();

        let pages = [3, 4, 5, 9, 600, 601, 602, 700];
        assert_eq!(pages.map(|page| byte(&ram, page)), [1, 2, 2, 0, 2, 2, 2, 1]);
        let private = private(&ram);
        assert_eq!(private.iter().map(|(page, _)| *page).collect::<Vec<_>>(), ours);
        let unwritten = [(5, false), (600, false)];
        assert!(unwritten.iter().all(|page| private.contains(page)), "they are shared as before");
        std::fs::remove_file(base).unwrap();
    }

    #[test]
    fn a_page_that_only_the_process_has_written_is_read_from_it() {
        let (ram, base) = loaded("seed-only", &[]);
        set(&ram, 8, 2);
        let process = Seed::fork();
        let address = ram.view().get_host_address(GuestAddress(8 * PAGE_SIZE)).unwrap() as u64;
        mapping::drop_private(address, PAGE_SIZE).unwrap();

        ram.rewind(&own(), Some(&process.memory()), |_| false).unwrap();

        assert_eq!(byte(&ram, 8), 2);
        std::fs::remove_file(base).unwrap();
    }

    #[test]
    fn more_than_is_read_at_a_time_goes_back_page_by_page() {
        let pages = STRETCH_BYTES_MAX / PAGE_SIZE + 1;
        let (ram, base) = loaded("seed-long", &[]);
        (0..pages).for_each(|page| set(&ram, page, u8::try_from(page % 251).unwrap() + 1));
        let process = Seed::fork();
        (0..pages).for_each(|page| set(&ram, page, 0));

        ram.rewind(&own(), Some(&process.memory()), |_| false).unwrap();

        let wrong = (0..pages).find(|page| u64::from(byte(&ram, *page)) != page % 251 + 1);
        assert_eq!(wrong, None);
        std::fs::remove_file(base).unwrap();
    }

    #[test]
    fn memory_whose_process_has_ended_does_not_go_back() {
        let (ram, base) = loaded("seed-gone", &[]);
        let process = Seed::fork();
        let seed = process.memory();
        drop(process);

        assert!(ram.rewind(&own(), Some(&seed), |_| false).is_err());
        std::fs::remove_file(base).unwrap();
    }

    #[test]
    fn a_flipped_bit_in_a_page_is_found_when_loading() {
        let (ram, target) = loaded("flipped", &[0]);
        let mut stored = std::fs::read(&target).unwrap();
        let last = stored.len() - 1;
        stored[last] ^= 1;
        std::fs::write(&target, &stored).unwrap();

        let error = Ram::load(ram.bytes(), std::slice::from_ref(&target)).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::Damaged);
        std::fs::remove_file(target).unwrap();
    }
}
