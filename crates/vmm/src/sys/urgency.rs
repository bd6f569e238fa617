//! Threads that a standing guest waits for come before all others on their processors.
//!
//! The kernel's fair scheduler puts who has slept before who has run, and a vCPU's thread has run:
//! whoever else is awake when the guest could go on is let go on first, for milliseconds.  Already
//! the client that asked for a branch made it longer by going back to sleep.  So while the guest
//! is paused its threads are under `SCHED_FIFO` (sched(7)), with the lowest of its priorities.
//!
//! Without the right to that (`CAP_SYS_NICE`, or `RLIMIT_RTPRIO` of two) they stay as they are, and
//! so they do if somebody has given them another policy than the usual one.

/// The lowest that there is.
const VCPU_PRIORITY: libc::c_int = 1;
/// Of the thread that stops vCPUs and lets them go: above theirs, which have no end of work.
const STOPPER_PRIORITY: libc::c_int = VCPU_PRIORITY + 1;
/// What a process that is forked meanwhile does not inherit.
pub const URGENT: libc::c_int = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;

/// Of a thread that was urgent: taking back what its forks do not inherit needs `CAP_SYS_NICE`.
pub const CALM: libc::c_int = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;

/// The thread that made it is urgent, until it is dropped.
#[derive(Debug)]
pub struct Urgent(());

impl Urgent {
    /// Makes this thread urgent, and `vcpus`, each of which is to call [`calm`] itself; those that
    /// are 0 have not started.  `None` if this thread cannot be.
    #[must_use]
    pub fn with(vcpus: &[libc::pid_t]) -> Option<Self> {
        let this = raise(0, STOPPER_PRIORITY).then(|| Self(()))?;
        for &thread in vcpus.iter().filter(|thread| **thread != 0) {
            // One that cannot be is as it was, which is all that can be had.
            raise(thread, VCPU_PRIORITY);
        }
        Some(this)
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        calm();
    }
}

/// Makes the calling thread one like all others again, if it was urgent.
pub fn calm() {
    if is_urgent() {
        set_policy(0, CALM, 0);
    }
}

/// Whether the calling thread is urgent.
#[must_use]
pub fn is_urgent() -> bool {
    policy_of(0) == URGENT
}

/// The calling thread's number in the kernel.
#[must_use]
pub fn this_thread() -> libc::pid_t {
    // SAFETY: takes no arguments, and always succeeds.
    unsafe { libc::gettid() }
}

fn raise(thread: libc::pid_t, priority: libc::c_int) -> bool {
    let usual = [libc::SCHED_OTHER, CALM].contains(&policy_of(thread));
    usual && set_policy(thread, URGENT, priority)
}

/// Negative if there is no such thread.
fn policy_of(thread: libc::pid_t) -> libc::c_int {
    // SAFETY: takes a number; no memory involved.
    unsafe { libc::sched_getscheduler(thread) }
}

fn set_policy(thread: libc::pid_t, policy: libc::c_int, priority: libc::c_int) -> bool {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: `param` is initialised and outlives the call.
    unsafe { libc::sched_setscheduler(thread, policy, &raw const param) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into};

    #[test]
    fn a_process_forked_meanwhile_is_not_urgent() {
        let urgent = Urgent::with(&[]);
        assert_eq!(is_urgent(), urgent.is_some());

        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            exit_now(policy_of(0));
        };

        let mut status = -1;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), libc::SCHED_OTHER);
    }
}
