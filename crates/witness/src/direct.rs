//! Files read from the disk itself, past the guest's cache of it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::page::{self, BYTES, Page};

/// Blocks that are read at once.
const BLOCKS: usize = 4;
/// `O_DIRECT` of x86-64.
const DIRECT: i32 = 0o40_000;
/// Where the kernel is told to forget what it knows of disks.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// Room for blocks as the kernel wants it for direct reads.
#[repr(align(4096))]
struct Aligned([u8; BLOCKS * BYTES]);

/// A file whose blocks are read from the disk.
#[derive(Debug)]
pub struct Direct(File);

impl Direct {
    /// Opens it.
    pub fn open(path: &Path) -> io::Result<Self> {
        OpenOptions::new().read(true).custom_flags(DIRECT).open(path).map(Self)
    }

    /// Reads block `index`.
    pub fn block(&self, index: u64) -> io::Result<Page> {
        let mut buffer = Aligned([0; BLOCKS * BYTES]);
        self.0.read_exact_at(&mut buffer.0[..BYTES], index * BYTES as u64)?;
        Ok(page::from_bytes(&buffer.0[..BYTES]))
    }

    /// Has `look` see each of the first `count` blocks with its index.
    pub fn each(
        &self,
        count: u64,
        look: impl FnMut(u64, &Page) -> Result<(), String>,
    ) -> Result<(), String> {
        each(&self.0, count, look)
    }
}

/// Has `look` see each of the first `count` blocks of `file` with its index.
pub fn each(
    file: &File,
    count: u64,
    mut look: impl FnMut(u64, &Page) -> Result<(), String>,
) -> Result<(), String> {
    let mut buffer = Aligned([0; BLOCKS * BYTES]);
    for first in (0..count).step_by(BLOCKS) {
        let blocks = usize::try_from(count - first).map_or(BLOCKS, |left| left.min(BLOCKS));
        let bytes = &mut buffer.0[..blocks * BYTES];
        file.read_exact_at(bytes, first * BYTES as u64)
            .map_err(|error| format!("read: {error}"))?;
        for (index, block) in (first..).zip(bytes.chunks_exact(BYTES)) {
            look(index, &page::from_bytes(block))?;
        }
    }
    Ok(())
}

/// Makes the kernel forget what it has read of disks.
pub fn drop_caches() -> io::Result<()> {
    std::fs::write(DROP_CACHES, "3")
}
