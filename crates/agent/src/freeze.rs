//! `freeze`: writes the root file system out, and lets nobody write to it any more.
//!
//! What is on the disk then is all that the guest has written, at one moment.  There is no way
//! back: it is for forks whose disk is to be read and that end thereafter.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Freezes the root file system.  May take as long as the disk does.
///
/// # Errors
///
/// It cannot be frozen: it is held in memory, or frozen already.
pub fn root() -> io::Result<()> {
    ioctl::freeze(&File::open("/")?)
}

#[expect(unsafe_code, reason = "an ioctl without a safe wrapper anywhere; see ADR 0012")]
mod ioctl {
    use super::{AsRawFd, File, io};

    nix::ioctl_none_bad!(fi_freeze, nix::request_code_readwrite!(b'X', 119, 4));

    pub(super) fn freeze(root: &File) -> io::Result<()> {
        // SAFETY: the descriptor is open for as long as `root` is borrowed; the kernel does not
        // look at the argument.
        unsafe { fi_freeze(root.as_raw_fd()) }?;
        Ok(())
    }
}
