//! `quiesce`: makes the guest small and cheap to fork.
//!
//! Dirty pages are written out, so that the snapshot's disk layer is complete; clean caches are
//! dropped, so that its memory is small; memory is compacted, so that huge pages can back it.  Then
//! a shell runs once: what any `exec` in a child will need (the loader, the C library, directory
//! entries) is then shared in the snapshot's memory, instead of being read from the disk by every
//! child.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use forkd_proto::guest::{Env, QuiesceReply};
use nix::unistd::Pid;

use crate::child::Process;
use crate::fork::{has_hook, needs_generation};
use crate::image::Defaults;
use crate::log;
use crate::spawn::{Launch, Launcher, Standard};

/// How long the rehearsal may take; it is for speed only, and given up without an error.
const REHEARSAL_TIMEOUT: Duration = Duration::from_secs(10);

/// What children are likely to run.
const REHEARSAL: &str = "ls / && cat /etc/hostname /etc/passwd /etc/group && env && echo";

/// A shell that runs for the sake of the caches.
#[derive(Debug)]
pub struct Rehearsal {
    process: Process,
    deadline: Instant,
}

impl Rehearsal {
    /// Starts it, in an image that has a shell.
    pub fn start(launcher: &mut Launcher, defaults: &Defaults, now: Instant) -> Option<Self> {
        let args = ["sh", "-c", REHEARSAL].map(Into::into);
        let surroundings = defaults.surroundings(&Env::new(), Some(&"/".into()), Some(""));
        let standard =
            Standard { stdin: Stdio::null(), stdout: Stdio::null(), stderr: Stdio::null() };
        let launch =
            Launch { args: &args, surroundings: &surroundings, standard, tty: false, keep: None };
        let started = launcher.launch_to_stay(launch).ok()?;
        Some(Self { process: started.process, deadline: now + REHEARSAL_TIMEOUT })
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// When to give it up.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Stops it.
    pub fn cancel(&self) {
        self.process.kill_all();
    }
}

/// Writes out, drops, compacts.  May take as long as the disk does.
pub fn shrink() {
    nix::unistd::sync();
    // Where the kernel lacks one of these, the snapshot is larger, and still right.
    for (file, value) in [("drop_caches", "3"), ("compact_memory", "1")] {
        let path = Path::new("/proc/sys/vm").join(file);
        if let Err(error) = fs::write(&path, value) {
            log::line(&format!("{}: {error}", path.display()));
        }
    }
}

/// The answer, measured now.
pub fn reply() -> QuiesceReply {
    // For what they leave in the directory cache.
    has_hook();
    needs_generation();
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    QuiesceReply { available_bytes: available_bytes(&text).unwrap_or(0) }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        let text = "MemTotal:  500 kB\nMemAvailable:     12 kB\n";
        assert_eq!(available_bytes(text), Some(12288));
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
    }
}
