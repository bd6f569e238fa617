//! A limit on the disk, kept by the file system itself.
//!
//! The host stores only so much of what a sandbox writes.  A device that stores no more can only
//! fail a write that the kernel has promised to do long ago, and the data is lost.  So the file
//! system has to refuse earlier: to the program that writes.  ext4 has a number of clusters that it
//! gives nobody, root included (`/sys/fs/ext4/<device>/reserved_clusters`); with all of them but
//! what the limit allows reserved, `write` and `fallocate` answer ENOSPC, and `df` shows what is
//! left.
//!
//! The number lives in the kernel's memory.  So a fork of a limited sandbox begins with its limit,
//! and gets another, or the kernel's own number back.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use forkd_proto::guest::DiskLimit;
use nix::sys::statvfs::statvfs;

use crate::log;

/// Where ext4 keeps its superblock; Documentation/filesystems/ext4/globals.rst.
const SUPERBLOCK_OFFSET: u64 = 1024;
const SUPERBLOCK_BYTES: usize = 1024;

/// The limit on the root file system.
#[derive(Debug, Default)]
pub struct Limit {
    /// What the kernel had reserved by itself, once that was changed.
    before: Option<u64>,
}

impl Limit {
    /// Keeps the root file system within `limit`, or within its disk if there is none.
    ///
    /// A root that cannot be told, such as one that is not ext4, has only the limit of its device;
    /// the console says so.
    pub fn set(&mut self, limit: Option<DiskLimit>) {
        if limit.is_none() && self.before.is_none() {
            return;
        }
        if let Err(error) = self.try_set(limit) {
            log::line(&format!("the limit on the disk is left to its device: {error}"));
        }
    }

    fn try_set(&mut self, limit: Option<DiskLimit>) -> io::Result<()> {
        let device = device_of(Path::new("/"))?;
        let file = Path::new("/sys/fs/ext4").join(&device).join("reserved_clusters");
        let before = match self.before {
            Some(before) => before,
            None => number(&fs::read_to_string(&file)?)?,
        };
        let reserved = match limit {
            Some(limit) => reserved(limit, Usage::of(Path::new("/"), &device)?).max(before),
            None => before,
        };
        fs::write(&file, reserved.to_string())?;
        self.before = Some(before);
        Ok(())
    }
}

/// How full a file system is.
#[derive(Clone, Copy, Debug)]
struct Usage {
    bytes: u64,
    free_bytes: u64,
    cluster_bytes: u64,
}

impl Usage {
    fn of(mount_point: &Path, device: &Path) -> io::Result<Self> {
        let mut superblock = [0; SUPERBLOCK_BYTES];
        File::open(Path::new("/dev").join(device))?
            .read_exact_at(&mut superblock, SUPERBLOCK_OFFSET)?;
        let found = statvfs(mount_point)?;
        let (bytes, cluster_bytes) =
            sizes(&superblock).ok_or_else(|| io::Error::other("its superblock makes no sense"))?;
        let free_bytes = found.blocks_free().saturating_mul(found.fragment_size());
        Ok(Self { bytes, free_bytes, cluster_bytes })
    }
}

/// Clusters that must stay free, so that neither limit is exceeded.
fn reserved(limit: DiskLimit, usage: Usage) -> u64 {
    let beyond_free = usage.free_bytes.saturating_sub(limit.free_bytes);
    let beyond_used = usage.bytes.saturating_sub(limit.used_bytes);
    // The kernel takes no number as large as the file system.
    let most = (usage.bytes / usage.cluster_bytes).saturating_sub(1);
    beyond_free.max(beyond_used).div_ceil(usage.cluster_bytes).min(most)
}

/// Size of the file system, and of a cluster; Documentation/filesystems/ext4/super.rst.
fn sizes(superblock: &[u8]) -> Option<(u64, u64)> {
    let word = |at: usize| {
        let bytes = superblock.get(at..at + 4)?;
        Some(u64::from(u32::from_le_bytes(bytes.try_into().ok()?)))
    };
    let shifted = |log: u64| 1024_u64.checked_shl(u32::try_from(log).ok()?);
    let has_high_words = word(0x60)? & 0x80 != 0;
    let blocks = word(0x04)? | if has_high_words { word(0x150)? << 32 } else { 0 };
    let bytes = blocks.checked_mul(shifted(word(0x18)?)?)?;
    let cluster_bytes = shifted(word(0x1c)?).filter(|bytes| *bytes > 0)?;
    Some((bytes, cluster_bytes))
}

/// Name of the block device that is mounted at `mount_point`.
fn device_of(mount_point: &Path) -> io::Result<PathBuf> {
    let number = fs::metadata(mount_point)?.dev();
    let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
    let link = fs::read_link(format!("/sys/dev/block/{major}:{minor}"))?;
    link.file_name().map(PathBuf::from).ok_or_else(|| io::ErrorKind::NotFound.into())
}

fn number(text: &str) -> io::Result<u64> {
    text.trim().parse().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn usage(free_mib: u64) -> Usage {
        Usage { bytes: 2048 * MIB, free_bytes: free_mib * MIB, cluster_bytes: 4096 }
    }

    fn reserved_mib(free_mib: u64, limit_mib: u64, used_mib: u64) -> u64 {
        let limit = DiskLimit { free_bytes: limit_mib * MIB, used_bytes: used_mib * MIB };
        reserved(limit, usage(free_mib)) * 4096 / MIB
    }

    #[test]
    fn all_that_is_free_is_reserved_but_for_the_limit() {
        assert_eq!(reserved_mib(1500, 64, 2048), 1436);
    }

    #[test]
    fn a_file_system_with_less_free_than_the_limit_keeps_that() {
        assert_eq!(reserved_mib(50, 64, 2048), 0);
    }

    #[test]
    fn what_is_in_use_counts_where_the_host_knows_of_less() {
        // 548 MiB are in use, and the host has room for 600.
        assert_eq!(reserved_mib(1500, 64, 600), 1448);
    }

    #[test]
    fn the_kernel_gets_no_number_that_it_refuses() {
        let limit = DiskLimit { free_bytes: 0, used_bytes: 0 };
        assert_eq!(reserved(limit, usage(2048)), 2048 * MIB / 4096 - 1);
    }

    #[test]
    fn a_superblock_says_how_large_the_file_system_is() {
        let mut superblock = [0; SUPERBLOCK_BYTES];
        superblock[0x04..0x08].copy_from_slice(&524_288_u32.to_le_bytes());
        superblock[0x18] = 2;
        superblock[0x1c] = 2;
        assert_eq!(sizes(&superblock), Some((2048 * MIB, 4096)));
        superblock[0x60] = 0x80;
        superblock[0x150] = 1;
        assert_eq!(sizes(&superblock), Some((((1 << 32) + 524_288) * 4096, 4096)));
        superblock[0x18] = 255;
        assert_eq!(sizes(&superblock), None);
    }
}
