//! Granules of an image, in a file in memory: filled once, then sealed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::Error;
use crate::layout::{self, PAGE_SIZE, address_of};
use crate::snapshot::runs::Run;
use crate::sys::mapping::{self, Shared};

/// Bytes of a granule: what the image holds or lacks as a whole.  A huge page.
pub(super) const GRANULE_BYTES: u64 = layout::MEMORY_GRANULE;

/// Pages of a granule.
pub(super) const GRANULE_PAGES: u64 = GRANULE_BYTES / PAGE_SIZE;

/// How many pages of each granule are in `runs`.
pub(super) fn pages_by_granule(runs: &[Run]) -> BTreeMap<u64, u64> {
    let mut pages = BTreeMap::new();
    for run in runs {
        let (mut page, end) = (run.first, run.first + run.count);
        while page < end {
            let granule = page / GRANULE_PAGES;
            let next = end.min((granule + 1) * GRANULE_PAGES);
            *pages.entry(granule).or_default() += next - page;
            page = next;
        }
    }
    pages
}

/// Granules in a file in memory, one after the other, while they are filled.
#[derive(Debug)]
pub(super) struct Sheet {
    file: File,
    shared: Shared,
    slots: BTreeMap<u64, u64>,
}

/// Granules in a file in memory that nobody can write to any more.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) file: Arc<File>,
    pub(super) slots: BTreeMap<u64, u64>,
}

impl Sheet {
    /// A sheet of zeros; `None` if it would hold nothing.
    pub(super) fn new(granules: &BTreeSet<u64>) -> Result<Option<Self>, Error> {
        if granules.is_empty() {
            return Ok(None);
        }
        let bytes = granules.len() as u64 * GRANULE_BYTES;
        let file = mapping::memory_file(bytes)?;
        let shared = Shared::map(&file, bytes, GRANULE_BYTES)?;
        let slots = granules.iter().copied().zip(0..).collect();
        Ok(Some(Self { file, shared, slots }))
    }

    pub(super) fn holds(&self, page: u64) -> bool {
        self.slots.contains_key(&(page / GRANULE_PAGES))
    }

    /// Stores consecutive pages of one granule.
    pub(super) fn write(&mut self, page: u64, bytes: &[u8]) -> Result<(), Error> {
        let slot = self
            .slots
            .get(&(page / GRANULE_PAGES))
            .ok_or_else(|| Error::Damaged("a memory file changed while it was read".to_owned()))?;
        self.shared.write(slot * GRANULE_BYTES + page % GRANULE_PAGES * PAGE_SIZE, bytes)
    }

    pub(super) fn copy_from(&mut self, view: &GuestMemoryMmap) -> Result<(), Error> {
        let mut buffer = vec![0; usize::try_from(GRANULE_BYTES).unwrap_or(0)];
        for (granule, slot) in &self.slots {
            let address = GuestAddress(address_of(granule * GRANULE_PAGES));
            view.read_slice(&mut buffer, address).map_err(Error::guest_memory)?;
            self.shared.write(slot * GRANULE_BYTES, &buffer)?;
        }
        Ok(())
    }

    /// Makes every page exist, and the file one that nobody can write to: forks inherit its
    /// descriptor, and map it.
    pub(super) fn seal(self) -> Result<Sealed, Error> {
        let Self { file, shared, slots } = self;
        shared.populate();
        drop(shared);
        mapping::seal(&file)?;
        Ok(Sealed { file: Arc::new(file), slots })
    }
}

impl Sealed {
    /// Consecutive granules that no gap divides, each with the slot of its first.
    pub(super) fn runs(&self) -> Vec<(Run, u64)> {
        const GAP: u64 = layout::MMIO_GAP_START / GRANULE_BYTES;
        let mut runs: Vec<(Run, u64)> = Vec::new();
        for (&granule, &slot) in &self.slots {
            match runs.last_mut() {
                Some((last, _)) if last.first + last.count == granule && granule != GAP => {
                    last.count += 1;
                }
                _ => runs.push((Run { first: granule, count: 1 }, slot)),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granules_on_either_side_of_the_gap_are_two_runs() {
        let gap = layout::MMIO_GAP_START / GRANULE_BYTES;
        let sheet = Sheet::new(&BTreeSet::from([1, gap - 1, gap, gap + 1])).unwrap().unwrap();

        let sealed = sheet.seal().unwrap();
        let runs: Vec<_> = sealed.runs().iter().map(|(run, slot)| (run.first, *slot)).collect();

        assert_eq!(runs, [(1, 0), (gap - 1, 1), (gap, 2)]);
    }
}
