//! The moment between fork and exec: becomes the user, the session and the directory that a process
//! shall have.
//!
//! `forkd-agent stage REPORT-FD USER CWD tty|- PROGRAM ARGUMENTS…`, with the environment of the
//! program.  What goes wrong is written to REPORT-FD as the body of an ERROR frame; when the
//! program runs, the descriptor closes without a word.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use nix::unistd::{Gid, Uid, setgroups, setresgid, setresuid, setsid};

use crate::failure::{Outcome, invalid, refused};
use crate::spawn::{check_directory, exec_failure, resolve};
use crate::users::{self, User};

/// Becomes the program, or says why not.
pub fn run(args: &[OsString]) -> ExitCode {
    let [report, user, cwd, tty, program, rest @ ..] = args else {
        eprintln!("usage: forkd-agent stage REPORT-FD USER CWD tty|- PROGRAM ARGUMENTS…");
        return ExitCode::from(2);
    };
    let (report, user) = (report.to_string_lossy(), user.to_string_lossy());
    // Opening it anew gives a descriptor that closes on exec, without adopting a number.
    let Ok(mut report_file) = File::options().write(true).open(format!("/proc/self/fd/{report}"))
    else {
        return ExitCode::from(2);
    };
    let closed = report.parse::<i32>().map(nix::unistd::close);
    let failed = match closed {
        Ok(Ok(())) => become_program(&user, cwd, tty == "tty", program, rest),
        _ => invalid("report", "not a descriptor"),
    };
    let json = serde_json::to_vec(&failed).unwrap_or_default();
    if report_file.write_all(&json).is_err() {
        // Nobody waits for the report; whoever reads our standard error may want to know.
        eprintln!("{}", failed.message);
    }
    ExitCode::from(127)
}

/// Returns only with the reason why the program does not run.
fn become_program(
    user: &str,
    cwd: &OsStr,
    tty: bool,
    program: &OsStr,
    args: &[OsString],
) -> forkd_proto::guest::ErrorBody {
    match prepare(user, cwd, tty, program) {
        Ok((path, home)) => {
            let mut command = Command::new(path);
            command.arg0(program).args(args);
            for (name, value) in home {
                if env::var_os(name).is_none() {
                    command.env(name, value);
                }
            }
            exec_failure(program, &command.exec())
        }
        Err(failed) => failed,
    }
}

type UserEnv = Vec<(&'static str, String)>;

fn prepare(
    user: &str,
    cwd: &OsStr,
    tty: bool,
    program: &OsStr,
) -> Outcome<(std::path::PathBuf, UserEnv)> {
    enter_session(tty).map_err(|error| refused("cannot start a session", &error))?;
    let mut home = vec![("HOME", "/root".to_owned())];
    if tty {
        home.push(("TERM", "xterm-256color".to_owned()));
    }
    if !users::is_root(user) {
        let user = users::find(user, Path::new("/etc"))?;
        assume(&user).map_err(|error| refused("cannot become the user", &error.into()))?;
        home.insert(0, ("HOME", user.home));
        home.extend(user.name.iter().flat_map(|n| [("USER", n.clone()), ("LOGNAME", n.clone())]));
    }
    check_directory(cwd)?;
    env::set_current_dir(cwd)
        .map_err(|error| invalid("cwd", format!("{}: {error}", cwd.display())))?;
    let search = env::var_os("PATH").unwrap_or_default();
    Ok((resolve(program, &search, Path::new(cwd))?, dedup(home)))
}

/// The first value of each name.
fn dedup(pairs: UserEnv) -> UserEnv {
    let mut kept: UserEnv = Vec::new();
    for (name, value) in pairs {
        if kept.iter().all(|(known, _)| *known != name) {
            kept.push((name, value));
        }
    }
    kept
}

fn enter_session(tty: bool) -> io::Result<()> {
    setsid()?;
    if tty {
        rustix::process::ioctl_tiocsctty(io::stdin())?;
    }
    Ok(())
}

fn assume(user: &User) -> nix::Result<()> {
    let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
    let (gid, uid) = (Gid::from_raw(user.gid), Uid::from_raw(user.uid));
    setgroups(&groups)?;
    setresgid(gid, gid, gid)?;
    setresuid(uid, uid, uid)
}
