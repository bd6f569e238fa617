//! Which pages of guest memory a process has as its own (`/proc/pid/pagemap`).
//!
//! Guest memory is mapped privately, of a file in memory or of zeros.  The kernel
//! tells a page of the file from a copy of it, so the copies are exactly what a
//! machine has written, without a log of writes and what that costs
//! (`Documentation/admin-guide/mm/pagemap.rst`).

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

/// Entries read at a time.
const ENTRIES_MAX: u64 = 1 << 16;
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
}

impl From<File> for Pagemap {
    /// One that another process opened and passed on; whether it is one shows when it is read.
    fn from(file: File) -> Self {
        Self { file, name: "a page map that was passed on".to_owned() }
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
        Ok(Self { file, name: OWN.to_owned() })
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
        for Chunk { page, address, count } in chunks(memory) {
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
        Ok(())
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
        for Chunk { page, address, count } in chunks(memory) {
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
        Ok(())
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

/// Consecutive pages of one region.
struct Chunk {
    page: u64,
    address: u64,
    count: u64,
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
    use super::*;

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
