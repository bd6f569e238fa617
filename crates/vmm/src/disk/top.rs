//! The private top of a disk: a sparse file that is made on the first write, so that a fork which
//! writes nothing costs no file.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use forkd_devices::disk::{Blocks, Top};

/// The private top: `disk.top` in the machine's folder, from the first write on.
#[derive(Debug)]
pub struct TopFile {
    path: PathBuf,
    size_bytes: u64,
    file: OnceLock<File>,
}

impl TopFile {
    /// A top that will be at `path`; makes nothing yet.
    pub(super) fn new(path: &Path, size_bytes: u64) -> Self {
        Self { path: path.to_path_buf(), size_bytes, file: OnceLock::new() }
    }

    /// The file, if there is one yet.
    pub(super) fn made(&self) -> Option<&File> {
        self.file.get()
    }

    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        // Never an older one: that may be a layer now.
        let file = File::options().read(true).write(true).create_new(true).open(&self.path)?;
        file.set_len(self.size_bytes)?;
        Ok(self.file.get_or_init(|| file))
    }
}

impl Blocks for TopFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file()?.read_exact_at(buffer, offset)
    }
}

impl Top for TopFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file()?.write_all_at(data, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.get().map_or(Ok(()), File::sync_data)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (Some(file), Ok(offset), Ok(length)) =
            (self.file.get(), i64::try_from(offset), i64::try_from(length))
        else {
            return Ok(());
        };
        // SAFETY: the descriptor is open; the call takes no pointers.
        if unsafe { libc::fallocate(file.as_raw_fd(), PUNCH, offset, length) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}
