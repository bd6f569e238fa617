//! Superblock, groups and inodes.

use crate::{BLOCK_BYTES, Disk, Error, damaged, u16_at, u32_at};

/// The inode of the root folder.
pub(crate) const ROOT: u32 = 2;

const SUPERBLOCK_OFFSET: u64 = 1024;
const MAGIC: u16 = 0xef53;
/// Incompatible features that change nothing of what is read here, or are read: types in folders,
/// extents, 64 bits, groups laid out together, a checksum's seed, large folders.
const FEATURES: u32 = 0x2 | 0x40 | 0x80 | 0x200 | 0x2000 | 0x4000;
const FEATURE_RECOVER: u32 = 0x4;
const FEATURE_64BIT: u32 = 0x80;
/// Smallest descriptor of a group, and what one with 64 bits has at least.
const GROUP_BYTES: (u64, u64) = (32, 64);
/// Smallest inode; what lies beyond is described by a length of its own.
const INODE_BYTES_MIN: u64 = 128;
const FLAG_EXTENTS: u32 = 0x8_0000;
/// Most blocks that ext4 can have.
const BLOCKS_MAX: u64 = 1 << 48;
/// How often all blocks may be read: twice what honest files and folders have.
const READS_MAX: u64 = 2;

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A character device.
    Character,
    /// A block device.
    Block,
    /// A named pipe.
    Pipe,
    /// A socket.
    Socket,
}

impl Kind {
    /// The letter that `find` and `ls` have for it.
    #[must_use]
    pub fn letter(self) -> &'static str {
        match self {
            Self::File => "f",
            Self::Folder => "d",
            Self::Link => "l",
            Self::Character => "c",
            Self::Block => "b",
            Self::Pipe => "p",
            Self::Socket => "s",
        }
    }
}

/// A file, without its name and its contents.
#[derive(Clone, Debug)]
pub struct Inode {
    /// Its number.
    pub number: u32,
    /// What it is.
    pub kind: Kind,
    /// Length of its contents.
    pub size_bytes: u64,
    /// How many names it has, as it says.
    pub(crate) names: u16,
    mode: u16,
    owner: (u32, u32),
    modified: (u32, u32),
    extents: bool,
    /// The root of its extents; a short link's target; a device's number.
    pub(crate) root: [u8; 60],
    /// Extended attributes beside it.
    attributes: Vec<u8>,
    /// The block with more of them; 0 for none.
    pub(crate) attribute_block: u64,
}

impl Inode {
    /// Whether mode, owner, group and the extended attributes stored with the inode are the same.
    #[must_use]
    pub fn same_access(&self, other: &Self) -> bool {
        (self.mode, self.owner) == (other.mode, other.owner) && self.attributes == other.attributes
    }

    /// Whether both were last written at the same time.
    #[must_use]
    pub fn same_time(&self, other: &Self) -> bool {
        self.modified == other.modified
    }

    /// Whether its root holds extents.
    pub(crate) fn has_extents(&self) -> bool {
        self.extents
    }

    fn parse(number: u32, bytes: &[u8]) -> Result<Self, Error> {
        let mode = u16_at(bytes, 0);
        let kind = match mode >> 12 {
            0x8 => Kind::File,
            0x4 => Kind::Folder,
            0xa => Kind::Link,
            0x2 => Kind::Character,
            0x6 => Kind::Block,
            0x1 => Kind::Pipe,
            0xc => Kind::Socket,
            _ => return Err(damaged(format!("inode {number} is of no kind ({mode:#o})"))),
        };
        let mut root = [0; 60];
        root.copy_from_slice(&bytes[40..100]);
        let wide = |low: usize, high: usize| {
            u32::from(u16_at(bytes, low)) | u32::from(u16_at(bytes, high)) << 16
        };
        // Past 128 bytes there is how much of the rest is the inode's; attributes follow.
        let extra = usize::from(u16_at(bytes, 128));
        Ok(Self {
            number,
            kind,
            size_bytes: u64::from(u32_at(bytes, 4)) | u64::from(u32_at(bytes, 108)) << 32,
            names: u16_at(bytes, 26),
            mode: mode & 0xfff,
            owner: (wide(2, 120), wide(24, 122)),
            modified: (u32_at(bytes, 16), if extra >= 12 { u32_at(bytes, 136) } else { 0 }),
            extents: u32_at(bytes, 32) & FLAG_EXTENTS != 0,
            root,
            attributes: bytes.get(128 + extra..).unwrap_or_default().to_vec(),
            attribute_block: u64::from(u32_at(bytes, 104)) | u64::from(u16_at(bytes, 118)) << 32,
        })
    }
}

/// One file system.
#[derive(Debug)]
pub struct Volume<D> {
    disk: D,
    blocks: u64,
    inodes: u32,
    inodes_per_group: u32,
    inode_bytes: u64,
    group_bytes: u64,
    /// Blocks that may yet be read.
    reads_left: u64,
}

impl<D: Disk> Volume<D> {
    /// Looks at the superblock.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if it is not a file system that this reads, [`Error::Damaged`] if
    /// its numbers cannot be, [`Error::Io`].
    pub fn open(mut disk: D) -> Result<Self, Error> {
        let mut raw = [0; 1024];
        disk.read_at(SUPERBLOCK_OFFSET, &mut raw)?;
        if u16_at(&raw, 56) != MAGIC {
            return Err(Error::Unsupported("it is not ext4".into()));
        }
        check_features(u32_at(&raw, 96))?;
        if u32_at(&raw, 24) != 2 {
            return Err(Error::Unsupported("its blocks are not of 4 KiB".into()));
        }
        let wide = u32_at(&raw, 96) & FEATURE_64BIT != 0;
        let high = if wide { u64::from(u32_at(&raw, 336)) << 32 } else { 0 };
        let group_bytes = if wide { u64::from(u16_at(&raw, 254)) } else { GROUP_BYTES.0 };
        let blocks = u64::from(u32_at(&raw, 4)) | high;
        let volume = Self {
            disk,
            blocks,
            inodes: u32_at(&raw, 0),
            inodes_per_group: u32_at(&raw, 40),
            inode_bytes: u64::from(u16_at(&raw, 88)),
            group_bytes,
            reads_left: blocks.saturating_mul(READS_MAX),
        };
        let group_bytes_min = if wide { GROUP_BYTES.1 } else { GROUP_BYTES.0 };
        let sound = volume.inodes_per_group != 0
            && blocks <= BLOCKS_MAX
            && (INODE_BYTES_MIN..=BLOCK_BYTES).contains(&volume.inode_bytes)
            && volume.inode_bytes.is_power_of_two()
            && (group_bytes_min..=BLOCK_BYTES).contains(&group_bytes)
            && group_bytes.is_power_of_two();
        if sound { Ok(volume) } else { Err(damaged("the superblock's numbers cannot be")) }
    }

    /// Reads an inode.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if there is none of that number, or it is of no kind; [`Error::Io`].
    pub fn inode(&mut self, number: u32) -> Result<Inode, Error> {
        if number == 0 || number > self.inodes {
            return Err(damaged(format!("there is no inode {number}")));
        }
        let (group, index) =
            ((number - 1) / self.inodes_per_group, (number - 1) % self.inodes_per_group);
        let mut descriptor = [0; 64];
        let length = if self.group_bytes < 64 { 32 } else { 64 };
        let at = BLOCK_BYTES + u64::from(group) * self.group_bytes;
        self.disk.read_at(at, &mut descriptor[..length])?;
        let table = u64::from(u32_at(&descriptor, 8)) | u64::from(u32_at(&descriptor, 40)) << 32;
        let offset = u64::from(index) * self.inode_bytes;
        self.check_blocks(number, table, offset / BLOCK_BYTES + 1)?;
        let mut bytes = vec![0; usize::try_from(self.inode_bytes).unwrap_or(0)];
        self.disk.read_at(table * BLOCK_BYTES + offset, &mut bytes)?;
        Inode::parse(number, &bytes)
    }

    /// Reads from the beginning of a block on; the caller has checked their numbers.
    pub(crate) fn read(&mut self, block: u64, buffer: &mut [u8]) -> Result<(), Error> {
        let count = (buffer.len() as u64).div_ceil(BLOCK_BYTES);
        let left = self.reads_left.checked_sub(count);
        self.reads_left = left.ok_or_else(|| damaged("its files have more blocks than it has"))?;
        Ok(self.disk.read_at(block * BLOCK_BYTES, buffer)?)
    }

    /// Refuses blocks beyond the end.
    pub(crate) fn check_blocks(&self, inode: u32, first: u64, count: u64) -> Result<(), Error> {
        if first.checked_add(count).is_none_or(|end| end > self.blocks) {
            let what = format!("inode {inode} lies at block {first}, of {} there are", self.blocks);
            return Err(damaged(what));
        }
        Ok(())
    }
}

fn check_features(features: u32) -> Result<(), Error> {
    if features & FEATURE_RECOVER != 0 {
        return Err(Error::Unsupported("its journal was not written back".into()));
    }
    match features & !FEATURES {
        0 => Ok(()),
        unknown => Err(Error::Unsupported(format!("it has features {unknown:#x}"))),
    }
}
