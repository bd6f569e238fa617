//! Processes that the agent has started, and how they end.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;

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
