//! How a zygote learns which pages its first child has written before it was ready.
//!
//! The kernel shows a process's page map to itself, and to who has rights over all processes, which
//! a zygote does not.  So children pass theirs on, until the zygote has learned from one.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::error::Error;
use crate::sys::descriptors;
use crate::sys::pagemap::Pagemap;

/// A pair of sockets over which children pass page maps.  Neither end waits.
#[derive(Debug)]
pub(super) struct Lessons {
    zygote: UnixDatagram,
    children: UnixDatagram,
}

impl Lessons {
    pub(super) fn new() -> Result<Self, Error> {
        let failed = || Error::io("make a pair of sockets");
        let (zygote, children) = UnixDatagram::pair().map_err(failed())?;
        zygote.set_nonblocking(true).map_err(failed())?;
        children.set_nonblocking(true).map_err(failed())?;
        Ok(Self { zygote, children })
    }

    /// In a child: closes what is the zygote's alone, so that it takes nothing of other children.
    pub(super) fn close_in_child(&self) -> Result<(), Error> {
        descriptors::close_in_child(self.zygote.as_raw_fd())
    }

    /// In a child that is ready: passes its page map on, and closes its end.
    pub(super) fn teach(&self) -> Result<(), Error> {
        let pagemap = Pagemap::own()?;
        let passed = self.children.send_with_fd(&[0_u8][..], pagemap.as_raw_fd());
        // One that is not taken, since others came first, teaches nothing: another will.
        drop(passed.map_err(std::io::Error::from));
        descriptors::close_in_child(self.children.as_raw_fd())
    }

    /// In the zygote: the next page map that was passed on, or what a child pretends to be one.
    pub(super) fn next(&self) -> Option<Pagemap> {
        let (_, passed): (_, Option<File>) = self.zygote.recv_with_fd(&mut [0]).ok()?;
        passed.map(Pagemap::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into, wait};

    #[test]
    fn a_zygote_gets_the_page_map_of_its_child_and_not_its_own() {
        let lessons = Lessons::new().unwrap();
        assert!(lessons.next().is_none(), "nobody has taught yet, and nobody waits");
        let (gate, opener) = descriptors::pipe().unwrap();
        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            drop(opener);
            let taught = lessons.close_in_child().and_then(|()| lessons.teach());
            drop(std::io::Read::read(&mut &gate, &mut [0]));
            exit_now(i32::from(taught.is_err()));
        };

        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let pagemap = loop {
            if let Some(found) = lessons.next() {
                break found;
            }
            assert!(std::time::Instant::now() < deadline, "the child does not teach");
            std::thread::yield_now();
        };

        assert!(pagemap.lives().unwrap());
        drop(opener);
        assert_eq!(wait(pid).unwrap().1, 0);
        assert!(!pagemap.lives().unwrap(), "it is the child's");
    }
}
