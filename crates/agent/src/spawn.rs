//! Starting processes, with errors that say what was wrong.
//!
//! A process of the agent's own user and without a terminal is started directly, at the price of
//! one exec, if the kernel has all in memory that this takes.  Anything that needs more (another
//! user, a session with a terminal, a disk or a server to wait for) goes through
//! [`stage`](crate::stage), a second exec of this program, because changing a child between fork
//! and exec would need `unsafe`.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forkd_proto::Text;
use forkd_proto::guest::{Env, ErrorBody, ErrorCode};
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, pipe2};

use crate::at_hand;
use crate::cgroup::Cgroups;
use crate::child::Process;
use crate::failure::{Outcome, code_of, failure, invalid, refused};
use crate::image::Surroundings;
use crate::oom::{self, Order};
use crate::users;

/// Longest report of a staged process: a path and the kernel's words, and less than a pipe writes
/// at once.
const VERDICT_MAX: usize = 4096;

/// Somebody may execute the file.
pub const EXECUTABLE: u32 = 0o111;

/// Standard input, output and error of a process.
#[derive(Debug)]
pub struct Standard {
    /// Standard input.
    pub stdin: Stdio,
    /// Standard output.
    pub stdout: Stdio,
    /// Standard error.
    pub stderr: Stdio,
}

/// A process to start.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Program and arguments.
    pub args: &'a [Text],
    /// Environment, directory and user.
    pub surroundings: &'a Surroundings,
    /// Standard streams.
    pub standard: Standard,
    /// Whether standard input is a terminal that shall control the process.
    pub tty: bool,
    /// A descriptor that the process shall have, under the same number.
    pub keep: Option<&'a OwnedFd>,
}

/// A process that was started, and leads a process group of its own.
#[derive(Debug)]
pub struct Launched {
    /// It.
    pub process: Process,
    /// Where a staged process says why it could not become the program; its end without a word
    /// means that it has.
    pub verdict: Option<File>,
}

/// Starts processes, each in a cgroup of its own where there are cgroups.
#[derive(Debug)]
pub struct Launcher {
    cgroups: Option<Cgroups>,
    order: Option<Order>,
}

impl Launcher {
    /// One that uses `cgroups`, if there are any.
    pub fn new(cgroups: Option<Cgroups>) -> Self {
        Self { cgroups, order: None }
    }

    /// One of an agent whose guest's OOM killer keeps to an order.
    pub fn in_guest(cgroups: Option<Cgroups>, order: Order) -> Self {
        Self { cgroups, order: Some(order) }
    }

    /// Has the OOM killer of a guest kill others rather than `runtime`.
    pub fn prefer_others(&self, runtime: Pid) {
        if self.order.is_some() {
            oom::prefer_others(runtime);
        }
    }

    /// Starts a process.  Only the main thread may: descriptors are inheritable for a moment here.
    ///
    /// # Errors
    ///
    /// `not_found`, `permission_denied` or `exec_failed` for the program, `invalid_request` for
    /// directory or user. A staged process may still fail; see [`Launched::verdict`].
    pub fn launch(&mut self, launch: Launch<'_>) -> Outcome<Launched> {
        self.cgroups.iter_mut().for_each(Cgroups::rouse);
        let (pid, verdict) = Order::start(self.order.as_ref(), || direct_or_staged(launch))?;
        let cgroup = self.cgroups.as_mut().and_then(Cgroups::leave);
        Ok(Launched { process: Process::new(pid, cgroup), verdict })
    }

    /// Starts a process without a cgroup, for which each fork would pay: one that forks find
    /// running, or that ends just before the snapshot.
    ///
    /// # Errors
    ///
    /// As [`launch`](Self::launch).
    pub fn launch_to_stay(&mut self, launch: Launch<'_>) -> Outcome<Launched> {
        self.rest();
        let (pid, verdict) = Order::start(self.order.as_ref(), || direct_or_staged(launch))?;
        Ok(Launched { process: Process::new(pid, None), verdict })
    }

    /// Makes the guest cheap to fork, until the next process is launched.
    pub fn rest(&mut self) {
        self.cgroups.iter_mut().for_each(Cgroups::rest);
    }
}

/// What a staged process has said so far.
#[derive(Debug)]
pub enum Verdict {
    /// Nothing.
    Pending,
    /// It has become the program.
    Running,
    /// Why it could not.
    Failed(ErrorBody),
}

/// Reads the verdict of a staged process, without waiting.
pub fn verdict(report: &mut File) -> Verdict {
    let mut said = [0; VERDICT_MAX];
    match report.read(&mut said) {
        Ok(0) => Verdict::Running,
        Ok(count) => {
            let parsed = serde_json::from_slice(said.get(..count).unwrap_or_default());
            let garbled = |_| failure(ErrorCode::ExecFailed, "the process could not start");
            Verdict::Failed(parsed.unwrap_or_else(garbled))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Verdict::Pending,
        Err(error) => Verdict::Failed(refused("cannot start a process", &error)),
    }
}

fn direct_or_staged(launch: Launch<'_>) -> Outcome<(Pid, Option<File>)> {
    if !launch.tty && users::is_root(&launch.surroundings.user) && starts_at_once(&launch) {
        return Ok((direct(launch)?, None));
    }
    staged(launch).map(|(pid, verdict)| (pid, Some(verdict)))
}

fn starts_at_once(launch: &Launch<'_>) -> bool {
    let Surroundings { env, cwd, .. } = launch.surroundings;
    let program = launch.args.first();
    program.is_none_or(|program| at_hand::starts(program, search(env), cwd.as_ref()))
}

fn search(env: &Env) -> &OsStr {
    env.get("PATH").map_or(OsStr::new(""), Text::as_ref)
}

fn direct(launch: Launch<'_>) -> Outcome<Pid> {
    let Surroundings { env, cwd, .. } = launch.surroundings;
    check_directory(cwd)?;
    let [program, args @ ..] = launch.args else {
        return Err(invalid("args", "names no program"));
    };
    let path = resolve(program, search(env), cwd.as_ref())?;
    let mut command = Command::new(&path);
    command.arg0(program).args(args).env_clear().env("HOME", "/root").envs(env).process_group(0);
    if cwd.as_bytes() != b"/" {
        command.current_dir(cwd);
    }
    start(command, launch.standard, launch.keep, None)
        .map_err(|error| exec_failure(program, &error))
}

fn staged(launch: Launch<'_>) -> Outcome<(Pid, File)> {
    let io_failure = |error: io::Error| refused("cannot start a process", &error);
    let (verdict, report) = pipe2(OFlag::O_CLOEXEC).map_err(|errno| io_failure(errno.into()))?;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg("stage")
        .arg(report.as_raw_fd().to_string())
        .arg(&launch.surroundings.user)
        .arg(&launch.surroundings.cwd)
        .arg(if launch.tty { "tty" } else { "-" })
        .args(launch.args)
        .env_clear()
        .envs(&launch.surroundings.env);
    let pid = start(command, launch.standard, launch.keep, Some(&report)).map_err(io_failure)?;
    set_nonblocking(&verdict).map_err(io_failure)?;
    Ok((pid, File::from(verdict)))
}

fn start(
    mut command: Command,
    standard: Standard,
    keep: Option<&OwnedFd>,
    report: Option<&OwnedFd>,
) -> io::Result<Pid> {
    command.stdin(standard.stdin).stdout(standard.stdout).stderr(standard.stderr);
    for fd in [keep, report].into_iter().flatten() {
        fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
    }
    let pid = with_signals(|| command.spawn())?.id();
    for fd in [keep, report].into_iter().flatten() {
        fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    }
    Ok(Pid::from_raw(i32::try_from(pid).map_err(io::Error::other)?))
}

/// Runs `spawn` with the signals unblocked that the poll loop keeps blocked, since children inherit
/// the mask.  One that comes meanwhile is lost: the caller looks for ended children after each
/// start.
fn with_signals<T>(spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.thread_unblock()?;
    let spawned = spawn();
    mask.thread_block()?;
    spawned
}

/// Finds the file to execute, as `execvp` would.
///
/// # Errors
///
/// `not_found`; `permission_denied` if all that was found is not executable.
pub fn resolve(program: &OsStr, search: &OsStr, cwd: &Path) -> Outcome<PathBuf> {
    let mut denied = false;
    for path in candidates(program, search, cwd) {
        match fs::metadata(&path) {
            Ok(found) if found.is_file() && found.permissions().mode() & EXECUTABLE != 0 => {
                return Ok(path);
            }
            Ok(_) => denied = true,
            Err(error) => denied |= error.kind() == io::ErrorKind::PermissionDenied,
        }
    }
    let program = program.display();
    Err(if denied {
        failure(ErrorCode::PermissionDenied, format!("{program}: not executable"))
    } else {
        failure(ErrorCode::NotFound, format!("{program}: no such program"))
    })
}

/// Where the file to execute may be; the first that is executable counts.
pub fn candidates(program: &OsStr, search: &OsStr, cwd: &Path) -> Vec<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return vec![cwd.join(program)];
    }
    let folders = search.as_bytes().split(|byte| *byte == b':').map(OsStr::from_bytes);
    folders.map(|folder| cwd.join(folder).join(program)).collect()
}

/// Whether a process can start in `cwd`.
///
/// # Errors
///
/// `invalid_request`, naming `cwd`.
pub fn check_directory(cwd: &OsStr) -> Outcome<()> {
    match fs::metadata(cwd) {
        Ok(found) if found.is_dir() => Ok(()),
        Ok(_) => Err(invalid("cwd", format!("{}: not a directory", cwd.display()))),
        Err(error) => Err(invalid("cwd", format!("{}: {error}", cwd.display()))),
    }
}

/// Why the kernel would not execute a program that exists.
pub fn exec_failure(program: &OsStr, error: &io::Error) -> ErrorBody {
    let code = match code_of(error) {
        code @ (ErrorCode::PermissionDenied | ErrorCode::Busy) => code,
        _ => ErrorCode::ExecFailed,
    };
    failure(code, format!("{}: {error}", program.display()))
}

/// Makes reads and writes of the poll loop's end of a pipe return at once.
///
/// # Errors
///
/// The kernel refused, which it never does.
pub fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_along_the_path() {
        let found = resolve("sh".as_ref(), "/nowhere:/bin".as_ref(), Path::new("/")).unwrap();
        assert_eq!(found, Path::new("/bin/sh"));
    }

    #[test]
    fn what_does_not_exist_and_what_may_not_run_are_two_errors() {
        let code = |program: &str| {
            resolve(program.as_ref(), "/bin".as_ref(), Path::new("/")).unwrap_err().code
        };
        assert_eq!(code("no-such-program"), ErrorCode::NotFound);
        assert_eq!(code("/no/such/program"), ErrorCode::NotFound);
        assert_eq!(code("/etc/passwd"), ErrorCode::PermissionDenied);
        assert_eq!(code("/etc"), ErrorCode::PermissionDenied);
    }

    #[test]
    fn a_relative_program_is_relative_to_the_directory_it_starts_in() {
        assert!(resolve("./sh".as_ref(), "".as_ref(), Path::new("/bin")).is_ok());
        assert!(resolve("./sh".as_ref(), "".as_ref(), Path::new("/")).is_err());
    }
}
