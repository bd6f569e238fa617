//! What a process does not share with others of its host: equal pages, and at one time a core.
//!
//! Pages that the kernel merges (KSM), and threads that run on one core at once (SMT), each tell
//! the other side something by how long it takes.  Merging is inherited from whoever started us
//! (`MemoryKSM=` of systemd), so it is switched off.  Of cores, each machine has a *cookie* of its
//! own: the kernel lets threads of different cookies not run on one core at the same time.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

static OWN_CORES: AtomicBool = AtomicBool::new(true);

/// What a process of ours does first: it shares no pages.
///
/// Takes `--share-cores` from the end of the arguments: that has [`own_core`] do nothing, in this
/// process and in those that it forks.
#[must_use]
pub fn begin(mut arguments: Vec<String>) -> Vec<String> {
    refuse_merging();
    if arguments.pop_if(|last| last == "--share-cores").is_some() {
        OWN_CORES.store(false, Ordering::Relaxed);
    }
    arguments
}

/// Keeps this process's pages, and those of processes that it forks, from being merged with equal
/// ones of others.
///
/// A kernel that does not know of it (before Linux 6.4) merges only what asks for it, which nothing
/// here does.
fn refuse_merging() {
    // The answer is of no use: a kernel that refuses does not merge either.
    control(libc::PR_SET_MEMORY_MERGE, [0; 4]);
}

/// Gives this process, and the threads that it starts from now on, a core to itself at a time:
/// threads of other processes of ours do not run on it meanwhile.  To be called while there is one
/// thread.
///
/// Nothing is done where no two threads share a core, or the kernel cannot do it.
///
/// # Errors
///
/// [`Error::Io`] if the kernel could, and refuses.
pub fn own_core() -> Result<(), Error> {
    if !OWN_CORES.load(Ordering::Relaxed) {
        return Ok(());
    }
    if control(libc::PR_SCHED_CORE, CREATE_FOR_US) == 0 {
        return Ok(());
    }
    let refused = io::Error::last_os_error();
    match refused.raw_os_error() {
        // No SMT; no CONFIG_SCHED_CORE, or a kernel before 5.14.
        Some(libc::ENODEV | libc::EINVAL) => Ok(()),
        _ => Err(Error::Io {
            what: "have a core to itself (FORKD_CORE_SCHEDULING=off goes without)".into(),
            source: refused,
        }),
    }
}

/// To make a cookie for the calling thread: what is asked, of whom, how far it goes, no address.
const CREATE_FOR_US: [libc::c_ulong; 4] = [1, 0, 0, 0];

fn control(what: libc::c_int, [second, third, fourth, fifth]: [libc::c_ulong; 4]) -> libc::c_int {
    // SAFETY: those used here take numbers only.
    unsafe { libc::prctl(what, second, third, fourth, fifth) }
}

#[cfg(test)]
mod tests {
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
        SeccompRule, TargetArch,
    };

    use super::*;
    use crate::sys::process::{Forked, exit_now, fork_into, wait};

    const PR_GET_MEMORY_MERGE: libc::c_int = 68;

    fn merges() -> libc::c_int {
        control(PR_GET_MEMORY_MERGE, [0; 4])
    }

    #[test]
    fn merging_that_was_inherited_is_switched_off() {
        if control(libc::PR_SET_MEMORY_MERGE, [1, 0, 0, 0]) < 0 {
            assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::EINVAL));
            return; // a kernel without it
        }
        assert_eq!(merges(), 1);

        refuse_merging();

        assert_eq!(merges(), 0);
    }

    /// Answers the one call that makes a cookie for its caller, as a kernel would.
    fn answering(number: i32) -> BpfProgram {
        let [second, third, fourth, fifth] = CREATE_FOR_US;
        let cookie = [libc::PR_SCHED_CORE.unsigned_abs().into(), second, third, fourth, fifth];
        let conditions = (0..).zip(cookie).map(|(argument, value)| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
        });
        let rule = SeccompRule::new(conditions.collect::<Result<_, _>>().unwrap()).unwrap();
        let rules = [(libc::SYS_prctl, vec![rule])].into();
        let answer = SeccompAction::Errno(number.cast_unsigned());
        SeccompFilter::new(rules, SeccompAction::Allow, answer, TargetArch::x86_64)
            .and_then(BpfProgram::try_from)
            .unwrap()
    }

    #[test]
    fn a_machine_asks_for_a_core_of_its_own_and_goes_without_where_there_is_none() {
        for (number, goes_on) in [
            (libc::ENODEV, true),
            (libc::EINVAL, true),
            (libc::EPERM, false),
            (libc::ENOMEM, false),
        ] {
            let kernel = answering(number);
            let Forked::Parent(pid) = fork_into(None).unwrap() else {
                let ready = seccompiler::apply_filter(&kernel).is_ok();
                exit_now(if ready { i32::from(own_core().is_ok()) } else { 7 });
            };

            let (_, status) = wait(pid).unwrap();
            assert_eq!(libc::WEXITSTATUS(status), i32::from(goes_on), "errno {number}");
        }
    }

    #[test]
    fn the_option_is_taken_from_the_end_only() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();

        assert_eq!(begin(words("--share-cores zygote")), words("--share-cores zygote"));
        assert!(OWN_CORES.load(Ordering::Relaxed));
        assert_eq!(begin(words("zygote --share-cores")), words("zygote"));
        assert!(!OWN_CORES.swap(true, Ordering::Relaxed));
    }
}
