//! What forks of a snapshot write for their first client, learned from the first few of them.
//!
//! [`crate::memory::warmth`] is about pages that a fork writes before it is ready.  A good many
//! more are written when somebody first asks the guest for something, and are nearly the
//! same in every fork, too.  A fork that is never asked shall not have them, so they are
//! made a fork's own when its first client connects.
//!
//! They are learned where the answer passes, in the fork itself, and passed on to its
//! siblings through a file in memory that all forks of a zygote hold.  Entries are only
//! ever appended, whole, and are advice: a reader trusts none of them further than that
//! it copies a bounded number of pages of its own guest.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vm_memory::GuestMemoryMmap;

use crate::error::Error;
use crate::memory::warmth::{Range, Warmth};
use crate::sys::mapping;
use crate::sys::pagemap::Pagemap;

/// Most pages that are learned, of all forks together.  A first evaluation writes some 330; a first
/// question after which more was written is like no other.
pub const PAGES_MAX: u64 = 1 << 9;
/// How many forks are learned from: the first is often asked something else than the others.
const LEARNERS_MAX: usize = 8;
/// Bytes of an entry: where a range starts and how long it is.
const ENTRY_BYTES: usize = 16;
/// Most entries that are read.  Each learner ends what it adds with an entry of nothing.
const ENTRIES_MAX: usize = LEARNERS_MAX * ((1 << 9) + 1);

/// What all forks of a zygote know together.
#[derive(Debug)]
pub struct Notebook {
    file: File,
}

impl Notebook {
    /// An empty one.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the kernel has no file in memory to give.
    pub fn new() -> Result<Self, Error> {
        let file = mapping::memory_file(0)?;
        // Opened again, since appending is what keeps the entries of two writers apart.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = OpenOptions::new().read(true).append(true).open(path);
        Ok(Self { file: file.map_err(Error::io("open a file in memory"))? })
    }

    /// What a seed must not close.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// What was learned, and from how many forks.
    ///
    /// Forks that are asked at the same time do not know of each other, and add the same pages.
    /// One whose pages would be too many, with those of the ones before it, adds none.
    fn read(&self) -> (Warmth, usize) {
        let mut bytes = vec![0; ENTRIES_MAX * ENTRY_BYTES];
        let read = self.file.read_at(&mut bytes, 0).unwrap_or(0);
        let (mut known, mut ranges, mut learners) = (Warmth::default(), Vec::new(), 0);
        for entry in bytes[..read].chunks_exact(ENTRY_BYTES) {
            let (start, length) = entry.split_at(ENTRY_BYTES / 2);
            let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
            if let Some(range) = Range::new(number(start), number(length)) {
                ranges.push(range);
                continue;
            }
            let more = known.and(std::mem::take(&mut ranges));
            if more.pages() <= PAGES_MAX {
                known = more;
            }
            learners += 1;
            if learners == LEARNERS_MAX {
                break;
            }
        }
        (known, learners)
    }

    fn add(&self, ranges: &[Range]) {
        let mut bytes = Vec::with_capacity((ranges.len() + 1) * ENTRY_BYTES);
        for range in ranges {
            bytes.extend_from_slice(&range.start().to_le_bytes());
            bytes.extend_from_slice(&range.bytes().to_le_bytes());
        }
        bytes.extend_from_slice(&[0; ENTRY_BYTES]);
        // Without room for it, siblings copy their pages one by one.
        drop((&self.file).write_all(&bytes));
    }
}

/// The first question that clients ask a fork.
#[derive(Debug)]
pub struct Question {
    notebook: Arc<Notebook>,
    memory: GuestMemoryMmap,
    /// What it wrote before it was ready; `None` if nobody had learned that yet.
    before: Option<Warmth>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Unasked,
    Asked,
    Answered,
}

impl Question {
    /// Nobody has asked `memory`'s machine anything yet.
    #[must_use]
    pub fn new(notebook: Arc<Notebook>, memory: GuestMemoryMmap, before: Option<Warmth>) -> Self {
        Self { notebook, memory, before, stage: Stage::Unasked }
    }

    /// A client is about to ask.
    pub fn asked(&mut self) {
        if self.stage == Stage::Unasked {
            self.stage = Stage::Asked;
            let (warmth, _) = self.notebook.read();
            if warmth.lies_in(&self.memory) {
                warmth.apply();
            }
        }
    }

    /// The guest has sent something to a client.
    pub fn answered(&mut self) {
        if self.stage == Stage::Asked {
            self.stage = Stage::Answered;
            // What cannot be read is learned from another fork.
            drop(self.learn());
        }
    }

    /// The machine is back at its fork point.
    pub fn again(&mut self) {
        self.stage = Stage::Unasked;
    }

    fn learn(&self) -> Result<(), Error> {
        let Some(before) = &self.before else { return Ok(()) };
        let (known, learners) = self.notebook.read();
        if learners >= LEARNERS_MAX {
            return Ok(());
        }
        let left = PAGES_MAX.saturating_sub(known.pages());
        let mut news = Warmth::default();
        Pagemap::own()?.private(&self.memory, |private| {
            let address = private.address;
            if private.exclusive && !before.contains(address) && !known.contains(address) {
                news.add(address);
            }
            news.pages() <= left
        })?;
        if news.pages() > left {
            news = Warmth::default();
        }
        self.notebook.add(news.ranges());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{MEMORY_BYTES_MIN, PAGE_SIZE};
    use crate::memory::ram::Ram;
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

    struct Guest {
        ram: Ram,
        question: Question,
    }

    impl Guest {
        fn new(notebook: &Arc<Notebook>) -> Self {
            let ram = Ram::load(MEMORY_BYTES_MIN, &[]).unwrap();
            let before = Some(Warmth::default());
            let question = Question::new(Arc::clone(notebook), ram.view().clone(), before);
            Self { ram, question }
        }

        fn ask(&mut self, written: std::ops::Range<u64>) {
            self.question.asked();
            for page in written {
                self.ram.view().write_obj(1_u8, GuestAddress(page * PAGE_SIZE)).unwrap();
            }
            self.question.answered();
        }
    }

    fn learned(notebook: &Notebook) -> (u64, usize) {
        let (warmth, learners) = notebook.read();
        (warmth.pages(), learners)
    }

    #[test]
    fn only_the_first_question_teaches_and_each_page_once() {
        let notebook = Arc::new(Notebook::new().unwrap());
        let mut guest = Guest::new(&notebook);

        guest.ask(3..5);
        assert_eq!(learned(&notebook), (2, 1));
        guest.ask(5..6);
        assert_eq!(learned(&notebook), (2, 1));
        guest.question.again();
        guest.ask(3..7);
        assert_eq!(learned(&notebook), (4, 2));
    }

    #[test]
    fn forks_that_are_asked_at_the_same_time_teach_each_page_once() {
        let notebook = Arc::new(Notebook::new().unwrap());
        let start = 1 << 30;
        let range = |page, pages| Range::new(start + page * PAGE_SIZE, pages * PAGE_SIZE).unwrap();

        notebook.add(&[range(0, 300), range(400, 1)]);
        notebook.add(&[range(1, 300), range(400, 1)]);
        notebook.add(&[range(500, PAGES_MAX)]);
        notebook.add(&[range(399, 3)]);

        let (warmth, learners) = notebook.read();
        assert_eq!(warmth.ranges(), [range(0, 301), range(399, 3)]);
        assert_eq!(learners, 4);
    }

    #[test]
    fn a_first_question_of_one_page_too_many_teaches_nothing() {
        let notebook = Arc::new(Notebook::new().unwrap());

        Guest::new(&notebook).ask(0..PAGES_MAX + 1);
        assert_eq!(learned(&notebook), (0, 1));
        Guest::new(&notebook).ask(0..PAGES_MAX);
        assert_eq!(learned(&notebook), (PAGES_MAX, 2));
    }

    #[test]
    fn one_fork_more_than_the_limit_teaches_nothing() {
        let notebook = Arc::new(Notebook::new().unwrap());
        let mut guest = Guest::new(&notebook);

        for page in 0..=LEARNERS_MAX as u64 {
            guest.ask(page..page + 1);
            guest.question.again();
        }

        assert_eq!(learned(&notebook), (LEARNERS_MAX as u64, LEARNERS_MAX));
    }

    #[test]
    fn an_entry_outside_the_guest_is_not_followed() {
        let notebook = Arc::new(Notebook::new().unwrap());
        let mut guest = Guest::new(&notebook);
        let end = guest.ram.view().iter().map(|region| region.as_ptr() as u64 + region.len()).max();
        notebook.add(&[Range::new(end.unwrap() - PAGE_SIZE, 2 * PAGE_SIZE).unwrap()]);

        guest.question.asked();

        Pagemap::own()
            .unwrap()
            .private(guest.ram.view(), |found| panic!("{found:?} was written"))
            .unwrap();
    }
}
