//! What forks of a snapshot write before they are ready, learned from the first of them.
//!
//! A fork that touches a shared page pays twice in the processor's second-level
//! tables: once to read it, once more to own it, and the second time everything
//! that was mapped around it is thrown away.  The pages are nearly the same in
//! every fork of a snapshot.  So the zygote looks at the first child when that is
//! ready, and each later one makes those pages its own before its guest runs, in
//! one system call for each run of them.
//!
//! It costs no memory: the pages would have been copied anyway, a moment later.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Error;
use crate::layout::PAGE_SIZE;
use crate::process;

/// Most pages that are learned.  A snapshot whose forks write more before they are ready gains
/// little from more, and its forks' memory shall not grow by what only the first one needed.
pub const PAGES_MAX: u64 = 4096;

/// A range of host addresses, page aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    bytes: u64,
}

/// The pages that forks write.  Empty until learned.
#[derive(Clone, Debug, Default)]
pub struct Warmth {
    ranges: Vec<Range>,
}

impl Warmth {
    /// Looks at `pid`, a fork that has just become ready, and shares its mappings' addresses.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if its page map cannot be read, for one because it has ended.
    pub fn learn(memory: &GuestMemoryMmap, pid: i32) -> Result<Self, Error> {
        let name = format!("/proc/{pid}/pagemap");
        let pagemap = File::open(&name).map_err(Error::io(format!("open {name}")))?;
        let mut ranges = Vec::new();
        let mut left = PAGES_MAX;
        for region in memory.iter() {
            let start = region.as_ptr() as u64;
            let mut entries = vec![0; usize::try_from(region.len() / PAGE_SIZE * 8).unwrap_or(0)];
            pagemap
                .read_exact_at(&mut entries, start / PAGE_SIZE * 8)
                .map_err(Error::io(format!("read {name}")))?;
            collect(&entries, start, &mut left, &mut ranges);
        }
        Ok(Self { ranges })
    }

    /// Whether there is nothing to apply.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Makes this process own the pages.
    ///
    /// Where the kernel refuses (before Linux 5.14), they are copied when they are written: nothing
    /// is lost but the time.
    pub fn apply(&self) {
        for range in &self.ranges {
            if !process::populate_for_writing(range.start, range.bytes) {
                return;
            }
        }
    }
}

/// Adds the private pages of one region; `entries` are those of `/proc/pid/pagemap`
/// (`Documentation/admin-guide/mm/pagemap.rst`).
fn collect(entries: &[u8], start: u64, left: &mut u64, ranges: &mut Vec<Range>) {
    const PRESENT: u64 = 1 << 63;
    const FILE_OR_SHARED: u64 = 1 << 61;
    const EXCLUSIVE: u64 = 1 << 56;
    for (entry, address) in entries.chunks_exact(8).zip((start..).step_by(4096)) {
        let entry = u64::from_le_bytes(entry.try_into().unwrap_or_default());
        let private = entry & PRESENT != 0 && entry & FILE_OR_SHARED == 0 && entry & EXCLUSIVE != 0;
        if !private || *left == 0 {
            continue;
        }
        *left -= 1;
        match ranges.last_mut() {
            Some(last) if last.start + last.bytes == address => last.bytes += PAGE_SIZE,
            _ => ranges.push(Range { start: address, bytes: PAGE_SIZE }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{layout, memory};
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn pages_that_were_written_are_learned_and_others_are_not() {
        let image = memory::empty_image(layout::MEMORY_BYTES_MIN).unwrap();
        let view = memory::private_view(layout::MEMORY_BYTES_MIN, &image).unwrap();
        view.write_obj(1_u8, GuestAddress(3 * PAGE_SIZE)).unwrap();
        view.write_obj(1_u8, GuestAddress(4 * PAGE_SIZE)).unwrap();
        view.read_obj::<u8>(GuestAddress(9 * PAGE_SIZE)).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();

        let warmth = Warmth::learn(&view, pid).unwrap();

        let start = view.iter().next().unwrap().as_ptr() as u64;
        let expected = Range { start: start + 3 * PAGE_SIZE, bytes: 2 * PAGE_SIZE };
        assert_eq!(warmth.ranges, [expected]);
        warmth.apply();
    }

    #[test]
    fn one_page_past_the_limit_is_not_learned() {
        let entry = (1_u64 << 63 | 1 << 56).to_le_bytes();
        let entries = entry.repeat(3);
        let (mut left, mut ranges) = (2, Vec::new());

        collect(&entries, 0, &mut left, &mut ranges);

        assert_eq!(ranges, [Range { start: 0, bytes: 2 * PAGE_SIZE }]);
    }
}
