//! How much of a resource one process may use, unless the image's own programs say otherwise.
//!
//! A bare process 1 has the kernel's limits, which are far below what a container runtime or
//! systemd gives.  The agent raises its own before it starts anything, and what it starts inherits
//! them: `exec`, `eval`, the warm-up and the hooks.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::log;

/// Files that a process may have open before it asks for more: data libraries, bundlers and test
/// runners need thousands.  Closing as many in a loop, as old daemons do, takes milliseconds.
const OPEN_FILES: u64 = 65_536;

/// Files that it may ask for, as systemd has it.  Programs that close every descriptor up to here
/// would take minutes with the most that a kernel can have.
const OPEN_FILES_MAX: u64 = 524_288;

/// Bytes that a process may lock into memory, as systemd has it; the kernel's before 5.16 is 64
/// KiB.
const LOCKED_BYTES: u64 = 8 << 20;

/// Raises the limits of this process.  What is higher already stays.
pub fn raise() {
    for (resource, soft, hard) in [
        (Resource::Nofile, OPEN_FILES, OPEN_FILES_MAX),
        (Resource::Memlock, LOCKED_BYTES, LOCKED_BYTES),
    ] {
        if let Err(error) = at_least(resource, soft, hard) {
            log::line(&format!("limit of {resource:?}: {error}"));
        }
    }
}

fn at_least(resource: Resource, soft: u64, hard: u64) -> io::Result<()> {
    let now = getrlimit(resource);
    let wanted = Rlimit { current: higher(now.current, soft), maximum: higher(now.maximum, hard) };
    Ok(setrlimit(resource, wanted)?)
}

/// The higher limit; `None` is none.
fn higher(now: Option<u64>, least: u64) -> Option<u64> {
    now.map(|limit| limit.max(least))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        assert_eq!(higher(Some(1024), OPEN_FILES), Some(OPEN_FILES));
        assert_eq!(higher(Some(1 << 20), OPEN_FILES), Some(1 << 20));
        assert_eq!(higher(None, OPEN_FILES), None);
    }
}
