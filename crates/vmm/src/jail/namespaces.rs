//! A root of its own, with nothing in it but a few folders; no network, no name, no IPC.
//!
//! The folders are where they are on the host, so that paths mean the same on both sides.  All else
//! is a file system in memory that nobody can write to, and a `/proc` that shows a process itself.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr;

use crate::error::Error;
use crate::jail::landlock::{self, Place, Rule};
use crate::jail::trees::{self, Taken};
use crate::sys::handed::{self, Keep};

/// Those of the host that a machine leaves.
pub(super) const NAMESPACES: libc::c_int =
    libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
/// Of everything that is mounted: no programs, no devices.
pub(super) const HARMLESS: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
pub(super) const ROOT_OPTIONS: &str = "mode=0755,size=1m,nr_inodes=1k";
/// A process sees itself, and nothing of the system.
const PROC_OPTIONS: &str = "hidepid=ptraceable,subset=pid";
/// The folder of the new root that becomes the root in the end.
pub(super) const INNER: &str = "jail";
const INNER_PATH: &std::ffi::CStr = c"/jail";
const PROC: &str = "/proc";
/// The name that a jailed process finds its host to have.
const HOST: &str = "forkd-jail";

/// A folder of the host's that a jailed process sees.
#[derive(Clone, Copy, Debug)]
pub struct Seen<'a> {
    /// Where it is, on both sides.
    pub path: &'a Path,
    /// Whether its mount lets anybody write there.
    pub writable: bool,
}

/// Leaves the host's namespaces for ones in which there are `folders` and nothing else.  `spare` is
/// a folder in which nothing is needed until then; of `cgroups` a zygote keeps a descriptor.  To be
/// followed by [`chroot`].
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn enter(folders: &[Seen], spare: &Path, cgroups: Option<&Path>) -> Result<(), Error> {
    leave(NAMESPACES, "unshare mount, network, IPC and UTS namespaces")?;
    cgroups.map_or(Ok(()), hold)?;
    // By descriptor, since what is mounted over `spare` may hide them; in the new namespace, since
    // only what is mounted in one can be mounted there again.
    let opened = folders.iter().map(|seen| open_path(seen.path)).collect::<Result<Vec<_>, _>>()?;
    mount(Some(Path::new("forkd")), spare, Some("tmpfs"), HARMLESS, ROOT_OPTIONS)?;
    let inner = spare.join(INNER);
    let below = |path: &Path| inner.join(path.strip_prefix("/").unwrap_or(path));
    for (seen, file) in folders.iter().zip(&opened) {
        let (source, target) = (descriptor_path(file), below(seen.path));
        make_folder(&target)?;
        mount(Some(&source), &target, None, libc::MS_BIND, "")?;
        let reading = if seen.writable { 0 } else { libc::MS_RDONLY };
        mount(None, &target, None, libc::MS_REMOUNT | libc::MS_BIND | HARMLESS | reading, "")?;
    }
    let proc = below(Path::new(PROC));
    make_folder(&proc)?;
    mount(Some(Path::new("proc")), &proc, Some("proc"), HARMLESS, PROC_OPTIONS)?;
    drop(opened);
    enter_root(spare)
}

/// Keeps a descriptor of the cgroups below a folder, for a zygote, which its children do not have.
///
/// It is of a mount of its own that is mounted nowhere: nothing is above it, and nothing in it can
/// be written to.  Having a process born in a group writes nothing.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub(super) fn hold(cgroups: &Path) -> Result<(), Error> {
    let Taken::Folder(tree) = trees::take(cgroups, false)? else {
        let problem = format!("{} is no folder", cgroups.display());
        return Err(Error::Invalid { field: "jail", problem });
    };
    handed::put(cgroups, Keep::Zygote, tree);
    Ok(())
}

/// Has nothing be opened but in `folders`, in `/proc`, and among the `cgroups` that are held.
/// Returns whether signals are kept inside.
///
/// # Errors
///
/// As of [`landlock::restrict`].
pub(super) fn wall_in(folders: &[Seen], cgroups: Option<&Path>) -> Result<bool, Error> {
    let mut rules: Vec<Rule> = folders
        .iter()
        .map(|seen| Rule { folder: Place::Path(seen.path), writable: seen.writable })
        .collect();
    if !folders.is_empty() {
        rules.push(Rule { folder: Place::Path(Path::new(PROC)), writable: false });
    }
    let held = cgroups.and_then(handed::number);
    rules.extend(held.map(|fd| Rule { folder: Place::Open(fd), writable: false }));
    landlock::restrict(&rules)
}

/// Leaves these namespaces of the host, mounts and the name among them; what is mounted from then
/// on is this process's alone.
pub(super) fn leave(namespaces: libc::c_int, doing: &str) -> Result<(), Error> {
    let root = Path::new("/");
    std::env::set_current_dir(root).map_err(Error::io("change to the root folder"))?;
    unshare(namespaces, doing)?;
    rename_host()?;
    mount(None, root, None, libc::MS_REC | libc::MS_PRIVATE, "")
}

pub(super) fn unshare(namespaces: libc::c_int, doing: &str) -> Result<(), Error> {
    // SAFETY: changes what this process, which has one thread, sees; takes no pointers.
    if unsafe { libc::unshare(namespaces) } < 0 {
        return Err(Error::last_os(doing));
    }
    Ok(())
}

/// Makes `root` the root, for reading only, and lets go of the old one.
pub(super) fn enter_root(root: &Path) -> Result<(), Error> {
    pivot(root)?;
    let read_only = libc::MS_REMOUNT | libc::MS_BIND | libc::MS_RDONLY | HARMLESS;
    mount(None, Path::new("/"), None, read_only, "")
}

/// Makes a folder of the root the root: whoever is there can make no user namespace, in which he
/// would have every right again (`current_chrooted` in the kernel's `fs/namespace.c`).
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn chroot() -> Result<(), Error> {
    // SAFETY: the path is a constant that ends in NUL.
    if unsafe { libc::chroot(INNER_PATH.as_ptr()) } < 0 {
        return Err(Error::last_os("chroot"));
    }
    std::env::set_current_dir("/").map_err(Error::io("change to the root of the jail"))
}

fn open_path(path: &Path) -> Result<File, Error> {
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    opened.map_err(Error::io(format!("open the folder {}", path.display())))
}

fn descriptor_path(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

pub(super) fn make_folder(path: &Path) -> Result<(), Error> {
    // Machines pass through them, whatever our own umask.
    // SAFETY: sets a number of this process, which has one thread.
    let before = unsafe { libc::umask(0o022) };
    let made = std::fs::create_dir_all(path);
    // SAFETY: as above.
    unsafe { libc::umask(before) };
    made.map_err(Error::io(format!("make {} in the jail", path.display())))
}

fn rename_host() -> Result<(), Error> {
    // SAFETY: pointer and length are those of the name.
    if unsafe { libc::sethostname(HOST.as_ptr().cast(), HOST.len()) } < 0 {
        return Err(Error::last_os("name the jail"));
    }
    Ok(())
}

fn pivot(root: &Path) -> Result<(), Error> {
    std::env::set_current_dir(root).map_err(Error::io("change to the root of the jail"))?;
    // SAFETY: both paths are constants that end in NUL.
    if unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) } < 0 {
        return Err(Error::last_os("pivot_root"));
    }
    // The old root lies over the new one now.
    // SAFETY: the path is a constant that ends in NUL.
    if unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) } < 0 {
        return Err(Error::last_os("unmount the host's root"));
    }
    std::env::set_current_dir("/").map_err(Error::io("change to the root of the jail"))
}

pub(super) fn mount(
    source: Option<&Path>,
    target: &Path,
    kind: Option<&str>,
    flags: libc::c_ulong,
    options: &str,
) -> Result<(), Error> {
    let what = || format!("mount {} in the jail", target.display());
    let text = |bytes: &[u8]| {
        CString::new(bytes).map_err(|_| Error::Invalid {
            field: "jail",
            problem: "a path has a NUL in it".to_owned(),
        })
    };
    let source = source.map(|path| text(path.as_os_str().as_bytes())).transpose()?;
    let kind = kind.map(|kind| text(kind.as_bytes())).transpose()?;
    let (place, options) = (text(target.as_os_str().as_bytes())?, text(options.as_bytes())?);
    let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
    // SAFETY: all are NUL-terminated, or null where the kernel takes that, and outlive the call.
    let mounted = unsafe {
        libc::mount(
            pointer(&source),
            place.as_ptr(),
            pointer(&kind),
            flags,
            options.as_ptr().cast(),
        )
    };
    if mounted < 0 { Err(Error::last_os(what())) } else { Ok(()) }
}
