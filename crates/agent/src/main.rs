//! forkd's agent: what runs inside every guest, and answers for it.
//!
//! One static program with six roles, told apart by how it is called:
//!
//! | called as                    | role                                                   |
//! |------------------------------|--------------------------------------------------------|
//! | `/init`                      | [`init`]: loads modules, mounts the root, starts the agent |
//! | `forkd-agent agent`          | the agent of a guest, on vsock                         |
//! | `forkd-agent serve --unix P` | the agent without a guest, for development and tests   |
//! | `forkd-agent stage …`        | [`stage`]: becomes a user's process                    |
//! | `forkd-agent shell FD`       | [`shell`]: the shell as a warm runtime                 |
//! | `modprobe …`                 | [`modprobe`]: loads kernel modules, if the image cannot |
//!
//! One thread and one poll loop ([`server`]) serve everybody, because a fork pays for each page
//! that is touched: a thread's stack is pages, and so is a wake-up.  Only what may block on a disk
//! gets a thread, for as long as it lasts.

#![deny(unsafe_code)]

use std::ffi::OsString;
use std::process::ExitCode;

mod at_hand;
mod boot;
mod cgroup;
mod child;
mod clock;
mod conn;
mod connect;
mod copy;
mod disk;
mod entropy;
mod exec;
mod failure;
mod files;
mod fork;
mod freeze;
mod identity;
mod image;
mod init;
mod log;
mod memory;
mod modprobe;
mod mounts;
mod netlink;
mod oom;
mod processes;
mod quiesce;
mod rlimits;
mod runtime;
mod server;
mod shell;
mod sinks;
mod spawn;
mod stage;
mod stream;
mod systemd;
mod terminal;
mod users;
mod warm;
mod watch;

fn main() -> ExitCode {
    let raw: Vec<OsString> = std::env::args_os().collect();
    if let [_, role, rest @ ..] = raw.as_slice()
        && role == "stage"
    {
        return stage::run(rest);
    }
    let args: Vec<String> = raw.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["/init", ..] => init::run(),
        [name, rest @ ..] if is_called(name, "modprobe") => modprobe::run(rest),
        [_, "shell", fd] => shell::run(fd),
        [_, "agent"] => boot::guest(),
        [_, "serve", "--unix", path, rest @ ..] => boot::host(path, rest),
        _ => {
            eprintln!("usage: forkd-agent agent | serve --unix PATH [--state DIR]");
            ExitCode::from(2)
        }
    }
}

/// Whether this program was started by the name `role`, wherever it lies.
fn is_called(name: &str, role: &str) -> bool {
    name.rsplit('/').next() == Some(role)
}
