//! Threads that a standing guest waits for come before all others on their processors.
//!
//! The kernel's fair scheduler puts who has slept before who has run, and a vCPU's thread has run:
//! whoever else is awake when the guest could go on is let go on first, for milliseconds.  Already
//! the client that asked for a branch made it longer by going back to sleep.  So while the guest
//! is paused its threads are under `SCHED_FIFO` (sched(7)), with the lowest of its priorities.
//!
//! The machine may not do that itself: whoever takes its process over would be urgent for ever.
//! So the daemon, which has the right, makes its threads urgent before it asks for a branch
//! (`src/forkd/host/urgency.py`).  Here each thread goes back to the usual policy by itself, as
//! soon as the guest may go on.

/// What a process that is forked meanwhile does not inherit.
pub const URGENT: libc::c_int = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;

/// Of a thread that was urgent: taking back what its forks do not inherit needs `CAP_SYS_NICE`.
pub const CALM: libc::c_int = libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK;

/// The thread that made it was urgent, and is no longer once this is dropped.
#[derive(Debug)]
pub struct Urgent(());

impl Urgent {
    /// Sees to it that this thread, if it is urgent, does not stay so; `None` if it is not.
    #[must_use]
    pub fn here() -> Option<Self> {
        is_urgent().then(|| Self(()))
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

/// Makes a thread urgent, as the daemon does; returns whether we may.
#[cfg(test)]
#[must_use]
pub fn raise(thread: libc::pid_t) -> bool {
    set_policy(thread, URGENT, 1)
}

/// The calling thread's number in the kernel.
#[cfg(test)]
#[must_use]
pub fn this_thread() -> libc::pid_t {
    // SAFETY: takes no arguments, and always succeeds.
    unsafe { libc::gettid() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into};

    #[test]
    fn a_process_forked_meanwhile_is_not_urgent() {
        let raised = raise(0);
        let urgent = Urgent::here();
        assert_eq!(urgent.is_some(), raised);

        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            exit_now(policy_of(0));
        };

        let mut status = -1;
        // SAFETY: `status` outlives the call.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), libc::SCHED_OTHER);
        drop(urgent);
        assert!(!is_urgent());
    }
}
