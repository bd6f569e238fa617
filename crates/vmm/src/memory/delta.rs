//! Writing memory out: all of it, or what a chain of memory files lacks.
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
use crate::layout::{PAGE_SIZE, address_of};
use crate::memory::ram::Ram;
use crate::snapshot::header::{BodyWriter, Kind, Written};
use crate::snapshot::pages::{COPY_PAGES, Lineage, MemoryFile, pieces};
use crate::snapshot::runs::{Collector, Index, Table, Units};
use crate::sys::pagemap::Pagemap;

type Page = [u8; 4096];

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
            let (file, index, digest) = MemoryFile::open(path, memory_bytes)?.into_indexed();
            Ok(Link { file, index, digest })
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
        let loaded = lineage.digests();
        let begins = self.links.iter().zip(loaded).all(|(link, digest)| link.digest == *digest);
        let known = loaded.len();
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
