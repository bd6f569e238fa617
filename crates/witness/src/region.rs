//! Pages of memory, which one worker writes in turn.

use crate::duty::Duty;
use crate::page::{self, Page, Place, WORDS};

/// A worker's pages.  `seq` is the last write that was finished, and says what each page holds.
#[derive(Debug)]
pub struct Region {
    owner: u64,
    seq: u64,
    pages: Vec<Page>,
}

impl Region {
    /// Makes `count` pages, each written once.
    pub fn new(owner: u64, count: usize) -> Self {
        let mut pages = vec![[0; WORDS]; count];
        let mut seq = 0;
        for (index, page) in (0..).zip(&mut pages) {
            page::fill(page, Place { owner, index }, index);
            seq = index;
        }
        Self { owner, seq, pages }
    }

    /// All pages with what tells how to check them, for somebody else.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// The region that `pages` are after write `seq`.
    pub fn given(owner: u64, seq: u64, pages: Vec<Page>) -> Self {
        Self { owner, seq, pages }
    }
}

impl Duty for Region {
    fn seq(&self) -> u64 {
        self.seq
    }

    fn step(&mut self) -> Result<(), String> {
        let (seq, count) = (self.seq + 1, self.pages.len() as u64);
        let place = Place { owner: self.owner, index: seq % count };
        let at = usize::try_from(place.index).unwrap_or(usize::MAX);
        let page = self.pages.get_mut(at).ok_or("a region without pages")?;
        let before = page::check(page, place, seq - count);
        page::fill(page, place, seq);
        self.seq = seq;
        before
    }

    fn check(&mut self) -> Result<u64, String> {
        let count = self.pages.len() as u64;
        for (index, page) in (0..count).zip(&self.pages) {
            let place = Place { owner: self.owner, index };
            page::check(page, place, page::last_write(index, count, self.seq))?;
        }
        Ok(count)
    }

    fn on_disk(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stepped(steps: usize) -> Region {
        let mut region = Region::new(1, 5);
        for _ in 0..steps {
            region.step().unwrap();
        }
        region
    }

    #[test]
    fn a_region_is_right_after_any_number_of_steps() {
        for steps in 0..12 {
            assert_eq!(stepped(steps).check(), Ok(5));
        }
    }

    #[test]
    fn one_page_of_another_instant_is_found_and_also_by_the_next_to_write_it() {
        let (old, mut region) = (stepped(6), stepped(13));
        region.pages[2] = old.pages[2];
        assert!(region.check().unwrap_err().contains("page 2"));
        let found: Vec<_> = (0..5).filter_map(|_| region.step().err()).collect();
        assert_eq!(found.len(), 1);
        region.check().unwrap();
    }

    #[test]
    fn a_sequence_number_of_another_instant_is_found() {
        let mut region = stepped(13);
        region.seq -= 1;
        assert!(region.check().is_err());
        assert!(region.step().is_err());
    }
}
