//! Without descriptors a listening socket waits, and wakes nobody.
//!
//! In a program of its own, since the limit is the process's.

use std::fs::File;
use std::os::unix::net::UnixStream;

use forkd_vmm::sys::listener::{Listener, RETRY};
use vmm_sys_util::epoll::{Epoll, EpollEvent};

#[test]
fn a_client_for_whom_there_is_no_descriptor_is_accepted_later_and_wakes_nobody_until_then() {
    let path = std::env::temp_dir().join(format!("forkd-descriptors-{}", std::process::id()));
    let epoll = Epoll::new().unwrap();
    let mut listener = Listener::bind(&path).unwrap();
    listener.watch(&epoll, 7).unwrap();
    let client = UnixStream::connect(&path).unwrap();
    let limit = libc::rlimit { rlim_cur: 64, rlim_max: 64 };
    // SAFETY: `limit` is initialised and outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
    let mut hoard: Vec<File> =
        std::iter::from_fn(|| File::open("/dev/null").ok()).take(64).collect();
    let mut events = [EpollEvent::default(); 4];
    let mut woken = || epoll.wait(0, &mut events).unwrap();
    assert_eq!(woken(), 1, "for the client");

    assert!(listener.accept(true).is_none());
    assert_eq!((listener.retry(), woken()), (Some(RETRY), 0));
    hoard.pop();
    let accepted = listener.accept(true);

    assert!(accepted.is_some() && !listener.is_waiting());
    drop((client, hoard));
    listener.unlink();
}
