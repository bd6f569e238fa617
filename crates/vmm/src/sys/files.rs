//! Files without a name, and the room for them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::sys::process;

/// Makes a file in `folder` that has no name, so that it goes with its last descriptor, however
/// its process ends.
///
/// # Errors
///
/// The kernel's.
pub fn nameless(folder: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    match options.clone().custom_flags(libc::O_TMPFILE).open(folder) {
        // The file system, or the kernel, knows no such files.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
            unlinked(folder)
        }
        opened => opened,
    }
}

/// As [`nameless`], by way of a name that is removed at once.
fn unlinked(folder: &Path) -> io::Result<File> {
    let mut number = [0; 8];
    process::random(&mut number)?;
    let path = folder.join(format!("forkd-top-{:016x}", u64::from_ne_bytes(number)));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

/// Opens `file` once more, for reading only.
///
/// # Errors
///
/// The kernel's.
pub fn read_only(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Bytes that can still be stored in the file system of `file`.
///
/// # Errors
///
/// The kernel's.
pub fn free_bytes(file: &File) -> io::Result<u64> {
    // SAFETY: all-zero is a valid `statvfs`.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, and `found` outlives the call.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &raw mut found) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, SeekFrom, Write};

    #[test]
    fn a_file_without_a_name_holds_what_is_written_and_leaves_its_folder_empty() {
        let folder = std::env::temp_dir().join(format!("forkd-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for make in [nameless, unlinked] {
            let mut file = make(&folder).unwrap();
            file.write_all(b"kept").unwrap();
            file.seek(SeekFrom::Start(0)).unwrap();
            let mut found = String::new();
            file.read_to_string(&mut found).unwrap();

            assert_eq!(found, "kept");
            assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        }
        std::fs::remove_dir(folder).unwrap();
    }
}
