//! Parts of the host's files, taken up where they are and put down in a cell at the same path.
//!
//! With the mount calls of Linux 5.12: what is taken up is a private copy, so what is mounted over
//! its path afterwards hides nothing of it, and a whole tree of mounts becomes read-only at once.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::jail::namespaces::make_folder;

/// `linux/mount.h` and `linux/fcntl.h`.
const OPEN_TREE_CLONE: libc::c_uint = 1;
const MOVE_MOUNT_F_EMPTY_PATH: libc::c_uint = 4;
const AT_RECURSIVE: libc::c_uint = 0x8000;
const ATTR_READ_ONLY: u64 = 1;
const ATTR_NO_SETUID: u64 = 2;
const ATTR_NO_DEVICES: u64 = 4;
const ATTR_NO_PROGRAMS: u64 = 8;

/// `struct mount_attr`.
#[repr(C)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    userns: u64,
}

/// What there is at a path of the host.
#[derive(Debug)]
pub enum Taken {
    /// Nothing.
    Missing,
    /// A link, and where it leads.
    Link(PathBuf),
    /// A file or a device.
    File(File),
    /// A folder, with all that is mounted below it.
    Folder(File),
}

/// Takes up what is at `path`, which may be written to or not.
///
/// A link stays one if it is in the host's root; others are followed.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn take(path: &Path, writable: bool) -> Result<Taken, Error> {
    let found = match path.symlink_metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Taken::Missing),
        Err(error) => return Err(Error::io(format!("look at {}", path.display()))(error)),
    };
    if found.is_symlink() {
        if path.parent() == Some(Path::new("/")) {
            let target = std::fs::read_link(path);
            return target.map(Taken::Link).map_err(Error::io(format!("read {}", path.display())));
        }
        return match path.canonicalize() {
            Ok(real) => take(&real, writable),
            Err(_) => Ok(Taken::Missing),
        };
    }
    let tree = open_tree(path)?;
    let device = if found.file_type().is_char_device() { 0 } else { ATTR_NO_DEVICES };
    let read_only = if writable { 0 } else { ATTR_READ_ONLY };
    change(&tree, device | read_only | ATTR_NO_SETUID)?;
    Ok(if found.is_dir() { Taken::Folder(tree) } else { Taken::File(tree) })
}

/// Puts what was taken up down at `path`, making what leads there.
///
/// # Errors
///
/// As [`take`].
pub fn put(taken: &Taken, path: &Path) -> Result<(), Error> {
    let failed = || Error::io(format!("make {} in the cell", path.display()));
    let above = path.parent().unwrap_or(Path::new("/"));
    match taken {
        Taken::Missing => Ok(()),
        Taken::Link(target) => symlink(target, path).map_err(failed()),
        Taken::Folder(tree) => {
            make_folder(path)?;
            put_down(tree, path)
        }
        Taken::File(tree) => {
            make_folder(above)?;
            if !path.exists() {
                File::create(path).map_err(failed())?;
            }
            put_down(tree, path)
        }
    }
}

fn open_tree(path: &Path) -> Result<File, Error> {
    let name = named(path)?;
    let flags = OPEN_TREE_CLONE | AT_RECURSIVE | libc::O_CLOEXEC.unsigned_abs();
    // SAFETY: the path ends in NUL and outlives the call.
    let tree = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, name.as_ptr(), flags) };
    let Ok(tree @ 0..) = i32::try_from(tree) else {
        return Err(Error::last_os(format!("take {} into a cell", path.display())));
    };
    // SAFETY: the call has just opened it, for us alone.
    Ok(unsafe { File::from_raw_fd(tree) })
}

/// Has nothing of a tree be executed.
///
/// # Errors
///
/// As [`take`].
pub fn forbid_programs(tree: &File) -> Result<(), Error> {
    change(tree, ATTR_NO_PROGRAMS)
}

fn change(tree: &File, set: u64) -> Result<(), Error> {
    // Nothing that is mounted on the host later appears in the cell.
    let propagation = libc::MS_PRIVATE;
    let attributes = Attributes { set, clear: 0, propagation, userns: 0 };
    // SAFETY: the path is a constant that ends in NUL; structure and length are each other's.
    let changed = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            AT_RECURSIVE | libc::AT_EMPTY_PATH.unsigned_abs(),
            &raw const attributes,
            std::mem::size_of::<Attributes>(),
        )
    };
    if changed < 0 { Err(Error::last_os("restrict a tree of mounts")) } else { Ok(()) }
}

fn put_down(tree: &File, path: &Path) -> Result<(), Error> {
    let name = named(path)?;
    // SAFETY: both paths end in NUL and outlive the call.
    let moved = unsafe {
        libc::syscall(
            libc::SYS_move_mount,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_FDCWD,
            name.as_ptr(),
            MOVE_MOUNT_F_EMPTY_PATH,
        )
    };
    let what = || format!("mount {} in the cell", path.display());
    if moved < 0 { Err(Error::last_os(what())) } else { Ok(()) }
}

fn named(path: &Path) -> Result<std::ffi::CString, Error> {
    std::ffi::CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid { field: "cell", problem: "a path has a NUL in it".to_owned() })
}
