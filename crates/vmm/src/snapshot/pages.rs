//! The `memory` file: pages of guest memory, all of them or what a chain of such files lacks.
//!
//! A page goes into a delta if its bytes differ from what the chain says.  Only
//! pages that could differ are looked at: those that this process has as its own,
//! where its memory was loaded from that very chain; otherwise all.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::error::Error;
use crate::layout::PAGE_SIZE;
use crate::memory::ram::{Ram, address_of};
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};
use crate::snapshot::runs::{Collector, Index, Run, Table, Units};
use crate::sys::pagemap::Pagemap;

/// Pages that are copied at a time.
const COPY_PAGES: u64 = 256;

type Page = [u8; 4096];

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
fn pieces(run: Run) -> impl Iterator<Item = Run> {
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

    /// This lineage with `link` above it.
    #[must_use]
    pub fn with(mut self, link: Self) -> Self {
        self.0.extend(link.0);
        self
    }
}

/// The files that a delta is to be above, opened.
struct Parent {
    links: Vec<Link>,
}

struct Link {
    file: File,
    index: Index,
    digest: [u8; 32],
}

impl Parent {
    fn open(chain: &[PathBuf], memory_bytes: u64) -> Result<Self, Error> {
        let open = |path: &PathBuf| {
            let MemoryFile { reader, table } = MemoryFile::open(path, memory_bytes)?;
            let digest = reader.digest();
            Ok(Link { file: reader.into_file(), index: Index::of(&table), digest })
        };
        Ok(Self { links: chain.iter().map(open).collect::<Result<_, Error>>()? })
    }

    /// Fills `page` with what the chain says of the page with this index.
    fn read(&self, index: u64, page: &mut Page) -> Result<(), Error> {
        for Link { file, index: pages, .. } in self.links.iter().rev() {
            if let Some(offset) = pages.offset_of(index) {
                return file.read_exact_at(page, offset).map_err(Error::io("read a parent's page"));
            }
        }
        page.fill(0);
        Ok(())
    }

    /// The links above `lineage`, if that is what the chain begins with.
    fn above(&self, lineage: &Lineage) -> Option<&[Link]> {
        let begins = self.links.iter().zip(&lineage.0).all(|(link, digest)| link.digest == *digest);
        let known = lineage.0.len();
        (known > 0 && known <= self.links.len() && begins).then(|| &self.links[known..])
    }
}

/// Pages of `ram` that may differ from what `parent` says.
fn candidates(ram: &Ram, lineage: &Lineage, parent: &Parent) -> Result<Units, Error> {
    let mut pages = Units::none_of(ram.bytes());
    Pagemap::own()?.private(ram.view(), |private| {
        pages.add(private.page);
        true
    })?;
    if let Some(above) = parent.above(lineage) {
        for link in above {
            pages.add_runs(link.index.runs());
        }
    } else {
        pages.add_runs(ram.backed());
        for link in &parent.links {
            pages.add_runs(link.index.runs());
        }
    }
    Ok(pages)
}

/// Writes to `target` the pages of `ram` that differ from what the files of `chain` say, base
/// first; without a chain, those that are not zero.
///
/// Nobody may write to the memory meanwhile.  `lineage` is what it was loaded from.
///
/// # Errors
///
/// [`Error::Io`] if the file cannot be written; nothing is left under its name then.
/// [`Error::NotOurs`], [`Error::TooNew`], [`Error::Damaged`] naming a file of the chain.
pub fn save(
    ram: &Ram,
    lineage: &Lineage,
    chain: &[PathBuf],
    target: &Path,
) -> Result<Written, Error> {
    let parent = Parent::open(chain, ram.bytes())?;
    let mut collector = Collector::default();
    let (mut now, mut then) = ([0; 4096], [0; 4096]);
    for page in candidates(ram, lineage, &parent)?.iter() {
        let address = GuestAddress(address_of(page));
        ram.view().read_slice(&mut now, address).map_err(Error::guest_memory)?;
        parent.read(page, &mut then)?;
        if now != then {
            collector.add(page);
        }
    }
    let table = Table { total_bytes: ram.bytes(), runs: collector.into_runs() };
    let mut writer = BodyWriter::create(target, Kind::Memory)?;
    table.write(&mut writer)?;
    copy_runs(ram.view(), &table, &mut writer)?;
    writer.commit()
}

fn copy_runs(
    memory: &GuestMemoryMmap,
    table: &Table,
    writer: &mut BodyWriter,
) -> Result<(), Error> {
    let mut buffer = vec![0; usize::try_from(COPY_PAGES * PAGE_SIZE).unwrap_or(0)];
    for part in table.runs.iter().flat_map(|run| pieces(*run)) {
        let bytes = usize::try_from(part.count * PAGE_SIZE).unwrap_or(0);
        let address = GuestAddress(address_of(part.first));
        memory.read_slice(&mut buffer[..bytes], address).map_err(Error::guest_memory)?;
        writer.write_all(&buffer[..bytes]).map_err(Error::io("write the memory file"))?;
    }
    Ok(())
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
