//! System calls that no program in a cell may make.
//!
//! Such a program is a package manager or an interpreter, so a list of what it needs would be wrong
//! with its next release.  This one has what none of them needs, and what reaches far into the
//! kernel: they are refused as to somebody without the right.

use std::collections::BTreeMap;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::error::Error;

/// Refused to every program.
const ALWAYS: &[i64] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_bpf,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_ioperm,
    libc::SYS_iopl,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_open_by_handle_at,
    libc::SYS_perf_event_open,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_settimeofday,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_userfaultfd,
];

/// Refused, besides, to one that is root of nothing.
const TO_USERS: &[i64] = &[
    libc::SYS_chroot,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_pivot_root,
    libc::SYS_setns,
    libc::SYS_umount2,
    libc::SYS_unshare,
];

/// Confines this process and what it starts.
///
/// # Errors
///
/// [`Error::Io`] if the kernel refuses.
pub fn put_on(is_root: bool) -> Result<(), Error> {
    let program = compile(is_root).map_err(|error| failed(std::io::Error::other(error)))?;
    seccompiler::apply_filter(&program).map_err(|error| failed(std::io::Error::other(error)))
}

fn compile(is_root: bool) -> Result<BpfProgram, seccompiler::BackendError> {
    let more = if is_root { &[][..] } else { TO_USERS };
    let rules: BTreeMap<i64, _> = ALWAYS.iter().chain(more).map(|call| (*call, vec![])).collect();
    let refused = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64)?.try_into()
}

fn failed(source: std::io::Error) -> Error {
    Error::Io { what: "put on a filter of system calls".into(), source }
}
