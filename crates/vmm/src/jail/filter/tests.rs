//! Each of these forks a process, confines it, and looks at how it ended.

use super::*;
use crate::sys::process::{Forked, exit_now, fork_into, open_cgroup, wait};
use crate::sys::{pagemap, urgency};
use seccompiler::{SeccompAction, SeccompFilter, TargetArch};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// How a process ended that was confined as `role` and then made a call: its wait status, and what
/// it logged.
fn after(role: Role, call: impl FnOnce()) -> (i32, String) {
    let (mut said, say) = crate::sys::descriptors::pipe().unwrap();
    // Nothing that a process forked of several threads does may allocate.
    let program = of_this_process(&compile(role).unwrap());
    let Forked::Parent(pid) = fork_into(None).unwrap() else {
        // SAFETY: both descriptors are open.
        unsafe { libc::dup2(say.as_raw_fd(), libc::STDERR_FILENO) };
        if violation::handle().is_ok() && seccompiler::apply_filter(&program).is_ok() {
            call();
        }
        exit_now(7);
    };
    drop(say);
    let mut text = String::new();
    said.read_to_string(&mut text).unwrap();
    let mut status = 0;
    // SAFETY: `status` outlives the call; `pid` is our child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    (status, text)
}

fn call(number: i64, arguments: [i64; 3]) -> impl FnOnce() {
    let [first, second, third] = arguments;
    move || {
        // SAFETY: each call of these tests is refused, or does nothing with such arguments.
        unsafe { libc::syscall(number, first, second, third, 0, -1, 0) };
    }
}

const ROLES: [Role; 5] = [Role::Process, Role::Vcpu, Role::Writer, Role::Holder, Role::Comparer];

#[test]
fn what_is_in_no_list_is_named_and_ends_the_process() {
    for role in ROLES {
        for refused in [
            libc::SYS_execve,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_mount,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_keyctl,
            libc::SYS_perf_event_open,
            libc::SYS_init_module,
            libc::SYS_clone,
            libc::SYS_setuid,
        ] {
            let (status, said) = after(role, call(refused, [0; 3]));

            assert!(libc::WIFSIGNALED(status), "{role:?} {refused}: {status:#x}");
            assert_eq!(libc::WTERMSIG(status), libc::SIGSYS);
            let expected = if role == Role::Holder {
                String::new()
            } else {
                let name = names::name_of(i32::try_from(refused).unwrap()).unwrap();
                format!("its VMM was killed by the filter: system call {name} ({refused})\n")
            };
            assert_eq!(said, expected);
        }
    }
}

/// Sends this process SIGBUS as the kernel does, which it lets a process do to itself alone.
fn bus_error(code: i32) {
    // SAFETY: all-zero is a valid `siginfo_t`.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    info.si_signo = libc::SIGBUS;
    info.si_code = code;
    let pid = std::process::id();
    // SAFETY: `info` outlives the call.
    unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, pid, libc::SIGBUS, &raw const info) };
}

#[test]
fn a_guest_that_splits_a_lock_where_that_is_fatal_is_named() {
    for (code, expected) in [
        (
            libc::BUS_ADRALN,
            "its VMM was killed by SIGBUS: its guest split a lock, and this host has \
             split_lock_detect=fatal\n",
        ),
        (libc::BUS_ADRERR, "its VMM was killed by SIGBUS (code 2)\n"),
    ] {
        let (mut said, say) = crate::sys::descriptors::pipe().unwrap();
        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            // SAFETY: both descriptors are open.
            unsafe { libc::dup2(say.as_raw_fd(), libc::STDERR_FILENO) };
            if violation::handle().is_ok() {
                bus_error(code);
            }
            exit_now(7);
        };
        drop(say);
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();

        assert_eq!(text, expected);
        let mut status = 0;
        // SAFETY: `status` outlives the call; `pid` is our child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert_eq!(libc::WEXITSTATUS(status), 128 + libc::SIGBUS);
    }
}

#[test]
fn a_filter_that_lacks_a_call_that_is_needed_is_found_out() {
    let (status, said) = after(Role::Vcpu, || drop(crate::sys::descriptors::pipe()));

    assert_eq!(libc::WTERMSIG(status), libc::SIGSYS);
    assert_eq!(said, "its VMM was killed by the filter: system call pipe2 (293)\n");
    assert_eq!(after(Role::Process, || drop(crate::sys::descriptors::pipe())).0, 7 << 8);
}

#[test]
fn calls_are_made_with_the_arguments_that_are_needed_and_with_no_others() {
    let rw = i64::from(libc::PROT_READ | libc::PROT_WRITE);
    let code = rw | i64::from(libc::PROT_EXEC);
    let stop = i64::from(SIGNAL_OF_VCPUS);
    let allowed = [
        (Role::Vcpu, libc::SYS_mprotect, [0, 0, rw]),
        (Role::Vcpu, libc::SYS_ioctl, [-1, 0xae80, 0]),
        (Role::Process, libc::SYS_ioctl, [-1, 0xae01, 0]),
        (Role::Process, libc::SYS_ioctl, [-1, 0xc040_aed5, 0]),
        (Role::Process, libc::SYS_ioctl, [-1, pagemap::PAGEMAP_SCAN.into(), 0]),
        (Role::Vcpu, libc::SYS_ioctl, [-1, pagemap::PAGEMAP_SCAN.into(), 0]),
        (Role::Writer, libc::SYS_ioctl, [-1, pagemap::PAGEMAP_SCAN.into(), 0]),
        (Role::Process, libc::SYS_kill, [PID_OF_NOBODY, 9, 0]),
        (Role::Process, libc::SYS_tgkill, [PID_OF_NOBODY, PID_OF_NOBODY, stop]),
        (Role::Vcpu, libc::SYS_socket, [i64::from(libc::AF_UNIX), -1, 0]),
        (Role::Process, libc::SYS_prctl, [i64::from(libc::PR_SET_PDEATHSIG), 0, 0]),
        (Role::Process, libc::SYS_prctl, [i64::from(libc::PR_SCHED_CORE), 1, 0]),
        (Role::Process, libc::SYS_rt_sigaction, [i64::from(libc::SIGCHLD), 0, 0]),
        (Role::Process, libc::SYS_setresuid, [1, 1, 1]),
        (Role::Process, libc::SYS_setns, [-1, i64::from(libc::CLONE_NEWUSER), 0]),
        (Role::Process, libc::SYS_sched_setscheduler, [-1, i64::from(urgency::CALM), 0]),
        (Role::Vcpu, libc::SYS_sched_setscheduler, [-1, i64::from(urgency::CALM), 0]),
    ];
    let refused = [
        (Role::Vcpu, libc::SYS_mprotect, [0, 0, code]),
        (Role::Process, libc::SYS_mmap, [0, 4096, code]),
        (Role::Vcpu, libc::SYS_ioctl, [-1, 0xae01, 0]),
        (Role::Vcpu, libc::SYS_ioctl, [-1, 0xc040_aed5, 0]),
        (Role::Process, libc::SYS_ioctl, [-1, 0x5412, 0]),
        (Role::Writer, libc::SYS_ioctl, [-1, 0xae80, 0]),
        (Role::Comparer, libc::SYS_ioctl, [-1, pagemap::PAGEMAP_SCAN.into(), 0]),
        (Role::Process, libc::SYS_kill, [-1, 9, 0]),
        (Role::Process, libc::SYS_kill, [1, 9, 0]),
        (Role::Process, libc::SYS_kill, [PID_OF_NOBODY, 15, 0]),
        (Role::Process, libc::SYS_tgkill, [PID_OF_NOBODY, PID_OF_NOBODY, 9]),
        (Role::Vcpu, libc::SYS_tgkill, [PID_OF_NOBODY, PID_OF_NOBODY, 6]),
        (Role::Vcpu, libc::SYS_socket, [i64::from(libc::AF_INET), 1, 0]),
        (Role::Process, libc::SYS_socket, [i64::from(libc::AF_NETLINK), 3, 0]),
        (Role::Process, libc::SYS_prctl, [i64::from(libc::PR_SET_SECUREBITS), 0, 0]),
        (Role::Process, libc::SYS_prctl, [i64::from(libc::PR_SCHED_CORE), 3, 0]),
        (Role::Process, libc::SYS_prctl, [i64::from(libc::PR_SCHED_CORE), 1, PID_OF_NOBODY]),
        (Role::Process, libc::SYS_setns, [-1, i64::from(libc::CLONE_NEWNS), 0]),
        (Role::Vcpu, libc::SYS_setns, [-1, i64::from(libc::CLONE_NEWUSER), 0]),
        (Role::Process, libc::SYS_sched_setscheduler, [-1, i64::from(urgency::URGENT), 0]),
        (Role::Vcpu, libc::SYS_sched_setscheduler, [-1, i64::from(urgency::URGENT), 0]),
        (Role::Vcpu, libc::SYS_sched_setscheduler, [-1, i64::from(libc::SCHED_FIFO), 0]),
        (Role::Process, libc::SYS_sched_setscheduler, [-1, i64::from(libc::SCHED_RR), 0]),
        (Role::Process, libc::SYS_clone, [i64::from(libc::CLONE_NEWUSER | libc::SIGCHLD), 0, 0]),
        (Role::Process, libc::SYS_clone, [i64::from(libc::CLONE_VM | libc::CLONE_VFORK), 0, 0]),
        (Role::Process, libc::SYS_clone, [i64::from(libc::SIGCHLD | libc::CLONE_PARENT), 0, 0]),
        (Role::Vcpu, libc::SYS_clone, [i64::from(libc::SIGCHLD), 0, 0]),
        (Role::Process, libc::SYS_setresuid, [0, 0, 0]),
        (Role::Process, libc::SYS_setresgid, [1, 1, -1]),
        (Role::Process, libc::SYS_rt_sigaction, [i64::from(libc::SIGSYS), 0, 0]),
        (Role::Process, libc::SYS_read | X32, [-1, 0, 0]),
    ];
    for (role, number, arguments) in allowed {
        let (status, said) = after(role, call(number, arguments));
        assert_eq!((status, said.as_str()), (7 << 8, ""), "{role:?} {number} {arguments:?}");
    }
    for (role, number, arguments) in refused {
        let (status, _) = after(role, call(number, arguments));
        assert!(libc::WIFSIGNALED(status), "{role:?} {number} {arguments:?}: {status:#x}");
    }
}

/// Beyond what `pid_max` is on our hosts by default, and within what it may be.
const PID_OF_NOBODY: i64 = 4_194_303;
const SIGNAL_OF_VCPUS: i32 = 34;
/// Marks calls of the x32 architecture.
const X32: i64 = 0x4000_0000;

#[test]
fn calls_of_i386_end_the_process() {
    let (status, said) = after(Role::Process, || {
        // SAFETY: getpid(2) of i386 changes nothing but the register that it answers in.
        unsafe { std::arch::asm!("int 0x80", inout("eax") 20 => _) };
    });

    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS, "{said}");
}

#[test]
fn a_thread_can_only_signal_its_own_process() {
    let own = || {
        // SAFETY: there is no such thread to be signalled.
        unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), 1, libc::SIGABRT) };
    };
    let program = compile(Role::Vcpu).unwrap();
    assert!(program.iter().any(|instruction| instruction.k == ANY_PID));
    assert!(of_this_process(&program).iter().all(|instruction| instruction.k != ANY_PID));
    // The program is of the process that made it, which is not the one that it confines here.
    assert!(libc::WIFSIGNALED(after(Role::Vcpu, own).0));
}

/// What a container's seccomp profile does to `clone3` unless the container is all-powerful.
fn without_clone3() -> BpfProgram {
    let rules = [(libc::SYS_clone3, Vec::new())].into();
    let hide = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, hide, TargetArch::x86_64);
    filter.unwrap().try_into().unwrap()
}

/// The wait status of a process in a container with that profile, confined as a machine's is.
///
/// What it does must not panic: a process forked of several threads may wait for ever then.
fn in_a_container(life: impl FnOnce() -> Result<i32, Error>) -> i32 {
    let program = without_clone3();
    // SAFETY: glibc's own fork: the child may allocate, and start threads.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let confined = seccompiler::apply_filter(&program).map_err(failed);
        let lived = confined.and_then(|()| put_on(Role::Process)).and_then(|()| life());
        exit_now(lived.unwrap_or(101));
    }
    wait(pid).unwrap().1
}

fn new_folder(name: &str) -> PathBuf {
    let name = format!("forkd-filter-{name}-{}", std::process::id());
    let folder = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn a_process_without_clone3_forks_and_starts_threads() {
    let status = in_a_container(|| {
        let thread =
            std::thread::Builder::new().spawn(|| 7).map_err(Error::io("start a thread"))?;
        let seven = thread.join().unwrap_or(102);
        match fork_into(None)? {
            Forked::Child => exit_now(seven),
            Forked::Parent(pid) => Ok(libc::WEXITSTATUS(wait(pid)?.1)),
        }
    });

    assert_eq!(status, 7 << 8);
}

#[test]
fn a_child_without_clone3_enters_its_cgroup_itself() {
    let folder = new_folder("group");
    std::fs::write(folder.join("cgroup.procs"), "").unwrap();
    let group = open_cgroup(&folder).unwrap();

    let status = in_a_container(|| match fork_into(Some(&group))? {
        Forked::Child => exit_now(7),
        Forked::Parent(pid) => Ok(libc::WEXITSTATUS(wait(pid)?.1)),
    });

    assert_eq!(status, 7 << 8);
    assert_eq!(std::fs::read(folder.join("cgroup.procs")).unwrap(), b"0");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_child_that_cannot_enter_its_cgroup_ends_and_its_parent_says_why() {
    // A folder without the file; one whose file takes nothing.
    let (bare, full) = (new_folder("bare"), new_folder("full"));
    std::os::unix::fs::symlink("/dev/full", full.join("cgroup.procs")).unwrap();

    for (folder, reason) in [(bare, "No such file"), (full, "No space left")] {
        let group = open_cgroup(&folder).unwrap();
        let status = in_a_container(|| {
            let forked = fork_into(Some(&group));
            let said = forked.err().map(|error| error.to_string()).unwrap_or_default();
            let childless = wait(-1).is_err();
            Ok(i32::from(said.contains("seccomp profile") && said.contains(reason) && childless))
        });
        assert_eq!(status, 1 << 8, "{reason}");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
