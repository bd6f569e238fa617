//! Which block of the disk holds which block of a file.

use crate::{BLOCK_BYTES, Disk, Error, Inode, Volume, damaged, u16_at, u32_at};

/// Most extents of one file: one that is a terabyte and fragmented into megabytes.
pub const EXTENTS_MAX: usize = 1 << 20;

const MAGIC: u16 = 0xf30a;
/// Levels below the root of a tree.
const DEPTH_MAX: u16 = 5;
const ENTRY_BYTES: usize = 12;
/// Longest extent; a greater length means: reserved, and zero until it is written.
const LENGTH_MAX: u16 = 32768;

/// Blocks of a file that follow each other on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// Their first within the file.
    pub(crate) logical: u64,
    pub(crate) count: u64,
    /// Their first on the disk.
    pub(crate) physical: u64,
}

/// The extents of one file, in order and without overlap; what none covers is zero.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extents(Vec<Extent>);

impl Extents {
    /// Reads those of `inode`.
    pub(crate) fn of<D: Disk>(volume: &mut Volume<D>, inode: &Inode) -> Result<Self, Error> {
        if !inode.has_extents() {
            if inode.root.iter().all(|byte| *byte == 0) {
                return Ok(Self::default());
            }
            let what = format!("inode {} is not made of extents", inode.number);
            return Err(Error::Unsupported(what));
        }
        let mut found = Found { inode: inode.number, extents: Vec::new(), end: 0, nodes: 0 };
        let depth = u16_at(&inode.root, 6);
        if depth > DEPTH_MAX {
            return Err(found.broken());
        }
        found.node(volume, &inode.root, depth)?;
        Ok(Self(found.extents))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Extent> {
        self.0.iter()
    }

    /// Where `logical` lies, if anywhere, and for how many blocks that goes on.
    pub(crate) fn at(&self, logical: u64) -> (Option<u64>, u64) {
        let next = self.0.partition_point(|extent| extent.logical <= logical);
        if let Some(extent) = next.checked_sub(1).and_then(|index| self.0.get(index)) {
            let skipped = logical - extent.logical;
            if skipped < extent.count {
                return (Some(extent.physical + skipped), extent.count - skipped);
            }
        }
        (None, self.0.get(next).map_or(u64::MAX, |extent| extent.logical - logical))
    }
}

struct Found {
    inode: u32,
    extents: Vec<Extent>,
    /// First block of the file that the next extent may cover.
    end: u64,
    nodes: usize,
}

impl Found {
    /// Reads a node and all below it.  Each level knows how deep it is, so this ends.
    fn node<D: Disk>(
        &mut self,
        volume: &mut Volume<D>,
        bytes: &[u8],
        depth: u16,
    ) -> Result<(), Error> {
        let entries = usize::from(u16_at(bytes, 2));
        if u16_at(bytes, 0) != MAGIC
            || u16_at(bytes, 6) != depth
            || (entries + 1) * ENTRY_BYTES > bytes.len()
        {
            return Err(self.broken());
        }
        self.nodes += 1;
        if self.nodes > EXTENTS_MAX {
            return Err(self.too_many());
        }
        for entry in bytes[ENTRY_BYTES..].chunks_exact(ENTRY_BYTES).take(entries) {
            if depth == 0 {
                self.leaf(volume, entry)?;
                continue;
            }
            let block = u64::from(u32_at(entry, 4)) | u64::from(u16_at(entry, 8)) << 32;
            volume.check_blocks(self.inode, block, 1)?;
            let mut below = vec![0; 4096];
            volume.read(block, &mut below)?;
            self.node(volume, &below, depth - 1)?;
        }
        Ok(())
    }

    fn leaf<D: Disk>(&mut self, volume: &Volume<D>, entry: &[u8]) -> Result<(), Error> {
        let (logical, length) = (u64::from(u32_at(entry, 0)), u16_at(entry, 4));
        let physical = u64::from(u32_at(entry, 8)) | u64::from(u16_at(entry, 6)) << 32;
        let written = length <= LENGTH_MAX;
        let count = u64::from(if written { length } else { length - LENGTH_MAX });
        volume.check_blocks(self.inode, physical, count)?;
        if count == 0 || logical < self.end {
            return Err(self.broken());
        }
        self.end = logical + count;
        if written {
            if self.extents.len() == EXTENTS_MAX {
                return Err(self.too_many());
            }
            self.extents.push(Extent { logical, count, physical });
        }
        Ok(())
    }

    fn broken(&self) -> Error {
        damaged(format!("the extents of inode {} are no tree", self.inode))
    }

    fn too_many(&self) -> Error {
        Error::TooMuch(format!("inode {} has more than {EXTENTS_MAX} extents", self.inode))
    }
}

/// Blocks that hold `bytes` bytes.
pub(crate) fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES)
}
