//! Processes that the agent has started, and how they end.

use std::fs;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;

use crate::cgroup::Cgroup;

/// A process that leads a group of its own, and whatever it has started.
#[derive(Clone, Debug)]
pub struct Process {
    pid: Pid,
    cgroup: Option<Cgroup>,
}

impl Process {
    /// Process `pid`, which was born in `cgroup` if that is its alone.
    pub fn new(pid: Pid, cgroup: Option<Cgroup>) -> Self {
        Self { pid, cgroup }
    }

    /// Its number, and its group's.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Kills it and all that it has started, whatever groups and sessions those have made.
    ///
    /// Without a cgroup, what has left the family (by forking twice) lives on.
    pub fn kill_all(&self) {
        let killed = self.cgroup.as_ref().is_some_and(|cgroup| {
            let killed = cgroup.kill();
            killed.inspect_err(|error| crate::log::line(&format!("cgroup.kill: {error}"))).is_ok()
        });
        if !killed {
            let descendants = descendants_of(self.pid);
            signal_group(self.pid, Signal::SIGKILL);
            for pid in descendants {
                signal_one(pid, Signal::SIGKILL);
            }
        }
    }
}

/// Most descendants that are looked for without a cgroup.
const DESCENDANTS_MAX: usize = 4096;

/// Children of a process, their children, and so on, as far as each still has its parent.
fn descendants_of(ancestor: Pid) -> Vec<Pid> {
    let mut found: Vec<Pid> = Vec::new();
    let mut next = Some(ancestor);
    let mut at = 0;
    while let Some(pid) = next.filter(|_| found.len() < DESCENDANTS_MAX) {
        found.extend(children_of(pid));
        next = found.get(at).copied();
        at += 1;
    }
    found
}

fn children_of(pid: Pid) -> impl Iterator<Item = Pid> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    tasks.filter_map(Result::ok).flat_map(|task| {
        let listed = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let pids = listed.split_ascii_whitespace().filter_map(|word| word.parse().ok());
        pids.map(Pid::from_raw).collect::<Vec<_>>()
    })
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Null if a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
}

impl Ended {
    /// The end that `status` tells of, if it tells of one.
    pub fn from_status(status: WaitStatus) -> Option<(Pid, Self)> {
        match status {
            WaitStatus::Exited(pid, code) => {
                Some((pid, Self { exit_code: Some(code), signal: None }))
            }
            WaitStatus::Signaled(pid, signal, _) => {
                Some((pid, Self { exit_code: None, signal: Some(signal as i32) }))
            }
            _ => None,
        }
    }

    /// Whether it ended as it should.
    pub fn success(self) -> bool {
        self.exit_code == Some(0)
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.exit_code, self.signal) {
            (Some(code), _) => write!(f, "exit status {code}"),
            (None, Some(signal)) => write!(f, "signal {signal}"),
            (None, None) => write!(f, "an unknown end"),
        }
    }
}

/// Sends a signal to a process that leads its group, and to the group.  The group may not exist yet
/// (a staged process makes it) and neither may exist any more; both are fine.
pub fn signal_group(leader: Pid, signal: Signal) {
    if kill(Pid::from_raw(-leader.as_raw()), signal).is_err() {
        signal_one(leader, signal);
    }
}

/// Sends a signal to one process, which may be gone.
pub fn signal_one(pid: Pid, signal: Signal) {
    if let Err(errno) = kill(pid, signal)
        && errno != nix::errno::Errno::ESRCH
    {
        crate::log::line(&format!("cannot send {signal} to {pid}: {errno}"));
    }
}

/// The `attempt`-th wait (from 0) of a series that doubles from `first` up to `most`.
pub fn back_off(attempt: u32, first: Duration, most: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(attempt)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_then_stay() {
        let wait = |n| back_off(n, Duration::from_millis(10), Duration::from_millis(500));
        let waits = [0, 1, 5, 6, 40].map(|n| wait(n).as_millis());
        assert_eq!(waits, [10, 20, 320, 500, 500]);
    }
}
