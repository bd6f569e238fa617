//! System calls around processes that neither `std` nor the rust-vmm crates wrap.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::Path;

use crate::error::Error;
use crate::sys::descriptors::pipe;
use crate::sys::handed;

/// `linux/sched.h`; libc's constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// The user and the group that own nothing.
const NOBODY: u32 = 65534;
/// What a confined process may have: memory, processor time in seconds, a log, no more files and no
/// more processes.
const CONFINED: [(libc::__rlimit_resource_t, u64); 5] = [
    (libc::RLIMIT_AS, 2 << 30),
    (libc::RLIMIT_CPU, 600),
    (libc::RLIMIT_FSIZE, 64 << 10),
    (libc::RLIMIT_NOFILE, 0),
    (libc::RLIMIT_NPROC, 0),
];

const ENTER_WITHOUT_CLONE3: &str =
    "enter a cgroup without clone3, which the seccomp profile of a container hides";

/// Which side of a fork this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forked {
    /// The process that called; holds the child's process id.
    Parent(libc::pid_t),
    /// The new process.
    Child,
}

/// Opens a cgroup2 folder, for [`fork_into`].
///
/// # Errors
///
/// [`Error::Io`] naming it.
pub fn open_cgroup(path: &Path) -> Result<File, Error> {
    handed::open_folder(path).map_err(Error::io(format!("open cgroup {}", path.display())))
}

/// Moves this process to a cgroup2 folder.
///
/// # Errors
///
/// [`Error::Io`] naming it.
pub fn enter_cgroup(path: &Path) -> Result<(), Error> {
    let entered = std::fs::write(path.join("cgroup.procs"), "0");
    entered.map_err(Error::io(format!("enter {}", path.display())))
}

/// Forks this process, into `cgroup` if given.
///
/// `clone3` with `CLONE_INTO_CGROUP` starts the child where it belongs; moving it afterwards would
/// take a lock that every fork on the host waits for.  The child's exit is announced by SIGCHLD.
/// Where a container's seccomp profile hides `clone3`, the child moves itself, before it is used.
///
/// # Errors
///
/// [`Error::Io`] with the kernel's refusal to fork, or to enter the cgroup.
pub fn fork_into(cgroup: Option<&File>) -> Result<Forked, Error> {
    // SAFETY: all-zero is a valid `clone_args`: no flags, no stack, no pointers.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD.unsigned_abs().into();
    if let Some(folder) = cgroup {
        args.flags = CLONE_INTO_CGROUP;
        args.cgroup = folder.as_raw_fd().unsigned_abs().into();
    }
    // SAFETY: without CLONE_VM this is fork(2): the child runs on a copy of this stack.  A zygote
    // has one thread; those that a machine has besides the caller's are parked, outside of the
    // allocator, so no lock that the child needs can be held by a thread that it lacks.
    let pid = unsafe {
        libc::syscall(libc::SYS_clone3, &raw const args, std::mem::size_of::<libc::clone_args>())
    };
    match libc::pid_t::try_from(pid) {
        Ok(0) => Ok(Forked::Child),
        Ok(pid) if pid > 0 => Ok(Forked::Parent(pid)),
        _ => match io::Error::last_os_error() {
            hidden if hidden.raw_os_error() == Some(libc::ENOSYS) => clone_into(cgroup),
            source => Err(Error::Io { what: "clone3".into(), source }),
        },
    }
}

/// As [`fork_into`], without `clone3`.
fn clone_into(cgroup: Option<&File>) -> Result<Forked, Error> {
    let Some(folder) = cgroup else { return clone() };
    // Opened here, where a refusal can still be told.  A jailed zygote has its groups read-only.
    let procs = open_procs(folder).map_err(Error::io(ENTER_WITHOUT_CLONE3))?;
    let (mut answer, mut report) = pipe()?;
    match clone()? {
        Forked::Child => {
            if let Err(refused) = (&procs).write_all(b"0") {
                let number = refused.raw_os_error().unwrap_or(libc::EIO);
                // Who does not get the number hears of no error, but has no child either.
                drop(report.write_all(&number.to_ne_bytes()));
                exit_now(1);
            }
            Ok(Forked::Child)
        }
        Forked::Parent(pid) => {
            drop(report);
            let mut number = [0; size_of::<i32>()];
            // All of it or nothing: it is shorter than what a pipe takes at once.
            if answer.read(&mut number).is_ok_and(|bytes| bytes == number.len()) {
                // Whoever ignores its children has none to reap.
                drop(wait(pid));
                let source = io::Error::from_raw_os_error(i32::from_ne_bytes(number));
                return Err(Error::Io { what: ENTER_WITHOUT_CLONE3.into(), source });
            }
            Ok(Forked::Parent(pid))
        }
    }
}

fn clone() -> Result<Forked, Error> {
    // SAFETY: as of `clone3` in `fork_into`: no CLONE_VM, and no pointers.
    let pid =
        unsafe { libc::syscall(libc::SYS_clone, libc::c_long::from(libc::SIGCHLD), 0, 0, 0, 0) };
    match libc::pid_t::try_from(pid) {
        Ok(0) => Ok(Forked::Child),
        Ok(pid) if pid > 0 => Ok(Forked::Parent(pid)),
        _ => Err(Error::last_os("clone")),
    }
}

fn open_procs(cgroup: &File) -> io::Result<File> {
    let flags = libc::O_WRONLY | libc::O_CLOEXEC;
    // SAFETY: the descriptor is open, and the name a constant that ends in NUL.
    let fd = unsafe { libc::openat(cgroup.as_raw_fd(), c"cgroup.procs".as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel opened `fd` for us just now, and nothing else knows its number.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Gives up all that is not needed to read open files and to write to a pipe, for a process that
/// is to look at what may be hostile.
///
/// It cannot open, start or fill anything afterwards, has an end of processor time and of memory,
/// and if it is root's is nobody's, unless it has `no_rights` already.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn confine(no_rights: bool) -> Result<(), Error> {
    for (what, most) in CONFINED {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        // SAFETY: `limit` is a valid structure that outlives the call.
        if unsafe { libc::setrlimit(what, &raw const limit) } < 0 {
            return Err(Error::last_os("limit a process"));
        }
    }
    // SAFETY: sets a flag of this process; the call takes no pointers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } < 0 {
        return Err(Error::last_os("give up new privileges"));
    }
    if no_rights || own_uid() != 0 {
        return Ok(());
    }
    // SAFETY: an empty list needs no memory.
    let groups = unsafe { libc::setgroups(0, std::ptr::null()) };
    // SAFETY: changes numbers of this process; the call takes no pointers.
    let group = unsafe { libc::setresgid(NOBODY, NOBODY, NOBODY) };
    // SAFETY: as above.
    let user = unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) };
    if groups < 0 || group < 0 || user < 0 {
        return Err(Error::last_os("become nobody"));
    }
    Ok(())
}

/// Waits for a child, or with -1 for any; returns which it was, and how it ended.
///
/// # Errors
///
/// [`Error::Io`] if there is no such child.
pub fn wait(pid: libc::pid_t) -> Result<(libc::pid_t, i32), Error> {
    let mut status = 0;
    // SAFETY: `status` is valid and outlives the call.
    let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    if ended < 0 { Err(Error::last_os("wait for a child")) } else { Ok((ended, status)) }
}

/// Has standard input and output lead nowhere, so that they end with whom else has them.
///
/// # Errors
///
/// [`Error::Io`].
pub fn let_go_of_streams() -> Result<(), Error> {
    let null = File::options().read(true).write(true).open("/dev/null");
    let null = null.map_err(Error::io("open /dev/null"))?;
    for stream in [libc::STDIN_FILENO, libc::STDOUT_FILENO] {
        // SAFETY: both are open, and nobody here has a stream of Rust's in use.
        if unsafe { libc::dup2(null.as_raw_fd(), stream) } < 0 {
            return Err(Error::last_os("let go of a stream"));
        }
    }
    Ok(())
}

/// Detaches from the caller's session, so that a signal to its terminal or group does not reach us.
///
/// # Errors
///
/// [`Error::Io`] if this process leads a group already.
pub fn new_session() -> Result<(), Error> {
    // SAFETY: no arguments, no memory involved.
    if unsafe { libc::setsid() } < 0 { Err(Error::last_os("setsid")) } else { Ok(()) }
}

/// Blocks SIGCHLD and returns a descriptor that reads it, for a poll loop.
///
/// # Errors
///
/// [`Error::Io`].
pub fn child_signals() -> Result<File, Error> {
    let mask = child_mask();
    // SAFETY: `mask` is initialised; the old mask is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const mask, std::ptr::null_mut()) } < 0 {
        return Err(Error::last_os("sigprocmask"));
    }
    // SAFETY: `mask` is initialised; -1 asks for a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const mask, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(Error::last_os("signalfd"));
    }
    // SAFETY: the kernel opened `fd` for us just now, and nothing else knows its number.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Undoes the blocking of [`child_signals`], in a child.
pub fn unblock_child_signals() {
    let mask = child_mask();
    // SAFETY: `mask` is initialised; the old mask is not asked for.
    unsafe { libc::sigprocmask(libc::SIG_UNBLOCK, &raw const mask, std::ptr::null_mut()) };
}

fn child_mask() -> libc::sigset_t {
    // SAFETY: all-zero is a valid `sigset_t` on Linux.
    let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `mask` is initialised and SIGCHLD a valid signal.
    unsafe { libc::sigaddset(&raw mut mask, libc::SIGCHLD) };
    mask
}

/// A child that has ended.  Until it is reaped its process id is not given to another.
#[must_use]
pub fn ended() -> Option<libc::pid_t> {
    // SAFETY: all-zero is a valid `siginfo_t`.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let what = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` outlives the call.
    if unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, what) } < 0 {
        return None;
    }
    // SAFETY: the kernel filled in what it says of a child, or left it all zero.
    let pid = unsafe { info.si_pid() };
    (pid > 0).then_some(pid)
}

/// Reaps `pid`, a child that has ended: its raw wait status.
#[must_use]
pub fn reap(pid: libc::pid_t) -> Option<i32> {
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (reaped == pid).then_some(status)
}

/// Reaps children until there are none; those that live are waited for.
pub fn outlast_children() {
    loop {
        // SAFETY: no status is asked for.
        let pid = unsafe { libc::waitpid(-1, std::ptr::null_mut(), 0) };
        if pid < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Gives this process a name of at most 15 bytes, by which `/proc` and `ps` know it.
pub fn rename(name: &std::ffi::CStr) {
    // SAFETY: the name is NUL-terminated and outlives the call.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
}

/// Kills `pid`, a child of ours that has not been reaped.
pub fn kill(pid: libc::pid_t) {
    // SAFETY: an unreaped child's id cannot belong to another process.
    unsafe { libc::kill(pid, libc::SIGKILL) };
}

/// Ends this process at once: no destructors, no exit handlers.
///
/// For a forked child, whose memory holds objects that belong to its parent.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: ends the process; nothing runs afterwards.
    unsafe { libc::_exit(status) }
}

/// Keeps glibc's allocator to one arena.
///
/// By default each thread gets one of its own: six system calls and some twenty private pages per
/// vCPU thread, for threads that allocate next to nothing.
pub fn one_arena() {
    // SAFETY: called before there is a second thread; sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Our own effective user id.
#[must_use]
pub fn own_uid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::geteuid() }
}

/// Our own effective group id.
#[must_use]
pub fn own_gid() -> u32 {
    // SAFETY: no arguments, cannot fail.
    unsafe { libc::getegid() }
}

/// Random bytes from the host's kernel.
///
/// # Errors
///
/// The kernel's, in theory: `getrandom` blocks only before the pool is ready.
pub fn random(buffer: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let rest = &mut buffer[filled..];
        // SAFETY: pointer and length are those of `rest`.
        let got = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        match usize::try_from(got) {
            Ok(got) => filled += got,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Whether this process hears of its children's ends and reaps them, or they vanish by themselves.
pub fn mind_children(mind: bool) {
    let what = if mind { libc::SIG_DFL } else { libc::SIG_IGN };
    // SAFETY: sets one of the two standard dispositions of a valid signal.
    unsafe { libc::signal(libc::SIGCHLD, what) };
}

/// Has the kernel kill this process when `parent`, which forked it, ends.
///
/// # Errors
///
/// [`Error::State`] if it has ended already.
pub fn die_with_parent(parent: u32) -> Result<(), Error> {
    // SAFETY: takes a signal number; no memory involved.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    if std::os::unix::process::parent_id() == parent {
        Ok(())
    } else {
        Err(Error::State("the zygote has ended"))
    }
}

/// Interrupts this process's system calls with SIGALRM after `seconds`, once.
///
/// # Errors
///
/// [`Error::Io`].
pub fn alarm_after(seconds: u32) -> Result<(), Error> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: all-zero is a valid `sigaction`: no flags (so no SA_RESTART), empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = nothing as *const () as libc::sighandler_t;
    // SAFETY: `action` is initialised, and its handler does nothing.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, std::ptr::null_mut()) };
    if set < 0 {
        return Err(Error::last_os("sigaction"));
    }
    // SAFETY: no memory involved.
    unsafe { libc::alarm(seconds) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_outlasted() {
        let (mut go, mut start) = pipe().unwrap();
        let (mut said, mut say) = pipe().unwrap();
        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            if fork_into(None).is_ok_and(|side| side == Forked::Child) {
                drop(go.read(&mut [0]).and_then(|_| say.write_all(b"child")));
                exit_now(0);
            }
            outlast_children();
            drop(say.write_all(b", parent"));
            exit_now(0);
        };

        start.write_all(b"x").unwrap();

        let mut order = [0; 13];
        said.read_exact(&mut order).unwrap();
        assert_eq!(std::str::from_utf8(&order).unwrap(), "child, parent");
        // SAFETY: no status is asked for.
        assert_eq!(unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) }, pid);
    }

    #[test]
    fn a_forked_child_is_reaped_with_its_status() {
        let (mut read, mut write) = pipe().unwrap();

        let Forked::Parent(pid) = fork_into(None).unwrap() else {
            write.write_all(b"x").unwrap();
            exit_now(7);
        };

        let mut byte = [0];
        read.read_exact(&mut byte).unwrap();
        let mut status = 0;
        // SAFETY: `status` outlives the call; `pid` is our child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 7);
    }

    #[test]
    fn a_cgroup_that_does_not_exist_is_named() {
        let error = open_cgroup(Path::new("/nonexistent/cgroup")).unwrap_err();

        assert!(error.to_string().contains("/nonexistent/cgroup"), "{error}");
    }
}
