//! User namespaces in which children of a zygote, and siblings of a branch, become users of their
//! own.
//!
//! A zygote makes one before it is jailed ([`make_for_zygote`]), which belongs to root and has the
//! users of it, of its children and of zygotes that are derived from it, and enters it
//! ([`enter_as_zygote`]).
//!
//! A seed has no right to make its siblings others.  It gets one in a user namespace that belongs
//! to its source's user and has only the numbers of its tree: the daemon has it made ([`make`]) and
//! hands it over, the seed enters it ([`enter`]).  So does a zygote that is derived: its namespace
//! belongs to the user of the zygote that it was forked of, and has a part of that one's users.  A
//! jailed process cannot make one by itself ([`super::namespaces`]), nor enter one of another user.
//!
//! ```text
//! forkd-vmm users ── enters the source's namespace, writes maps
//!        └─ becomes the source's user ── a namespace below ── sends it to the daemon
//! ```

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use forkd_proto::control::Event;
use serde_json::json;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::error::Error;
use crate::jail::{namespaces, rights};
use crate::sys::process::{self, Forked};
use crate::sys::{descriptors, handed, output};

const OWN: &str = "/proc/self/ns/user";
/// `linux/nsfs.h`, `NS_GET_PARENT`.
const PARENT: libc::c_ulong = 0xb702;
/// The kernel makes no namespace below one that has more than these above it (`create_user_ns`).
const LEVELS_MAX: u32 = 32;
/// Most runs of numbers that a map has (`UID_GID_MAP_MAX_EXTENTS`).
const EXTENTS_MAX: usize = 340;
/// What the kernel counts for the owner of a namespace as well: no limit of ours.
const COUNTED: [libc::__rlimit_resource_t; 4] =
    [libc::RLIMIT_NPROC, libc::RLIMIT_MEMLOCK, libc::RLIMIT_SIGPENDING, libc::RLIMIT_MSGQUEUE];

/// The number that root of the host has here.
static ROOT: AtomicU32 = AtomicU32::new(0);

/// The number that the daemon's user has in the namespace that this process is in: 0 in the host's,
/// in another that of all who are not in it.
#[must_use]
pub fn root() -> u32 {
    ROOT.load(Ordering::Relaxed)
}

/// Enters the user namespace that was handed over as `name`, with the rights there that having
/// children become others takes, and no way to more.
///
/// # Errors
///
/// [`Error::Invalid`] if there is none of that name, [`Error::Io`] naming what the kernel refused.
pub fn enter(name: &Path) -> Result<(), Error> {
    let problem = format!("{} was not handed over", name.display());
    let namespace = handed::take(name).ok_or(Error::Invalid { field: "users", problem })?;
    join(&namespace)?;
    // The map lacks its owner, as it lacks root: both have the number of all who are not in it.
    ROOT.store(process::own_uid(), Ordering::Relaxed);
    rights::become_keeper()
}

/// Makes a user namespace with these runs of users, of which the first and the number are given,
/// under the numbers that they have on the host; it is root's.  To be called by root, and with one
/// thread.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn make_for_zygote(users: &[(u32, u32)]) -> Result<File, Error> {
    let (ours, theirs) = UnixStream::pair().map_err(Error::io("make a pair of sockets"))?;
    let lines = users.iter().map(|(first, count)| format!("{first} {first} {count}\n"));
    let status = with_namespace(
        &lines.collect::<Vec<_>>().concat(),
        // There, as a zygote keeps its own limits.
        || COUNTED.into_iter().try_for_each(unlimit),
        || send(&theirs, &File::open(OWN).map_err(Error::io(OWN))?),
    )?;
    drop(theirs);
    let received = ours.recv_with_fd(&mut [0; 8]).ok().and_then(|(_, namespace)| namespace);
    let problem = || std::io::Error::other(format!("its maker ended (status {status:#x})"));
    received.ok_or_else(|| Error::io("make a user namespace for a zygote")(problem()))
}

/// Enters the namespace of a zygote's children as the user `uid`, with the rights there that having
/// children become others takes, and no way to more.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn enter_as_zygote(namespace: &File, uid: u32) -> Result<(), Error> {
    join(namespace)?;
    // Root is not in it, and has the number of all who are not.
    ROOT.store(process::own_uid(), Ordering::Relaxed);
    rights::become_uid(uid)?;
    // While there is still a right to it.
    namespaces::chroot()?;
    rights::give_up_ways()?;
    rights::become_keeper()
}

fn join(namespace: &File) -> Result<(), Error> {
    // SAFETY: a descriptor that is open, and a number.
    if unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWUSER) } < 0 {
        return Err(Error::last_os("enter a user namespace"));
    }
    Ok(())
}

/// Makes a user namespace of the user `uid`, below that of the process `source`, with the numbers
/// of `extents` (`FIRST:COUNT`) as they are, and sends it over standard input, a socket; or says
/// there that there are too many above it.
///
/// # Errors
///
/// [`Error::Invalid`] for what is no number, [`Error::Io`] naming what the kernel refused.
pub fn make(source: &str, uid: &str, extents: &[&str]) -> Result<(), Error> {
    let (source, uid, map) = (number(source)?, number(uid)?, map_of(extents)?);
    // SAFETY: standard input is open, and nothing else here uses it.
    let daemon = unsafe { UnixStream::from_raw_fd(libc::STDIN_FILENO) };
    let path = format!("/proc/{source}/ns/user");
    let above = File::open(&path).map_err(Error::io(format!("open {path}")))?;
    if levels(&above) > LEVELS_MAX {
        return say(&daemon, "deep");
    }
    COUNTED.into_iter().try_for_each(unlimit)?;
    if identity(&above)? != identity(&File::open(OWN).map_err(Error::io(OWN))?)? {
        join(&above)?;
    }
    let status = with_namespace(
        &map,
        || rights::become_owner(uid),
        || send(&daemon, &File::open(OWN).map_err(Error::io(OWN))?),
    )?;
    process::exit_now(i32::from(status != 0))
}

/// Has a process of its own do `first`, make a user namespace with this map, and then do `inside`.
/// Returns how it ended; what failed there is said to whoever reads our standard output.
fn with_namespace(
    map: &str,
    first: impl FnOnce() -> Result<(), Error>,
    inside: impl FnOnce() -> Result<(), Error>,
) -> Result<i32, Error> {
    let ((mut made, mut told), (mut gate, mut opener)) =
        (descriptors::pipe()?, descriptors::pipe()?);
    match process::fork_into(None)? {
        Forked::Child => {
            drop((made, opener));
            let done = first().and_then(|()| unshare()).and_then(|()| {
                told.write_all(&[1]).map_err(Error::io("tell of a user namespace"))?;
                // Without the maps there is nothing to do, and who was to write them says why.
                if gate.read_exact(&mut [0]).is_ok() { inside() } else { Ok(()) }
            });
            process::exit_now(i32::from(done.map_err(|error| tell(&error)).is_err()))
        }
        Forked::Parent(pid) => {
            drop((told, gate));
            // If there is none, the child has said why.
            if made.read_exact(&mut [0]).is_ok() {
                for name in ["uid_map", "gid_map"] {
                    let path = format!("/proc/{pid}/{name}");
                    fs::write(&path, map).map_err(Error::io(format!("write {path}")))?;
                }
                drop(opener.write_all(&[1]));
            }
            drop(opener);
            process::wait(pid).map(|(_, status)| status)
        }
    }
}

/// Says what failed, as a program does that ends.
fn tell(error: &Error) {
    let (code, message) = (error.code(), error.to_string());
    let failed = Event::Failed { id: None, stage: None, code, message, attempts: None };
    drop(output::say(json!(failed)));
}

fn unshare() -> Result<(), Error> {
    // SAFETY: changes which namespace this process, which has one thread, is in; no pointers.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    let setting = match error.raw_os_error() {
        Some(libc::ENOSPC) => "; see user.max_user_namespaces",
        Some(libc::EPERM | libc::EACCES) => {
            "; see kernel.unprivileged_userns_clone and \
             kernel.apparmor_restrict_unprivileged_userns"
        }
        _ => "",
    };
    Err(Error::io(format!("make a user namespace{setting}"))(error))
}

fn send(daemon: &UnixStream, namespace: &File) -> Result<(), Error> {
    let sent = daemon.send_with_fd(&b"{}"[..], namespace.as_raw_fd());
    let refused = |error: vmm_sys_util::errno::Error| std::io::Error::from(error);
    sent.map(drop).map_err(|error| Error::io("send a user namespace")(refused(error)))
}

fn say(mut daemon: &UnixStream, why: &str) -> Result<(), Error> {
    let said = json!({ "refused": why }).to_string();
    daemon.write_all(said.as_bytes()).map_err(Error::io("answer the daemon"))
}

/// How many namespaces are above one, as far as this process may see them.
fn levels(namespace: &File) -> u32 {
    let mut found = 0;
    let mut above = parent(namespace);
    while let Some(namespace) = above {
        found += 1;
        above = parent(&namespace);
    }
    found
}

fn parent(namespace: &File) -> Option<File> {
    // SAFETY: the request takes no argument, and opens a descriptor.
    let fd = unsafe { libc::ioctl(namespace.as_raw_fd(), PARENT) };
    // SAFETY: the kernel opened it for us just now, and nothing else knows its number.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
}

fn identity(namespace: &File) -> Result<u64, Error> {
    Ok(namespace.metadata().map_err(Error::io("look at a user namespace"))?.ino())
}

/// Raises a limit as far as this process may.
fn unlimit(what: libc::__rlimit_resource_t) -> Result<(), Error> {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is a valid structure that outlives the call.
    if unsafe { libc::setrlimit(what, &raw const limit) } == 0 {
        return Ok(());
    }
    // SAFETY: as above.
    let known = unsafe { libc::getrlimit(what, &raw mut limit) } == 0;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above.
    if !known || unsafe { libc::setrlimit(what, &raw const limit) } < 0 {
        return Err(Error::last_os("raise a limit"));
    }
    Ok(())
}

fn number(text: &str) -> Result<u32, Error> {
    let problem = format!("{text:?} is no number");
    text.parse().map_err(|_| Error::Invalid { field: "users", problem })
}

/// The lines of a map that leaves numbers as they are.
fn map_of(extents: &[&str]) -> Result<String, Error> {
    if extents.is_empty() || extents.len() > EXTENTS_MAX {
        let problem = format!("not 1 to {EXTENTS_MAX} extents");
        return Err(Error::Invalid { field: "users", problem });
    }
    let lines = extents.iter().map(|extent| {
        let (first, count) = extent.split_once(':').unwrap_or((extent, ""));
        let (first, count) = (number(first)?, number(count)?);
        if first == 0 {
            let problem = "root is nobody's".to_owned();
            return Err(Error::Invalid { field: "users", problem });
        }
        Ok(format!("{first} {first} {count}\n"))
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_leaves_numbers_as_they_are_and_never_has_root() {
        assert_eq!(map_of(&["7:2", "20:1"]).unwrap(), "7 7 2\n20 20 1\n");
        for wrong in [&["0:9"][..], &["7"], &["7:"], &["x:1"], &[]] {
            assert!(map_of(wrong).is_err(), "{wrong:?}");
        }
        assert!(map_of(&["7:1"; EXTENTS_MAX]).is_ok());
        assert!(map_of(&["7:1"; EXTENTS_MAX + 1]).is_err());
    }
}
