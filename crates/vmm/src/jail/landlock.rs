//! The wall behind the mounts of a jail: a ruleset of Landlock's over the folders in it.
//!
//! A process in a Landlock domain opens nothing but what the rules are of, by whatever path or
//! descriptor it is reached, and neither traces nor looks into a process that is in another domain
//! or in none.  From Linux 6.12 on it signals none of these either.  Whatever it forks stays in the
//! domain.  See the kernel's Documentation/userspace-api/landlock.rst.
//!
//! A kernel without Landlock has no such wall, which is no error: namespaces, users and mounts are
//! the jail, and this one stands behind them.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::Error;

/// `linux/landlock.h`.
const VERSION: libc::c_uint = 1;
const RULE_PATH_BENEATH: libc::c_int = 1;
const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const REMOVE_DIR: u64 = 1 << 4;
const REMOVE_FILE: u64 = 1 << 5;
const MAKE_CHAR: u64 = 1 << 6;
const MAKE_DIR: u64 = 1 << 7;
const MAKE_REG: u64 = 1 << 8;
const MAKE_SOCK: u64 = 1 << 9;
const MAKE_FIFO: u64 = 1 << 10;
const MAKE_BLOCK: u64 = 1 << 11;
const MAKE_SYM: u64 = 1 << 12;
/// Since the second version, and the third.
const REFER: u64 = 1 << 13;
const TRUNCATE: u64 = 1 << 14;
/// Since the sixth: neither connects by an abstract name to who is outside, nor signals them.
const SCOPES: u64 = 1 | 1 << 1;
const SCOPED_FROM: libc::c_long = 6;

const FIRST: u64 = EXECUTE
    | READ
    | MAKE_CHAR
    | MAKE_DIR
    | MAKE_REG
    | MAKE_SOCK
    | MAKE_FIFO
    | MAKE_BLOCK
    | MAKE_SYM
    | WRITE_FILE
    | REMOVE_DIR
    | REMOVE_FILE;
const READ: u64 = READ_FILE | READ_DIR;
/// What machines, zygotes and seeds do in folders that they may write to.
const WRITE: u64 = READ | WRITE_FILE | REMOVE_FILE | MAKE_REG | MAKE_SOCK | TRUNCATE;

/// `struct landlock_ruleset_attr`.
#[repr(C)]
struct Ruleset {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

/// `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct Beneath {
    allowed_access: u64,
    parent_fd: i32,
}

/// A folder in which a process keeps what it may do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule<'a> {
    pub(super) folder: Place<'a>,
    pub(super) writable: bool,
}

/// Where a folder is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place<'a> {
    Path(&'a Path),
    Open(RawFd),
}

/// Keeps this process, and all that it forks, to these folders and to each other; returns whether
/// signals are kept as well.  To be called once new privileges are given up.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused that has Landlock.
pub(super) fn restrict(rules: &[Rule]) -> Result<bool, Error> {
    let version = version();
    if version < 1 {
        return Ok(false);
    }
    let handled = handled(version);
    let scoped = if version >= SCOPED_FROM { SCOPES } else { 0 };
    let ruleset = Ruleset { handled_access_fs: handled, handled_access_net: 0, scoped };
    let size = std::mem::size_of::<Ruleset>();
    // SAFETY: structure and length are each other's, and it outlives the call.
    let made =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, &raw const ruleset, size, 0) };
    let Ok(made @ 0..) = i32::try_from(made) else {
        return Err(Error::last_os("make a ruleset of Landlock's"));
    };
    // SAFETY: the call has just opened it, for us alone.
    let made = unsafe { File::from_raw_fd(made) };
    rules.iter().try_for_each(|rule| add(&made, rule, handled))?;
    // SAFETY: takes no pointers.
    if unsafe { libc::syscall(libc::SYS_landlock_restrict_self, made.as_raw_fd(), 0) } < 0 {
        return Err(Error::last_os("enter a domain of Landlock's"));
    }
    Ok(scoped != 0)
}

/// Which version of Landlock the kernel has: negative for none.
pub(super) fn version() -> libc::c_long {
    let nothing = std::ptr::null::<Ruleset>();
    // SAFETY: with this flag it takes no structure.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0, VERSION) }
}

/// What is refused where no rule allows it.
fn handled(version: libc::c_long) -> u64 {
    let since_second = if version >= 2 { REFER } else { 0 };
    let since_third = if version >= 3 { TRUNCATE } else { 0 };
    FIRST | since_second | since_third
}

fn add(ruleset: &File, rule: &Rule, handled: u64) -> Result<(), Error> {
    let opened;
    let parent_fd = match rule.folder {
        Place::Open(fd) => fd,
        Place::Path(path) => {
            let flags = libc::O_PATH | libc::O_DIRECTORY;
            let found = File::options().read(true).custom_flags(flags).open(path);
            opened = found.map_err(Error::io(format!("open the folder {}", path.display())))?;
            opened.as_raw_fd()
        }
    };
    let allowed_access = handled & if rule.writable { WRITE } else { READ };
    let beneath = Beneath { allowed_access, parent_fd };
    // SAFETY: the structure is of that kind of rule, and outlives the call.
    let added = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            RULE_PATH_BENEATH,
            &raw const beneath,
            0,
        )
    };
    if added < 0 { Err(Error::last_os("add a rule of Landlock's")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jail::rights;
    use crate::sys::process::{Forked, exit_now, fork_into, wait};

    /// How a process ended that does `what` in a domain.
    fn ended(rules: &[Rule], what: impl FnOnce() -> i32) -> i32 {
        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            rights::set(libc::PR_SET_NO_NEW_PRIVS, 1, "").unwrap_or_else(|_| exit_now(1));
            restrict(rules).unwrap_or_else(|_| exit_now(2));
            exit_now(what());
        };
        libc::WEXITSTATUS(wait(pid).unwrap().1)
    }

    /// 0, or what the kernel had against opening a file.  Allocates nothing.
    fn opened(path: &std::ffi::CStr, flags: i32) -> i32 {
        // SAFETY: the path ends in NUL and outlives the call.
        let fd = unsafe { libc::open(path.as_ptr(), flags, 0o600) };
        if fd >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
    }

    /// 0, or what the kernel had against saying where a link leads.
    fn led(path: &std::ffi::CStr) -> i32 {
        let mut target = [0_u8; 64];
        // SAFETY: the path ends in NUL; pointer and length are those of `target`.
        let length =
            unsafe { libc::readlink(path.as_ptr(), target.as_mut_ptr().cast(), target.len()) };
        if length >= 0 { 0 } else { std::io::Error::last_os_error().raw_os_error().unwrap_or(-1) }
    }

    #[test]
    fn who_is_in_a_domain_opens_what_there_are_rules_for_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("forkd-landlock-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let text = |path: &Path| std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        let (inside, new) = (text(&folder.join("file")), text(&folder.join("new")));
        std::fs::write(folder.join("file"), "x").unwrap();
        let rule = |writable| Rule { folder: Place::Path(&folder), writable };
        let make = libc::O_CREAT | libc::O_WRONLY;

        let refused = if version() < 1 { 0 } else { libc::EACCES };
        assert_eq!(ended(&[rule(true)], || opened(&inside, libc::O_RDWR)), 0);
        assert_eq!(ended(&[rule(true)], || opened(&new, make)), 0);
        assert_eq!(ended(&[rule(false)], || opened(&inside, libc::O_RDONLY)), 0);
        assert_eq!(ended(&[rule(false)], || opened(&inside, libc::O_RDWR)), refused);
        assert_eq!(ended(&[rule(true)], || opened(c"/etc/passwd", libc::O_RDONLY)), refused);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn who_is_in_a_domain_does_not_look_into_processes_outside_of_it() {
        let outside = std::ffi::CString::new(format!("/proc/{}/root", std::process::id()));
        let (outside, proc) = (outside.unwrap(), Path::new("/proc"));
        let rules = [Rule { folder: Place::Path(proc), writable: false }];

        assert_eq!(led(&outside), 0);
        let refused = if version() < 1 { 0 } else { libc::EACCES };
        assert_eq!(ended(&rules, || led(&outside)), refused);
        assert_eq!(ended(&rules, || led(c"/proc/self/root")), 0);
    }

    #[test]
    fn who_keeps_its_signals_reaches_itself_and_nobody_outside() {
        let (parent, version) = (std::process::id(), version());
        let refused = ended(&[], || {
            // SAFETY: 0 only asks whether there could be a signal; no pointers.
            let outside = unsafe { libc::kill(parent.cast_signed(), 0) };
            // SAFETY: as above.
            let itself = unsafe { libc::kill(std::process::id().cast_signed(), 0) };
            if itself < 0 { 9 } else { i32::from(outside < 0) }
        });

        assert_eq!(refused, i32::from(version >= SCOPED_FROM));
    }
}
