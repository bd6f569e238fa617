//! The `memory` file: pages of guest memory, all of them or what a chain of such files lacks.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::layout::PAGE_SIZE;
use crate::snapshot::header::{BodyReader, Kind};
use crate::snapshot::runs::{Index, Run, Table};

/// Pages that are copied at a time.
pub const COPY_PAGES: u64 = 256;

/// A memory file, opened; its pages are read and verified by [`Self::read`].
#[derive(Debug)]
pub struct MemoryFile {
    reader: BodyReader,
    table: Table,
}

impl MemoryFile {
    /// Opens a file that must be of a machine with `memory_bytes` of memory.
    ///
    /// # Errors
    ///
    /// [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming the file; [`Error::Io`].
    pub fn open(path: &Path, memory_bytes: u64) -> Result<Self, Error> {
        let mut reader = BodyReader::open(path, Kind::Memory)?;
        let table = Table::read(&mut reader)?;
        if table.total_bytes != memory_bytes {
            return Err(Error::Damaged(format!(
                "{} covers {} bytes of memory, the machine has {memory_bytes}",
                reader.name(),
                table.total_bytes
            )));
        }
        Ok(Self { reader, table })
    }

    /// The file, where each of its pages is in it, and the digest of all; for reads that are not
    /// verified.
    #[must_use]
    pub fn into_indexed(self) -> (File, Index, [u8; 32]) {
        let Self { reader, table } = self;
        let digest = reader.digest();
        (reader.into_file(), Index::of(&table), digest)
    }

    /// Which pages it holds.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.table.runs
    }

    /// Hands its pages to `store`: the first one's index, and their bytes.  No piece crosses the
    /// gap below 4 GiB.
    ///
    /// # Errors
    ///
    /// Those of `store`; [`Error::Damaged`] if the digest does not hold, [`Error::Io`].
    pub fn read(
        mut self,
        mut store: impl FnMut(u64, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut buffer = vec![0; usize::try_from(COPY_PAGES * PAGE_SIZE).unwrap_or(0)];
        for part in self.table.runs.iter().flat_map(|run| pieces(*run)) {
            let bytes = usize::try_from(part.count * PAGE_SIZE).unwrap_or(0);
            self.reader.fill(&mut buffer[..bytes])?;
            store(part.first, &buffer[..bytes])?;
        }
        self.reader.finish().map(drop)
    }
}

/// Cuts a run into pieces that fit a buffer, none of which crosses the gap below 4 GiB.
pub fn pieces(run: Run) -> impl Iterator<Item = Run> {
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

/// What memory was loaded from: the digests of the files, base first.  Empty for a machine that
/// booted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lineage(Vec<[u8; 32]>);

impl Lineage {
    /// Reads the digests in the headers of a chain of files.
    ///
    /// # Errors
    ///
    /// As [`MemoryFile::open`].
    pub fn of(chain: &[PathBuf]) -> Result<Self, Error> {
        chain
            .iter()
            .map(|path| Ok(BodyReader::open(path, Kind::Memory)?.digest()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The digests, base first.
    #[must_use]
    pub fn digests(&self) -> &[[u8; 32]] {
        &self.0
    }

    /// This lineage with `link` above it.
    #[must_use]
    pub fn with(mut self, link: Self) -> Self {
        self.0.extend(link.0);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_cut_at_every_boundary() {
        let cut: Vec<_> = pieces(Run { first: 250, count: 300 }).collect();

        let expected = [(250, 6), (256, 256), (512, 38)].map(|(first, count)| Run { first, count });
        assert_eq!(cut, expected);
    }
}
