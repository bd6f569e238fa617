//! Removing a tree, however deep: without recursion, and with two open directories.
//!
//! A guest can nest directories deeper than any path or stack is long, and the agent's end would be
//! the guest's.  Names are resolved one at a time and links are never followed, so whoever renames
//! meanwhile cannot have anything removed elsewhere.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, fstat, openat, unlinkat};
use rustix::io::Errno;

/// Deepest tree that is removed, in directories below one another: what the agent has memory for.
pub const DEPTH_MAX: usize = 100_000;

/// Most names of directories that are kept of one level; it is read again for more.
const FOLDERS_MAX: usize = 4_096;

/// Device and inode: what a directory is, whatever it is called.
type Identity = (u64, u64);

/// What is left of one directory, whose files are gone.
struct Level {
    folders: Vec<CString>,
    /// Whether there may be more than `folders`.
    more: bool,
}

/// A directory that is being emptied further down.
struct Above {
    rest: Level,
    identity: Identity,
    /// The directory in it that is removed next.
    inner: CString,
}

/// Removes the directory at `path` and all that is in it.
///
/// # Errors
///
/// The kernel refused to remove something; what was removed before is gone.
pub fn tree(path: &Path) -> io::Result<()> {
    let mut here = open(&openat(CWD, path, folder_flags(), Mode::empty())?, c".")?;
    let mut level = Level::empty(&here)?;
    let mut above = Vec::new();
    loop {
        if let Some(name) = level.folders.pop() {
            let inner = match open(&here, &name) {
                Ok(inner) => inner,
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error.into()),
            };
            if above.len() == DEPTH_MAX {
                return Err(io::Error::other(format!("deeper than {DEPTH_MAX} directories")));
            }
            let rest = std::mem::replace(&mut level, Level::empty(&inner)?);
            above.push(Above { rest, identity: identity(&here)?, inner: name });
            here = inner;
        } else if level.more {
            level = Level::empty(&here)?;
        } else {
            let Some(Above { rest, identity: expected, inner }) = above.pop() else { break };
            here = open(&here, c"..")?;
            if identity(&here)? != expected {
                return Err(io::Error::other("a directory was moved while it was removed"));
            }
            gone(unlinkat(&here, &inner, AtFlags::REMOVEDIR))?;
            level = rest;
        }
    }
    std::fs::remove_dir(path)
}

impl Level {
    /// Removes the files of a directory; returns what is left.
    fn empty(folder: &OwnedFd) -> io::Result<Self> {
        let mut left = Self { folders: Vec::new(), more: false };
        for entry in Dir::read_from(folder)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if left.folders.len() == FOLDERS_MAX {
                left.more = true;
                break;
            }
            let removed = match entry.file_type() {
                FileType::Directory => Err(Errno::ISDIR),
                _ => unlinkat(folder, name, AtFlags::empty()),
            };
            match removed {
                Err(Errno::ISDIR) => left.folders.push(name.to_owned()),
                other => gone(other)?,
            }
        }
        Ok(left)
    }
}

fn folder_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn open(folder: &OwnedFd, name: &CStr) -> Result<OwnedFd, Errno> {
    openat(folder, name, folder_flags(), Mode::empty())
}

fn identity(folder: &OwnedFd) -> Result<Identity, Errno> {
    fstat(folder).map(|found| (found.st_dev, found.st_ino))
}

/// Forgives that somebody else has removed it first.
fn gone(removed: Result<(), Errno>) -> Result<(), Errno> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_wide_folder_is_read_until_nothing_is_left() {
        let top = std::env::temp_dir().join(format!("forkd-wide-{}", std::process::id()));
        for number in 0..=FOLDERS_MAX {
            fs::create_dir_all(top.join(number.to_string())).unwrap();
        }
        fs::write(top.join("4096/file"), b"x").unwrap();

        tree(&top).unwrap();

        assert!(!top.exists());
    }
}
