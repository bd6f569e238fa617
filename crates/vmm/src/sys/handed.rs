//! Files that somebody opened for this process: itself before it was jailed, or the daemon.
//!
//! A jailed process opens nothing of the host by path.  What it is told to read is here under the
//! path, and what it opens instead of that path is a duplicate.  Where nothing was handed over,
//! paths are opened as they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How long a file is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// As long as who handed it over wants, and in no machine that is forked meanwhile.
    Lent,
    /// By a zygote, and in no machine.
    Zygote,
    /// By this process and all that it forks.
    Always,
}

type Files = BTreeMap<PathBuf, (Keep, File)>;

static FILES: Mutex<Files> = Mutex::new(BTreeMap::new());

fn files() -> MutexGuard<'static, Files> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has `file` be what is opened as `path`.
pub fn put(path: &Path, keep: Keep, file: File) {
    files().insert(path.to_path_buf(), (keep, file));
}

/// Opens `path` now and keeps it.
///
/// # Errors
///
/// The kernel's.
pub fn open_and_keep(path: &Path, keep: Keep) -> io::Result<()> {
    let file = File::open(path)?;
    put(path, keep, file);
    Ok(())
}

/// Whether `path` was handed over.
#[must_use]
pub fn has(path: &Path) -> bool {
    files().contains_key(path)
}

/// The descriptor of what is `path`, if that was handed over.
#[must_use]
pub fn number(path: &Path) -> Option<i32> {
    files().get(path).map(|(_, file)| file.as_raw_fd())
}

/// Gives what is `path` to the caller alone.
#[must_use]
pub fn take(path: &Path) -> Option<File> {
    files().remove(path).map(|(_, file)| file)
}

/// Forgets what is `path`.
pub fn forget(path: &Path) {
    drop(take(path));
}

/// Keeps only what is kept for at least as long as `least`.
pub fn keep_only(least: Keep) {
    files().retain(|_, (keep, _)| *keep as u8 >= least as u8);
}

/// The descriptors of all there is.
#[must_use]
pub fn descriptors() -> Vec<i32> {
    files().values().map(|(_, file)| file.as_raw_fd()).collect()
}

/// A duplicate of what is `path`, if that was handed over.
#[must_use]
pub fn duplicate(path: &Path) -> Option<io::Result<File>> {
    files().get(path).map(|(_, file)| file.try_clone())
}

/// Opens `path` for reading, from its beginning.
///
/// # Errors
///
/// The kernel's.
pub fn open(path: &Path) -> io::Result<File> {
    let Some(file) = duplicate(path) else { return File::open(path) };
    let mut file = file?;
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// Opens a folder, itself or below one that was handed over.
///
/// # Errors
///
/// The kernel's.
pub fn open_folder(path: &Path) -> io::Result<File> {
    for above in path.ancestors() {
        let Some(fd) = files().get(above).map(|(_, file)| file.as_raw_fd()) else { continue };
        let rest = path.strip_prefix(above).unwrap_or(Path::new(""));
        // A path below a descriptor: what is above it need not be there.
        return File::open(Path::new(&format!("/proc/self/fd/{fd}")).join(rest));
    }
    File::open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn what_was_handed_over_is_opened_though_its_path_is_gone_and_more_than_once() {
        let folder = std::env::temp_dir().join(format!("forkd-handed-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("file");
        std::fs::write(&path, "kept").unwrap();
        open_and_keep(&path, Keep::Lent).unwrap();
        open_and_keep(&folder, Keep::Zygote).unwrap();
        std::fs::remove_file(&path).unwrap();

        for _ in 0..2 {
            let mut found = String::new();
            open(&path).unwrap().read_to_string(&mut found).unwrap();
            assert_eq!(found, "kept");
        }
        std::fs::create_dir(folder.join("below")).unwrap();
        assert!(open_folder(&folder.join("below")).unwrap().metadata().unwrap().is_dir());

        keep_only(Keep::Zygote);
        assert!(!has(&path) && has(&folder));
        forget(&folder);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
