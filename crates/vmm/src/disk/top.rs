//! The private top of a disk: a sparse file without a name, made on the first write, so that a fork
//! which writes nothing costs no file.
//!
//! Since it has no name there is none to collide with another machine's in the same folder, and
//! nothing to remove: it goes when the last process ends that has it open.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use forkd_devices::disk::{Blocks, Top};

use crate::error::Error;
use crate::sys::files;

/// Where the tops of a machine go.
#[derive(Clone, Debug)]
pub struct Tops {
    directory: PathBuf,
    /// What a write leaves free of that folder's file system.
    reserve_bytes: u64,
}

impl Tops {
    /// In `directory`, or by default in `machine`, the machine's own folder.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if `directory` is none.
    pub fn new(
        directory: Option<&Path>,
        machine: &Path,
        reserve_bytes: u64,
    ) -> Result<Self, Error> {
        if let Some(path) = directory.filter(|path| !path.is_dir()) {
            let problem = format!("{} is no folder", path.display());
            return Err(Error::Invalid { field: "top_directory", problem });
        }
        Ok(Self { directory: directory.unwrap_or(machine).to_path_buf(), reserve_bytes })
    }

    /// A new file.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub(super) fn file(&self) -> io::Result<File> {
        files::nameless(&self.directory)
    }

    /// Refuses to store `bytes` more if that would use up the reserve.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::StorageFull`].
    pub(super) fn admit(&self, file: &File, bytes: u64) -> io::Result<()> {
        if self.reserve_bytes == 0 {
            return Ok(());
        }
        let left = files::free_bytes(file)?.checked_sub(bytes);
        if left.is_some_and(|left| left >= self.reserve_bytes) {
            Ok(())
        } else {
            Err(io::ErrorKind::StorageFull.into())
        }
    }
}

/// The private top.
#[derive(Debug)]
pub struct TopFile {
    tops: Tops,
    size_bytes: u64,
    file: OnceLock<File>,
}

impl TopFile {
    /// A top that will be among `tops`; makes nothing yet.
    pub(super) fn new(tops: Tops, size_bytes: u64) -> Self {
        Self { tops, size_bytes, file: OnceLock::new() }
    }

    /// The file, if there is one yet.
    pub(super) fn made(&self) -> Option<&File> {
        self.file.get()
    }

    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = self.tops.file()?;
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

    fn admit(&self, bytes: u64) -> io::Result<()> {
        self.tops.admit(self.file()?, bytes)
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
