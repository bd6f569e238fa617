//! The entries of a folder, and where a link leads.

use std::collections::BTreeMap;

use crate::extents::{Extents, blocks_of};
use crate::{BLOCK_BYTES, Disk, Error, Inode, Kind, Volume, damaged, u16_at, u32_at};

/// Longest target of a symbolic link.
const TARGET_BYTES_MAX: u64 = BLOCK_BYTES;
/// Targets shorter than this are in the inode.
const SHORT_TARGET_BYTES: u64 = 60;
const HEADER_BYTES: usize = 8;

/// The inodes in a folder by name, without `.` and `..`.
pub(crate) type Entries = BTreeMap<Vec<u8>, u32>;

impl<D: Disk> Volume<D> {
    /// Reads a folder of at most `entries_max` entries.
    pub(crate) fn entries(&mut self, folder: &Inode, entries_max: usize) -> Result<Entries, Error> {
        let extents = Extents::of(self, folder)?;
        let mut found = Entries::new();
        let mut block = vec![0; 4096];
        for extent in extents.iter() {
            // What lies behind the folder's end is not of it.
            let end = blocks_of(folder.size_bytes).saturating_sub(extent.logical);
            for index in 0..extent.count.min(end) {
                self.read(extent.physical + index, &mut block)?;
                parse(&block, folder.number, &mut found)?;
                if found.len() > entries_max {
                    let what = "there are more files than a comparison looks at";
                    return Err(Error::TooMuch(what.into()));
                }
            }
        }
        Ok(found)
    }

    /// Where a symbolic link leads.
    pub(crate) fn target(&mut self, link: &Inode) -> Result<Vec<u8>, Error> {
        let broken = || damaged(format!("the target of link {} cannot be", link.number));
        if link.kind != Kind::Link || link.size_bytes > TARGET_BYTES_MAX {
            return Err(broken());
        }
        let length = usize::try_from(link.size_bytes).map_err(|_| broken())?;
        if link.size_bytes < SHORT_TARGET_BYTES && !link.has_extents() {
            return Ok(link.root[..length].to_vec());
        }
        let mut target = vec![0; length];
        match Extents::of(self, link)?.at(0) {
            (Some(block), _) => self.read(block, &mut target)?,
            (None, _) => return Err(broken()),
        }
        Ok(target)
    }
}

/// Adds what a block of a folder holds.  Blocks of its index look like empty ones.
fn parse(block: &[u8], folder: u32, found: &mut Entries) -> Result<(), Error> {
    let broken = || damaged(format!("folder {folder} has an entry that cannot be"));
    let mut rest = block;
    while !rest.is_empty() {
        let (inode, length) = (u32_at(rest, 0), usize::from(u16_at(rest, 4)));
        if length < HEADER_BYTES || length % 4 != 0 || length > rest.len() {
            return Err(broken());
        }
        let (entry, after) = rest.split_at(length);
        rest = after;
        if inode == 0 {
            continue;
        }
        let name_bytes = entry.get(6).copied().map_or(0, usize::from);
        let name = entry.get(HEADER_BYTES..HEADER_BYTES + name_bytes).ok_or_else(broken)?;
        if name == b"." || name == b".." {
            continue;
        }
        let named = !name.is_empty() && !name.iter().any(|byte| [0, b'/'].contains(byte));
        if !named || found.insert(name.to_vec(), inode).is_some() {
            return Err(broken());
        }
    }
    Ok(())
}
