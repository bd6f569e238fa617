//! Which pages of guest memory a process has as its own (`/proc/pid/pagemap`).
//!
//! Guest memory is mapped privately, of a file in memory or of zeros.  The kernel
//! tells a page of the file from a copy of it, so the copies are exactly what a
//! machine has written, without a log of writes and what that costs
//! (`Documentation/admin-guide/mm/pagemap.rst`).

use std::fs::File;
use std::os::unix::fs::FileExt;

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Error;
use crate::layout::PAGE_SIZE;

/// Entries read at a time.
const ENTRIES_MAX: u64 = 1 << 16;
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const FILE_OR_SHARED: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;

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

/// The page map of a process.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    name: String,
}

impl Pagemap {
    /// This process's.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if `/proc` does not show it.
    pub fn own() -> Result<Self, Error> {
        Self::open("/proc/self/pagemap".into())
    }

    /// That of `pid`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], for one because it has ended.
    pub fn of(pid: i32) -> Result<Self, Error> {
        Self::open(format!("/proc/{pid}/pagemap"))
    }

    fn open(name: String) -> Result<Self, Error> {
        let file = File::open(&name).map_err(Error::io(format!("open {name}")))?;
        Ok(Self { file, name })
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
        let mut entries = Vec::new();
        let mut page = 0;
        for region in memory.iter() {
            let mut address = region.as_ptr() as u64;
            let end = address + region.len();
            while address < end {
                let count = ENTRIES_MAX.min((end - address) / PAGE_SIZE);
                entries.resize(usize::try_from(count * 8).unwrap_or(0), 0);
                self.file
                    .read_exact_at(&mut entries, address / PAGE_SIZE * 8)
                    .map_err(Error::io(format!("read {}", self.name)))?;
                for entry in entries.chunks_exact(8) {
                    let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
                    if is_private(entry) {
                        let exclusive = entry & EXCLUSIVE != 0;
                        if !found(Private { page, address, exclusive }) {
                            return Ok(());
                        }
                    }
                    page += 1;
                    address += PAGE_SIZE;
                }
            }
        }
        Ok(())
    }
}

fn is_private(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && entry & FILE_OR_SHARED == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_in_memory_or_swapped_out_are_private_and_those_of_a_file_are_not() {
        assert!(is_private(PRESENT) && is_private(SWAPPED | EXCLUSIVE));
        assert!(!is_private(0) && !is_private(PRESENT | FILE_OR_SHARED));
    }
}
