//! How the files of two disks differ.
//!
//! Both trees are walked side by side.  The caller knows which blocks may differ at all, from the
//! layers of the two disks: a file that has the same blocks on both, none of them among those, is
//! the same without being read, whatever times it claims.  Others are read and compared.

use std::collections::{BTreeMap, BTreeSet};

use crate::extents::{Extents, blocks_of};
use crate::volume::ROOT;
use crate::{BLOCK_BYTES, Disk, Error, Inode, Kind, Volume};

/// Longest path of a file: Linux's `PATH_MAX`.
pub const PATH_BYTES_MAX: usize = 4096;

/// Most bytes of paths that are answered; further changes are counted.
pub const ANSWER_BYTES_MAX: usize = 2 << 20;

/// Blocks read at a time.
const CHUNK_BLOCKS: u64 = 64;
/// Where what an attribute block is about begins; before, it counts its users.
const ATTRIBUTES_OFFSET: u64 = 32;

/// What became of a file on the way from one disk to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is on the second alone.
    Added,
    /// It is on both, and not the same.
    Changed,
    /// It is on the first alone.
    Removed,
}

/// One file that differs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileChange {
    /// From the root, which is `/`.
    pub path: Vec<u8>,
    /// What became of it.
    pub change: Change,
    /// What it is; what it was, if it is gone.
    pub kind: Kind,
    /// Its length; as the kind.
    pub size_bytes: u64,
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// As many as were asked for, in the order of folders.
    pub changes: Vec<FileChange>,
    /// How many others there are.
    pub more: u64,
}

/// How far a comparison goes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most files of one side.
    pub entries_max: usize,
    /// Most changes that are answered.
    pub changes_max: usize,
}

/// Compares two file systems.
///
/// # Errors
///
/// Whatever is wrong with one of them, which is named.
pub fn compare<D: Disk, E: Disk>(
    before: Volume<D>,
    after: Volume<E>,
    may_differ: &dyn Fn(u64) -> bool,
    limits: Limits,
) -> Result<Differences, Side> {
    let mut comparison = Comparison {
        before: Counted { volume: before, entries_left: limits.entries_max },
        after: Counted { volume: after, entries_left: limits.entries_max },
        may_differ,
        compared: BTreeMap::new(),
        changes_max: limits.changes_max,
        answer_bytes: 0,
        found: Differences::default(),
    };
    comparison.walk()?;
    Ok(comparison.found)
}

/// What is wrong, and on which side.
#[derive(Debug)]
pub enum Side {
    /// On the first.
    Before(Error),
    /// On the second.
    After(Error),
}

struct Counted<D> {
    volume: Volume<D>,
    entries_left: usize,
}

/// A name that is yet to be looked at, with its inodes.
type Named = (Vec<u8>, Option<u32>, Option<u32>);

struct Frame {
    /// Length of the folder's path.
    path_bytes: usize,
    /// In reverse order.
    names: Vec<Named>,
}

struct Comparison<'a, D, E> {
    before: Counted<D>,
    after: Counted<E>,
    may_differ: &'a dyn Fn(u64) -> bool,
    /// Whether files with several names hold the same, by inode, so that they are read once.
    compared: BTreeMap<(u32, u32), bool>,
    changes_max: usize,
    answer_bytes: usize,
    found: Differences,
}

impl<D: Disk, E: Disk> Comparison<'_, D, E> {
    fn walk(&mut self) -> Result<(), Side> {
        let mut path = Vec::new();
        let mut frames = Vec::new();
        self.visit(&path, (Some(ROOT), Some(ROOT)), &mut frames)?;
        while let Some(frame) = frames.last_mut() {
            path.truncate(frame.path_bytes);
            let Some((name, before, after)) = frame.names.pop() else {
                frames.pop();
                continue;
            };
            path.push(b'/');
            path.extend_from_slice(&name);
            self.visit(&path, (before, after), &mut frames)?;
        }
        Ok(())
    }

    /// Compares one file, and has what is in it looked at next if it is a folder.
    fn visit(
        &mut self,
        path: &[u8],
        numbers: (Option<u32>, Option<u32>),
        frames: &mut Vec<Frame>,
    ) -> Result<(), Side> {
        let was = numbers.0.map(|number| self.before.volume.inode(number));
        let was = was.transpose().map_err(Side::Before)?;
        let now = numbers.1.map(|number| self.after.volume.inode(number));
        let now = now.transpose().map_err(Side::After)?;
        if path.len() > PATH_BYTES_MAX {
            let what = format!("there is a path of more than {PATH_BYTES_MAX} bytes");
            let side = if was.is_some() { Side::Before } else { Side::After };
            return Err(side(Error::TooMuch(what)));
        }
        match (&was, &now) {
            (Some(was), Some(now)) => {
                if !self.same(was, now)? {
                    self.note(path, Change::Changed, now);
                }
            }
            (Some(was), None) => self.note(path, Change::Removed, was),
            (None, Some(now)) => self.note(path, Change::Added, now),
            (None, None) => {}
        }
        let names = self.names(was.as_ref(), now.as_ref())?;
        if !names.is_empty() {
            frames.push(Frame { path_bytes: path.len(), names });
        }
        Ok(())
    }

    /// What is in a folder, last name first; nothing in anything else.
    fn names(&mut self, was: Option<&Inode>, now: Option<&Inode>) -> Result<Vec<Named>, Side> {
        let was = self.before.entries(was).map_err(Side::Before)?;
        let now = self.after.entries(now).map_err(Side::After)?;
        let all: BTreeSet<_> = was.keys().chain(now.keys()).collect();
        let both = |name: &Vec<u8>| (name.clone(), was.get(name).copied(), now.get(name).copied());
        Ok(all.into_iter().rev().map(both).collect())
    }

    fn note(&mut self, path: &[u8], change: Change, file: &Inode) {
        self.answer_bytes += path.len();
        let full = self.found.changes.len() == self.changes_max;
        if full || self.answer_bytes > ANSWER_BYTES_MAX {
            self.found.more += 1;
            return;
        }
        let path = if path.is_empty() { b"/".to_vec() } else { path.to_vec() };
        let (kind, size_bytes) = (file.kind, file.size_bytes);
        self.found.changes.push(FileChange { path, change, kind, size_bytes });
    }

    /// Whether a file is what it was.  A folder's length and times are those of its entries.
    fn same(&mut self, was: &Inode, now: &Inode) -> Result<bool, Side> {
        if was.kind != now.kind || !was.same_access(now) || !self.same_attributes(was, now)? {
            return Ok(false);
        }
        if now.kind == Kind::Folder {
            return Ok(true);
        }
        if was.size_bytes != now.size_bytes || !was.same_time(now) {
            return Ok(false);
        }
        match now.kind {
            Kind::File => self.same_file(was, now),
            Kind::Link => {
                let was = self.before.volume.target(was).map_err(Side::Before)?;
                let now = self.after.volume.target(now).map_err(Side::After)?;
                Ok(was == now)
            }
            _ => Ok(was.root == now.root),
        }
    }

    /// Whether the attributes that did not fit into the inodes are the same.
    fn same_attributes(&mut self, was: &Inode, now: &Inode) -> Result<bool, Side> {
        let blocks = (was.attribute_block, now.attribute_block);
        match blocks {
            (0, 0) => return Ok(true),
            (0, _) | (_, 0) => return Ok(false),
            (one, other) if one == other && !(self.may_differ)(one) => return Ok(true),
            _ => {}
        }
        let (mut first, mut second) = ([0; 4096], [0; 4096]);
        let rest = usize::try_from(ATTRIBUTES_OFFSET).unwrap_or(0);
        self.before.read(was.number, blocks.0, 1, &mut first).map_err(Side::Before)?;
        self.after.read(now.number, blocks.1, 1, &mut second).map_err(Side::After)?;
        Ok(first[rest..] == second[rest..])
    }

    /// As [`Self::same_contents`], once for all names of a file.
    fn same_file(&mut self, was: &Inode, now: &Inode) -> Result<bool, Side> {
        let pair = (was.number, now.number);
        if let Some(same) = self.compared.get(&pair) {
            return Ok(*same);
        }
        let same = self.same_contents(was, now)?;
        if was.names > 1 || now.names > 1 {
            self.compared.insert(pair, same);
        }
        Ok(same)
    }

    /// Whether two files of the same length hold the same.
    fn same_contents(&mut self, was: &Inode, now: &Inode) -> Result<bool, Side> {
        let old = Extents::of(&mut self.before.volume, was).map_err(Side::Before)?;
        let new = Extents::of(&mut self.after.volume, now).map_err(Side::After)?;
        let (mut at, end) = (0, blocks_of(now.size_bytes));
        while at < end {
            let ((old_block, old_run), (new_block, new_run)) = (old.at(at), new.at(at));
            let mut count = old_run.min(new_run).min(end - at);
            if old_block.is_some() || new_block.is_some() {
                count = count.min(CHUNK_BLOCKS);
                let range = (old_block, new_block);
                if !self.unread_same(range, count) {
                    let last = (end - at == count).then_some(now.size_bytes % BLOCK_BYTES);
                    if !self.read_same((was, now), range, count, last)? {
                        return Ok(false);
                    }
                }
            }
            at += count;
        }
        Ok(true)
    }

    /// Whether `count` blocks are the same because they are the same blocks.
    fn unread_same(&self, range: (Option<u64>, Option<u64>), count: u64) -> bool {
        match range {
            (Some(old), Some(new)) if old == new => {
                (old..old + count).all(|block| !(self.may_differ)(block))
            }
            _ => false,
        }
    }

    /// Whether `count` blocks hold the same; of the last one `last` bytes count, 0 meaning all.
    fn read_same(
        &mut self,
        files: (&Inode, &Inode),
        range: (Option<u64>, Option<u64>),
        count: u64,
        last: Option<u64>,
    ) -> Result<bool, Side> {
        let bytes = usize::try_from(count * BLOCK_BYTES).unwrap_or(0);
        let (mut first, mut second) = (vec![0; bytes], vec![0; bytes]);
        if let Some(block) = range.0 {
            let (number, before) = (files.0.number, &mut self.before);
            before.read(number, block, count, &mut first).map_err(Side::Before)?;
        }
        if let Some(block) = range.1 {
            let (number, after) = (files.1.number, &mut self.after);
            after.read(number, block, count, &mut second).map_err(Side::After)?;
        }
        let over = last.filter(|last| *last != 0).map_or(0, |last| BLOCK_BYTES - last);
        let length = bytes - usize::try_from(over).unwrap_or(0);
        Ok(first[..length] == second[..length])
    }
}

impl<D: Disk> Counted<D> {
    fn read(&mut self, inode: u32, block: u64, count: u64, buffer: &mut [u8]) -> Result<(), Error> {
        self.volume.check_blocks(inode, block, count)?;
        self.volume.read(block, buffer)
    }

    fn entries(&mut self, folder: Option<&Inode>) -> Result<crate::folder::Entries, Error> {
        let Some(folder) = folder.filter(|inode| inode.kind == Kind::Folder) else {
            return Ok(crate::folder::Entries::new());
        };
        let entries = self.volume.entries(folder, self.entries_left)?;
        self.entries_left -= entries.len();
        Ok(entries)
    }
}
