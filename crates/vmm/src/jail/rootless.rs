//! The jail of a user without privileges: what he has a right to take from himself.
//!
//! In a user namespace of its own a process has every right over namespaces that it makes, and none
//! over the host.  It maps one user, its own, as root inside, for the sake of `/proc`: files of a
//! process that hides are root's of the namespace that it was executed in, so a machine can read
//! its own, its zygote those of its children, and the daemon all of them.  That is why the process
//! executes itself once more inside.
//!
//! Beside what [`super::namespaces`] gives to a process of root's, two things differ.  `/proc` is
//! the host's, for reading only, as mounting another takes a pid namespace; and machines stay one
//! user, so that it is [`super::landlock`] alone that keeps their signals among the forks of one
//! snapshot.

use std::convert::Infallible;
use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;
use crate::jail::namespaces::{self, HARMLESS, NAMESPACES, ROOT_OPTIONS, Seen};
use crate::jail::rights;
use crate::jail::trees::{self, Taken};
use crate::sys::process;

const PROC: &str = "/proc";
const OWN_PROGRAM: &str = "/proc/self/exe";
const UID_MAP: &str = "/proc/self/uid_map";
const GID_MAP: &str = "/proc/self/gid_map";
/// Whether groups can be given up, which could open what is closed to one of them.
const SETGROUPS: &str = "/proc/self/setgroups";

/// Whether this process, or the one that it was forked of, is jailed in this way.
static INSIDE: AtomicBool = AtomicBool::new(false);

/// Whether this process is jailed in this way.
#[must_use]
pub fn is_inside() -> bool {
    INSIDE.load(Ordering::Relaxed)
}

/// Returns in a user namespace of one user, as its root.  To be called before anything is opened:
/// outside of one, this program is executed again.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused; [`Error::Invalid`] if this is the host's root.
pub fn go_inside() -> Result<(), Error> {
    let map = std::fs::read_to_string(UID_MAP).map_err(Error::io(format!("read {UID_MAP}")))?;
    if is_of_one(&map) && process::own_uid() == 0 {
        return Ok(());
    }
    let (uid, gid) = (process::own_uid(), process::own_gid());
    if uid == 0 {
        let problem = "root's machines are users of their own".to_owned();
        return Err(Error::Invalid { field: "jail", problem });
    }
    namespaces::unshare(libc::CLONE_NEWUSER, "make a user namespace without being root")?;
    let write = |path: &str, text: String| {
        std::fs::write(path, text).map_err(Error::io(format!("write {path}")))
    };
    write(SETGROUPS, "deny".to_owned())?;
    write(GID_MAP, format!("0 {gid} 1\n"))?;
    write(UID_MAP, format!("0 {uid} 1\n"))?;
    execute_again().map(|never| match never {})
}

/// Leaves all else of the host but `folders`, without any right.  `spare` is a folder in which
/// nothing is needed until then; of `cgroups` a zygote keeps a descriptor.  Returns whether its
/// signals stay inside.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn enter(folders: &[Seen], spare: &Path, cgroups: Option<&Path>) -> Result<bool, Error> {
    let doing = "make mount, network, IPC and UTS namespaces without being root";
    namespaces::leave(NAMESPACES, doing)?;
    cgroups.map_or(Ok(()), namespaces::hold)?;
    // First, since what is mounted over `spare` may hide them.
    let proc = Seen { path: Path::new(PROC), writable: false };
    let proc = (!folders.is_empty()).then_some(&proc);
    let taken: Vec<(&Path, Taken)> = folders
        .iter()
        .chain(proc)
        .map(|seen| Ok((seen.path, take(seen.path, seen.writable)?)))
        .collect::<Result<_, Error>>()?;
    namespaces::mount(Some(Path::new("forkd")), spare, Some("tmpfs"), HARMLESS, ROOT_OPTIONS)?;
    let inner = spare.join(namespaces::INNER);
    namespaces::make_folder(&inner)?;
    for (path, tree) in &taken {
        trees::put(tree, &inner.join(path.strip_prefix("/").unwrap_or(path)))?;
    }
    drop(taken);
    namespaces::enter_root(spare)?;
    namespaces::chroot()?;
    rights::give_up_all()?;
    INSIDE.store(true, Ordering::Relaxed);
    namespaces::wall_in(folders, cgroups)
}

fn take(path: &Path, writable: bool) -> Result<Taken, Error> {
    let Taken::Folder(tree) = trees::take(path, writable)? else {
        let problem = format!("{} is no folder", path.display());
        return Err(Error::Invalid { field: "jail", problem });
    };
    trees::forbid_programs(&tree)?;
    Ok(Taken::Folder(tree))
}

/// Whether a map is of one user, who is not the host's root.
fn is_of_one(map: &str) -> bool {
    let words: Vec<&str> = map.split_whitespace().collect();
    matches!(words.as_slice(), ["0", outside, "1"] if *outside != "0")
}

fn execute_again() -> Result<Infallible, Error> {
    let text = |bytes: Vec<u8>| {
        let problem = "a word has a NUL in it".to_owned();
        CString::new(bytes).map_err(|_| Error::Invalid { field: "arguments", problem })
    };
    let words = std::env::args_os().map(|word| text(word.into_vec()));
    let words = words.collect::<Result<Vec<_>, _>>()?;
    let program = text(OWN_PROGRAM.as_bytes().to_vec())?;
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: the words end in NUL, their list in a null pointer, and all outlive the call.
    unsafe { libc::execv(program.as_ptr(), pointers.as_ptr()) };
    Err(Error::last_os("execute this program again in a user namespace"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_of_one_user_only_if_it_has_one_and_that_is_not_the_hosts_root() {
        assert!(is_of_one("         0       1000          1\n"));
        assert!(!is_of_one("         0          0 4294967295\n"), "the host's own");
        assert!(!is_of_one("         0          0          1\n"), "the host's root");
        assert!(!is_of_one("0 1000 1\n1 100000 65536\n"), "more than one");
        assert!(!is_of_one("1000 1000 1\n"), "no root inside");
        assert!(!is_of_one(""));
    }
}
