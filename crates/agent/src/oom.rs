//! The order in which the guest's OOM killer kills: programs first, then the runtime, never the
//! agent.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use nix::unistd::Pid;

use crate::log;

/// The `oom_score_adj` of a process that is never killed; proc(5).
const NEVER: &str = "-1000";
const AS_OTHERS: &str = "0";
/// The score of the runtime: it is killed before a program only if it has more memory than that
/// program by 30 % of all.  The processes that it starts inherit the score.
const RUNTIME: &str = "-300";

/// The order in which the kernel of a guest kills.
#[derive(Debug)]
pub struct Order {
    /// The agent's own score.  Process 1 needs none: the kernel never kills it.
    own: Option<File>,
}

impl Order {
    /// Keeps this process from being killed.
    pub fn establish() -> Self {
        if std::process::id() == 1 {
            return Self { own: None };
        }
        let own = File::options().write(true).open("/proc/self/oom_score_adj");
        let own = own.and_then(|file| set(&file, NEVER).map(|()| file));
        let said =
            |error: &io::Error| log::line(&format!("the OOM killer may kill the agent: {error}"));
        Self { own: own.inspect_err(said).ok() }
    }

    /// Runs `start` so that what it starts may be killed like any other process.
    pub fn start<T>(order: Option<&Self>, start: impl FnOnce() -> T) -> T {
        let Some(own) = order.and_then(|order| order.own.as_ref()) else { return start() };
        let said = |error| log::line(&format!("cannot set the score of the agent: {error}"));
        set(own, AS_OTHERS).unwrap_or_else(said);
        let started = start();
        set(own, NEVER).unwrap_or_else(said);
        started
    }
}

/// Has the kernel of a guest kill others rather than the runtime.
pub fn prefer_others(runtime: Pid) {
    if let Err(error) = fs::write(format!("/proc/{runtime}/oom_score_adj"), RUNTIME) {
        log::line(&format!("the OOM killer may kill the runtime first: {error}"));
    }
}

fn set(file: &File, score: &str) -> io::Result<()> {
    file.write_all_at(score.as_bytes(), 0)
}
