//! Files read block by block, through the guest's cache of the disk or past it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::page::{self, BYTES, Page};

/// Blocks that are read at once.
const AT_ONCE: usize = 4;
/// `O_DIRECT` of x86-64.
const DIRECT: i32 = 0o40_000;
/// Where the kernel is told to forget what it knows of disks.
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";

/// Room for blocks as the kernel wants it for direct reads.
#[repr(align(4096))]
struct Aligned([u8; AT_ONCE * BYTES]);

/// Opens a file to be read from the disk itself.
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(DIRECT).open(path)
}

/// Reads block `index` of `file`.
pub fn read(file: &File, index: u64) -> io::Result<Page> {
    let mut buffer = Aligned([0; AT_ONCE * BYTES]);
    file.read_exact_at(&mut buffer.0[..BYTES], index * BYTES as u64)?;
    Ok(page::from_bytes(&buffer.0[..BYTES]))
}

/// Has `look` see each of the first `count` blocks of `file` with its index.
pub fn each(
    file: &File,
    count: u64,
    mut look: impl FnMut(u64, &Page) -> Result<(), String>,
) -> Result<(), String> {
    let mut buffer = Aligned([0; AT_ONCE * BYTES]);
    for first in (0..count).step_by(AT_ONCE) {
        let blocks = usize::try_from(count - first).map_or(AT_ONCE, |left| left.min(AT_ONCE));
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
pub fn drop_caches() -> Result<(), String> {
    std::fs::write(DROP_CACHES, "3").map_err(|error| format!("{DROP_CACHES}: {error}"))
}
