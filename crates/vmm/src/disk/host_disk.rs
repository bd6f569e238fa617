//! A machine's disk: immutable layers, and the private top above them.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forkd_devices::disk::{LAYERS_MAX, LayeredDisk, STORED_PER_LIMIT_MAX};
use forkd_devices::virtio::block::Disk;
use forkd_proto::control::DiskMetrics;
use forkd_proto::guest::DiskLimit;

use crate::disk::layers::{Lower, Stored, Stratum};
use crate::disk::merge::{Merge, Merged};
use crate::disk::top::{TopFile, Tops};
use crate::error::Error;
use crate::sys::files;

/// Most layers of a disk that were tops of machines: from there on each branch makes one of two, so
/// that a machine can be branched any number of times.
const FROZEN_MAX: usize = 64;
/// How often frozen tops may hold what a disk has of its own, or its limit, before they are made
/// one layer, which holds it once.
///
/// More than once, so that a merge is paid for by what was written since the one before it.
const FROZEN_PER_OWN_MAX: u64 = 2;
// There is room for the top that is frozen next, and for one that is written during a merge.
const _: () = assert!(FROZEN_PER_OWN_MAX + 2 == STORED_PER_LIMIT_MAX);

/// Part of a disk that its file system's own tables take at most, which an image has as holes: one
/// inode of 256 bytes for each block of 4 KiB.
const TABLES_SHARE: u64 = 16;
/// What ext4 may allocate beyond what it says is free: its reserve for blocks of which it must have
/// some, such as those that say where a file's other blocks are, is no more by itself.
const ADMITTED_BYTES: u64 = 16 << 20;
/// Likewise, as a part of what files may have: a block of extents has room for 340.
const EXTENTS_SHARE: u64 = 64;

/// How much a disk may store of its own, and what its guest is told so that it never tries to store
/// more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Room {
    /// What the sandbox's file system may allocate beyond what it has in use.
    limit: u64,
    /// What it may have in use in all: that, and what the layers below have, since a file system
    /// that overwrites what it has in use asks for no room.
    used_max: u64,
    /// What the device stores.  A guest that keeps to the others never comes so far.
    stored_max: u64,
}

impl Room {
    /// That of a disk of `size` over layers that take `base` bytes of the host.
    fn new(size: u64, base: u64, limit: u64) -> Self {
        let limit = limit.min(size);
        let used_max = (limit + base).saturating_add(size / TABLES_SHARE).min(size);
        let slack = ADMITTED_BYTES + limit / EXTENTS_SHARE;
        Self { limit, used_max, stored_max: (used_max + slack).min(size) }
    }
}

/// A machine's disk.
#[derive(Debug)]
pub struct HostDisk {
    disk: LayeredDisk<TopFile>,
    lower: Lower,
    tops: Tops,
    /// How many of the layers it was made over.
    given: usize,
    room: Room,
}

impl HostDisk {
    /// A disk over `lower` whose private top is among `tops`.  Its file system may allocate `limit`
    /// bytes, and overwrite what the layers have besides.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the layers do not make a disk of that size.
    pub fn new(lower: &Lower, tops: Tops, limit: Option<u64>) -> Result<Self, Error> {
        let size = lower.size_bytes;
        let room = Room::new(size, lower.stored_bytes(), limit.unwrap_or(size));
        Self::over(lower, tops, room)
    }

    /// What the guest is told of its limit; `None` if the disk is too small to exceed it.
    #[must_use]
    pub fn limit(&self) -> Option<DiskLimit> {
        let Room { limit, used_max, stored_max: _ } = self.room;
        let limited = limit < self.lower.size_bytes;
        limited.then_some(DiskLimit { free_bytes: limit, used_bytes: used_max })
    }

    /// The layers below the top.
    #[must_use]
    pub fn lower(&self) -> &Lower {
        &self.lower
    }

    /// Forgets every write since the disk was made over `lower`.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the layers do not make a disk.
    pub fn rewind(&mut self, lower: &Lower) -> Result<(), Error> {
        *self = Self::over(lower, self.tops.clone(), self.room)?;
        Ok(())
    }

    fn over(lower: &Lower, tops: Tops, room: Room) -> Result<Self, Error> {
        let given = lower.layers.len();
        let top = TopFile::new(tops.clone(), lower.size_bytes);
        let disk = lower.disk(top, given, room.stored_max)?;
        Ok(Self { disk, lower: lower.clone(), tops, given, room })
    }

    /// Neighbours to make one layer of, if there are too many, or hold too much.
    #[must_use]
    pub fn crowded(&self) -> Option<Merge> {
        let Range { start, end } = self.repeated().or_else(|| self.smallest_pair())?;
        let layers = self.lower.layers[start..end].to_vec();
        let layers = Lower { layers, size_bytes: self.lower.size_bytes };
        Some(Merge { index: start, layers, tops: self.tops.clone() })
    }

    /// All layers that were its own tops, if they hold more than [`FROZEN_PER_OWN_MAX`] allows.
    fn repeated(&self) -> Option<Range<usize>> {
        let once = self.disk.own_bytes().max(self.room.limit);
        let most = once.saturating_mul(FROZEN_PER_OWN_MAX);
        (self.disk.frozen_bytes() > most).then_some(self.given..self.lower.layers.len())
    }

    /// If there are more than [`FROZEN_MAX`] frozen layers, the two that hold least.
    fn smallest_pair(&self) -> Option<Range<usize>> {
        let frozen = |stratum: &&Stratum| stratum.path.is_none();
        if self.lower.layers.iter().filter(frozen).count() <= FROZEN_MAX {
            return None;
        }
        let pairs = self.lower.layers.windows(2).enumerate().filter(|(index, pair)| {
            // What it was made over and what was its own stay apart.
            pair.iter().all(|stratum| stratum.path.is_none()) && index + 1 != self.given
        });
        let (index, _) =
            pairs.min_by_key(|(_, pair)| pair.iter().map(|one| one.layer.blocks()).sum::<u64>())?;
        Some(index..index + 2)
    }

    /// Goes on with the layer that a merge made of several; they have not changed since it was
    /// begun.
    pub fn adopt(&mut self, merged: Merged) {
        let Merged { index, count, stratum } = merged;
        self.lower.layers.splice(index..index + count, [stratum]);
        if index < self.given {
            self.given -= count - 1;
        }
        let layers = self.lower.layers.iter().map(|stratum| Arc::clone(&stratum.layer));
        self.disk.restack(layers.collect(), self.lower.layers.len() - self.given);
    }

    /// How many of those layers it was made over; those above were its top.
    #[must_use]
    pub fn given(&self) -> usize {
        self.given
    }

    /// Makes what the top holds a layer, and goes on with an empty one.  Costs the same whatever it
    /// holds.  The layer's file lives as long as somebody has it open, which from now on is for
    /// reading only: siblings inherit it.
    ///
    /// # Errors
    ///
    /// [`Error::State`] if there are as many layers as there may be, [`Error::Io`] if there is no
    /// descriptor to be had; nothing has changed then.
    pub fn freeze(&mut self) -> Result<(), Error> {
        let Some(file) = self.disk.top().made() else { return Ok(()) };
        if self.disk.top_bytes() == 0 {
            return Ok(());
        }
        if self.lower.layers.len() >= LAYERS_MAX {
            return Err(Error::State("the disk has as many layers as it may have"));
        }
        let frozen = files::read_only(file).map_err(Error::io("open a disk's top for reading"))?;
        let fd = frozen.as_raw_fd();
        let top = TopFile::new(self.tops.clone(), self.lower.size_bytes);
        let layer = self.disk.freeze(top, Stored(frozen));
        self.lower.layers.push(Stratum::nameless(layer, fd));
        Ok(())
    }

    /// What happened so far.
    #[must_use]
    pub fn metrics(&self) -> DiskMetrics {
        let stats = self.disk.stats();
        DiskMetrics {
            top_bytes: self.disk.stored_bytes(),
            reads: stats.reads,
            writes: stats.writes,
            flushes: stats.flushes,
        }
    }
}

impl Disk for HostDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(offset, buffer)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write_at(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }

    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.disk.discard(offset, length)
    }

    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.disk.write_zeroes(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;
    use std::path::{Path, PathBuf};

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("forkd-disk-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    impl Room {
        /// One without slack, in which each byte counts.
        fn of(limit: u64) -> Self {
            Self { limit, used_max: limit, stored_max: limit }
        }
    }

    fn tops(folder: &Path) -> Tops {
        Tops::new(None, folder, 0).unwrap()
    }

    #[test]
    fn a_saved_top_is_a_layer_for_the_next_machine() {
        let folder = folder("layer");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, tops(&folder), None).unwrap();
        disk.write_at(4096, &[2; 4096]).unwrap();
        let layer = folder.join("disk.layer");

        disk.freeze().unwrap();
        disk.lower().save(disk.given(), &layer).unwrap();

        let lower = Lower::open(&[image, layer], 8 * 4096, None).unwrap();
        let mut next = HostDisk::new(&lower, tops(&folder.join("next")), None).unwrap();
        let mut bytes = [0; 3];
        next.read_at(4095, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 2]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_frozen_top_is_below_the_next_one_and_saved_with_it() {
        let folder = folder("frozen");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, tops(&folder), None).unwrap();
        disk.write_at(0, &[2; 8192]).unwrap();
        disk.freeze().unwrap();
        let then = disk.lower().clone();

        disk.write_at(4096, &[3; 4096]).unwrap();
        disk.write_at(8192, &[1; 4096]).unwrap();

        let mut sibling = HostDisk::new(&then, tops(&folder.join("sibling")), None).unwrap();
        let (mut ours, mut theirs) = ([0; 3], [0; 3]);
        disk.read_at(4095, &mut ours).unwrap();
        sibling.read_at(4095, &mut theirs).unwrap();
        assert_eq!((ours, theirs), ([2, 3, 3], [2, 2, 2]));
        assert_eq!(disk.metrics().top_bytes, 4 * 4096);
        let layer = folder.join("disk.layer");
        disk.freeze().unwrap();
        disk.lower().save(disk.given(), &layer).unwrap();
        let blocks = (std::fs::metadata(&layer).unwrap().len() - 96 - 16) / 4096;
        assert_eq!(blocks, 2, "a block that is as in the image is not stored");
        assert!(then.save(3, &layer).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_is_frozen_once_too_often_merges_two_layers_and_reads_the_same() {
        let folder = folder("merged");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::over(&lower, tops(&folder), Room::of(1 << 20)).unwrap();
        let mut expected = [1_u8; 8];
        for round in 0..=FROZEN_MAX {
            assert!(disk.crowded().is_none(), "{round}");
            let (block, value) = (round * 3 % 8, u8::try_from(round + 2).unwrap());
            disk.write_at(block as u64 * 4096, &[value; 4096]).unwrap();
            expected[block] = value;
            disk.freeze().unwrap();
        }

        let merged = disk.crowded().unwrap().make().unwrap();
        disk.adopt(merged);

        assert!(disk.crowded().is_none());
        let mut found = [0; 8];
        for (block, slot) in (0..).step_by(4096).zip(found.chunks_mut(1)) {
            disk.read_at(block, slot).unwrap();
        }
        assert_eq!((found, disk.given()), (expected, 1));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_is_written_and_frozen_again_and_again_stores_no_more_than_its_limit_allows() {
        let folder = folder("repeated");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let limit = 2 * 4096;
        let room = Room::of(limit);
        let mut disk = HostDisk::over(&lower, tops(&folder), room).unwrap();
        let freeze = |disk: &mut HostDisk, round: usize| {
            let block = round % 2;
            disk.write_at(block as u64 * 4096, &[u8::try_from(round).unwrap(); 4096])?;
            disk.freeze().unwrap();
            assert!(disk.metrics().top_bytes <= STORED_PER_LIMIT_MAX * limit);
            io::Result::Ok(())
        };

        let mut merges = 0;
        for round in 0..100 {
            freeze(&mut disk, round).unwrap();
            if let Some(merge) = disk.crowded() {
                disk.adopt(merge.make().unwrap());
                assert_eq!((disk.metrics().top_bytes, disk.given()), (limit, 1));
                merges += 1;
            }
        }
        let mut unmerged = (100..).map(|round| freeze(&mut disk, round));
        let refused = unmerged.find_map(Result::err).unwrap();

        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert_eq!(merges, 32, "one for each three that were frozen, after the first five");
        let mut other = HostDisk::over(&disk.lower, tops(&folder), room).unwrap();
        other.write_at(0, &[7; 8192]).unwrap();
        assert_eq!(other.metrics().top_bytes, limit, "what was given is nobody's own");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn what_is_discarded_after_it_was_frozen_is_neither_merged_nor_saved_nor_counted() {
        let folder = folder("discarded");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let limit = 2 * 4096;
        let room = Room::of(limit);
        let mut disk = HostDisk::over(&lower, tops(&folder), room).unwrap();
        let saved_blocks = |disk: &HostDisk| {
            let layer = folder.join("disk.layer");
            disk.lower().save(disk.given(), &layer).unwrap();
            let stored = std::fs::metadata(&layer).unwrap().len() - 96;
            std::fs::remove_file(layer).unwrap();
            stored / 4096
        };

        for block in 0..8_u64 {
            disk.write_at(block * 4096, &[7; 4096]).unwrap();
            disk.freeze().unwrap();
            disk.discard(block * 4096, 4096).unwrap();
            assert_eq!(disk.disk.own_bytes(), 0, "{block}");
            if let Some(merge) = disk.crowded() {
                disk.adopt(merge.make().unwrap());
                assert!(disk.metrics().top_bytes <= limit, "{block}");
            }
        }
        disk.write_at(0, &[9; 4096]).unwrap();
        disk.freeze().unwrap();

        assert_eq!(saved_blocks(&disk), 1);
        assert_eq!((disk.disk.own_bytes(), disk.given()), (4096, 1));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_guest_is_told_less_than_its_device_stores() {
        let folder = folder("told");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let size = 1 << 30;
        let lower = Lower::open(std::slice::from_ref(&image), size, None).unwrap();
        let disk = |limit| HostDisk::new(&lower, tops(&folder), limit).unwrap();

        let limited = disk(Some(64 << 20));
        let told = limited.limit().unwrap();
        assert_eq!((told.free_bytes, told.used_bytes), (64 << 20, (128 << 20) + 8 * 4096));
        assert!(limited.room.stored_max >= told.used_bytes + (17 << 20));
        assert_eq!(disk(None).limit(), None);
        assert_eq!(disk(Some(size)).limit(), None, "a disk cannot exceed its own size");
        assert_eq!(disk(Some(size - 1)).limit().unwrap().used_bytes, size);
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// How many descriptors of this process are of the file behind `fd`, and by how many of those
    /// it can be written to.
    fn holders(fd: i32) -> (usize, usize) {
        let wanted = std::fs::metadata(format!("/proc/self/fd/{fd}")).unwrap();
        // Other tests open and close files meanwhile.
        let flags = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
            let path = entry.ok()?.path();
            let found = std::fs::metadata(&path).ok()?;
            let info =
                std::fs::read_to_string(Path::new("/proc/self/fdinfo").join(path.file_name()?));
            let same = (found.dev(), found.ino()) == (wanted.dev(), wanted.ino());
            let info = info.ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
            same.then(|| i32::from_str_radix(flags.trim(), 8).unwrap())
        });
        let flags: Vec<i32> = flags.collect();
        let written = flags.iter().filter(|flags| **flags & libc::O_ACCMODE != libc::O_RDONLY);
        (flags.len(), written.count())
    }

    #[test]
    fn what_was_frozen_or_merged_is_open_for_reading_only() {
        let folder = folder("read-only");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 2 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 2 * 4096, None).unwrap();
        let mut disk = HostDisk::over(&lower, tops(&folder), Room::of(1 << 20)).unwrap();
        disk.write_at(0, &[2; 8192]).unwrap();
        assert_eq!(holders(disk.disk.top().made().unwrap().as_raw_fd()), (1, 1));

        for round in 0..=FROZEN_MAX {
            disk.write_at(0, &[u8::try_from(round).unwrap(); 100]).unwrap();
            disk.freeze().unwrap();
        }
        let merged = disk.crowded().unwrap().make().unwrap();
        disk.adopt(merged);

        let holders: Vec<_> = disk.lower().descriptors().map(holders).collect();
        assert_eq!(holders, vec![(1, 0); 1 + FROZEN_MAX]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn layers_that_the_parent_has_open_are_shared() {
        let folder = folder("shared");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let parent = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();

        let lower = Lower::open(std::slice::from_ref(&image), 4096, Some(&parent)).unwrap();

        assert!(lower.descriptors().eq(parent.descriptors()));
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// A disk of one block over an image of another folder, with its tops in `folder`.
    fn small(folder: &Path, reserve_bytes: u64) -> HostDisk {
        let image = folder.with_extension("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();
        std::fs::remove_file(image).unwrap();
        HostDisk::new(&lower, Tops::new(Some(folder), folder, reserve_bytes).unwrap(), None)
            .unwrap()
    }

    #[test]
    fn a_disk_leaves_no_name_in_the_folder_of_its_tops() {
        let folder = folder("nameless");
        let mut disk = small(&folder, 0);

        disk.read_at(0, &mut [0; 10]).unwrap();
        disk.flush().unwrap();
        assert!(disk.disk.top().made().is_none(), "nothing was written");
        disk.write_at(0, &[2; 4096]).unwrap();
        disk.freeze().unwrap();
        disk.write_at(0, &[3; 4096]).unwrap();

        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_write_that_would_use_up_the_reserve_is_refused() {
        let folder = folder("reserve");
        let (mut modest, mut greedy) = (small(&folder, 1), small(&folder, u64::MAX));

        modest.write_at(0, &[2; 4096]).unwrap();
        let refused = greedy.write_at(0, &[2; 4096]).unwrap_err();

        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert!(Tops::new(Some(&folder.join("none")), &folder, 0).is_err());
        std::fs::remove_dir(folder).unwrap();
    }

    #[test]
    fn a_flipped_bit_in_a_layer_is_found_when_opening() {
        let folder = folder("flipped");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, tops(&folder), None).unwrap();
        disk.write_at(0, &[3; 4096]).unwrap();
        let path = folder.join("disk.layer");
        disk.freeze().unwrap();
        disk.lower().save(1, &path).unwrap();
        let mut stored = std::fs::read(&path).unwrap();
        let last = stored.len() - 1;
        stored[last] ^= 1;
        std::fs::write(&path, stored).unwrap();

        let error = Lower::open(&[image, path], 4096, None).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::Damaged);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
