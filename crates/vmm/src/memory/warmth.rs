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

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::Error;
use crate::layout::PAGE_SIZE;
use crate::sys::mapping;
use crate::sys::pagemap::Pagemap;

/// Most pages that are learned.  A snapshot whose forks write more before they are ready gains
/// little from more, and its forks' memory shall not grow by what only the first one needed.
pub const PAGES_MAX: u64 = 4096;

/// A range of host addresses, page aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    start: u64,
    bytes: u64,
}

impl Range {
    /// A range of whole pages; `None` of nothing, or of anything else.
    #[must_use]
    pub fn new(start: u64, bytes: u64) -> Option<Self> {
        let whole = start.is_multiple_of(PAGE_SIZE) && bytes.is_multiple_of(PAGE_SIZE);
        (whole && bytes > 0 && start.checked_add(bytes).is_some()).then_some(Self { start, bytes })
    }

    /// Its first address.
    #[must_use]
    pub fn start(self) -> u64 {
        self.start
    }

    /// Its length.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.bytes
    }
}

/// Pages that forks write, ascending.  Empty until learned.
#[derive(Clone, Debug, Default)]
pub struct Warmth {
    ranges: Vec<Range>,
}

impl Warmth {
    /// Looks at the page map of a fork that has just become ready, which shares its mappings'
    /// addresses.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if its page map cannot be read, for one because it has ended.
    pub fn learn(memory: &GuestMemoryMmap, fork: &Pagemap) -> Result<Self, Error> {
        let mut learned = Self::default();
        let mut left = PAGES_MAX;
        fork.private(memory, |private| {
            // What it shares with others it has not written.
            if private.exclusive {
                learned.add(private.address);
                left -= 1;
            }
            left > 0
        })?;
        Ok(learned)
    }

    /// Those and the ones in `others`, which may be in any order and overlap.
    #[must_use]
    pub fn and(&self, mut others: Vec<Range>) -> Self {
        others.extend_from_slice(&self.ranges);
        others.sort_unstable_by_key(|range| range.start);
        let mut ranges: Vec<Range> = Vec::with_capacity(others.len());
        for range in others {
            match ranges.last_mut() {
                Some(last) if range.start <= last.start + last.bytes => {
                    last.bytes = last.bytes.max(range.start + range.bytes - last.start);
                }
                _ => ranges.push(range),
            }
        }
        Self { ranges }
    }

    /// Adds the page at `address`, which is above all others.
    pub fn add(&mut self, address: u64) {
        match self.ranges.last_mut() {
            Some(last) if last.start + last.bytes == address => last.bytes += PAGE_SIZE,
            _ => self.ranges.push(Range { start: address, bytes: PAGE_SIZE }),
        }
    }

    /// The pages, as ranges.
    #[must_use]
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// How many pages there are.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let pages = self.ranges.iter().map(|range| range.bytes / PAGE_SIZE);
        pages.fold(0, u64::saturating_add)
    }

    /// Whether all of them are pages of `memory`.
    #[must_use]
    pub fn lies_in(&self, memory: &GuestMemoryMmap) -> bool {
        self.ranges.iter().all(|range| {
            memory.iter().any(|region| {
                let start = region.as_ptr() as u64;
                start <= range.start && range.start + range.bytes <= start + region.len()
            })
        })
    }

    /// Whether there is nothing to apply.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Whether the page at `address` is among them.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        let after = self.ranges.partition_point(|range| range.start <= address);
        let before = after.checked_sub(1).and_then(|at| self.ranges.get(at));
        before.is_some_and(|range| address < range.start + range.bytes)
    }

    /// Calls `map` with where the guest has each range in `memory`, and its length, as long as it
    /// returns true.
    pub fn each_in(&self, memory: &GuestMemoryMmap, mut map: impl FnMut(u64, u64) -> bool) {
        for range in &self.ranges {
            let within = memory.iter().find_map(|region| {
                let at = range.start.checked_sub(region.as_ptr() as u64)?;
                let guest = region.start_addr().raw_value().checked_add(at)?;
                (at < region.len()).then(|| (guest, range.bytes.min(region.len() - at)))
            });
            if within.is_some_and(|(guest, bytes)| !map(guest, bytes)) {
                return;
            }
        }
    }

    /// Makes this process own the pages.
    ///
    /// Where the kernel refuses (before Linux 5.14), they are copied when they are written: nothing
    /// is lost but the time.
    pub fn apply(&self) {
        for range in &self.ranges {
            if !mapping::populate_for_writing(range.start, range.bytes) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout;
    use crate::memory::ram::Ram;
    use vm_memory::{Bytes, GuestAddress};

    /// Memory with one byte in each of `pages`, and where it starts.
    ///
    /// Other tests of this process fork meanwhile: for that long they would have pages in common.
    fn written(pages: impl Iterator<Item = u64>) -> (Ram, u64) {
        let ram = Ram::load(layout::MEMORY_BYTES_MIN, &[]).unwrap();
        for region in ram.view().iter() {
            mapping::keep_from_forks(region.as_ptr(), region.len()).unwrap();
        }
        for page in pages {
            ram.view().write_obj(1_u8, GuestAddress(page * PAGE_SIZE)).unwrap();
        }
        let start = ram.view().iter().next().unwrap().as_ptr() as u64;
        (ram, start)
    }

    #[test]
    fn ranges_are_where_the_guest_has_them() {
        let (ram, start) = written(0..0);
        let mut warmth = Warmth::default();
        for page in [0, 5, 6] {
            warmth.add(start + page * PAGE_SIZE);
        }
        let elsewhere = warmth.and(vec![Range { start: start - PAGE_SIZE, bytes: PAGE_SIZE }]);
        let ranges_until = |last: usize| {
            let mut found = Vec::new();
            warmth.each_in(ram.view(), |at, bytes| {
                found.push((at / PAGE_SIZE, bytes / PAGE_SIZE));
                found.len() < last
            });
            found
        };

        assert_eq!(ranges_until(3), [(0, 1), (5, 2)]);
        assert_eq!(ranges_until(1), [(0, 1)], "it was told to stop");
        let mut found = Vec::new();
        elsewhere.each_in(ram.view(), |at, _| {
            found.push(at / PAGE_SIZE);
            true
        });
        assert_eq!(found, [5], "the guest has nothing there");

        let bytes = layout::MEMORY_BYTES_MIN;
        let range = |at| Range { start: start + at, bytes: 2 * PAGE_SIZE };
        for (at, part) in
            [(bytes - PAGE_SIZE, vec![(bytes - PAGE_SIZE, PAGE_SIZE)]), (bytes, vec![])]
        {
            let mut found = Vec::new();
            let past = Warmth { ranges: vec![range(at)] };
            past.each_in(ram.view(), |at, bytes| {
                found.push((at, bytes));
                true
            });
            assert_eq!(found, part, "memory ends there");
        }
    }

    #[test]
    fn one_page_past_the_limit_is_not_learned() {
        let (ram, start) = written(0..=PAGES_MAX);

        let warmth = Warmth::learn(ram.view(), &Pagemap::own().unwrap()).unwrap();

        assert_eq!(warmth.ranges, [Range { start, bytes: PAGES_MAX * PAGE_SIZE }]);
        warmth.apply();
        let contains = [0, PAGES_MAX - 1, PAGES_MAX].map(|page| start + page * PAGE_SIZE);
        assert_eq!(contains.map(|address| warmth.contains(address)), [true, true, false]);
    }
}
