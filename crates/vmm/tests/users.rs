//! A seed in the jail of machines, under their filter, has a child become another user.
//!
//! One test, by itself: what is forked here allocates, so no other thread may be at it.

#![expect(clippy::unwrap_used, reason = "a helper of a test that panics is a test that fails")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use forkd_vmm::jail::filter::{self, Role};
use forkd_vmm::jail::namespaces::{self, Seen};
use forkd_vmm::jail::{rights, users};
use forkd_vmm::sys::handed::{self, Keep};
use forkd_vmm::sys::process::{self, Forked, exit_now};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// What a process that a signal ended is said to have ended with.
const KILLED: i32 = 99;
const GROUP: u32 = 1_879_048_192;
const SOURCE: u32 = GROUP + 7;
const SIBLING: u32 = GROUP + 4_000_000;

/// How a process ended that does `what`, whose steps have numbers.
fn status_of(what: impl FnOnce() -> i32) -> i32 {
    match process::fork_into(None).unwrap() {
        Forked::Child => exit_now(what()),
        Forked::Parent(pid) => {
            let (_, status) = process::wait(pid).unwrap();
            if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { KILLED }
        }
    }
}

fn made_for(uid: u32) -> File {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let status = status_of(|| {
        // SAFETY: both descriptors are open, and the test has no use for standard input.
        unsafe { libc::dup2(theirs.as_raw_fd(), libc::STDIN_FILENO) };
        let range = format!("{SIBLING}:8");
        let source = std::process::id().to_string();
        i32::from(users::make(&source, &uid.to_string(), &[&range]).is_err())
    });
    assert_eq!(status, 0);
    ours.recv_with_fd(&mut [0; 64]).unwrap().1.unwrap()
}

fn sibling(seed: u32) -> i32 {
    if rights::become_user(SIBLING).is_err() {
        return 21;
    }
    if process::own_uid() != SIBLING {
        return 22;
    }
    // SAFETY: the kernel only looks whether a signal could be sent.
    let signalled = unsafe { libc::kill(seed.cast_signed(), libc::SIGKILL) };
    if signalled == 0 { 23 } else { 0 }
}

fn seed(folder: &Path) -> i32 {
    let jailed = namespaces::enter(&[Seen { path: folder, writable: true }], folder, None)
        .and_then(|()| namespaces::chroot())
        .and_then(|()| rights::give_up(GROUP))
        .and_then(|()| rights::become_user(SOURCE))
        .and_then(|()| filter::put_on(Role::Process));
    if jailed.is_err() {
        return 11;
    }
    if users::root() != 0 || users::enter(Path::new("unknown")).is_ok() {
        return 12;
    }
    if users::enter(Path::new("users")).is_err() {
        return 13;
    }
    if users::root() == 0 || handed::has(Path::new("users")) || !rights::is_hidden() {
        return 14;
    }
    let own = std::process::id();
    status_of(|| sibling(own))
}

#[test]
fn a_seed_has_a_child_become_a_user_that_cannot_signal_it() {
    if process::own_uid() != 0 {
        return;
    }
    let folder = std::env::temp_dir().join(format!("forkd-users-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    handed::put(Path::new("users"), Keep::Lent, made_for(SOURCE));

    assert_eq!(status_of(|| seed(&folder)), 0);

    // Of another user's the seed cannot make use.
    handed::put(Path::new("users"), Keep::Lent, made_for(SOURCE + 1));
    assert_eq!(status_of(|| seed(&folder)), 13);
    std::fs::remove_dir(folder).unwrap();
}
