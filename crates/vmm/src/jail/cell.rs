//! A cell: the jail of a program that is not the VMM, such as what builds images or reads packs.
//!
//! Three processes.  The first stays outside, as it was: it writes the maps of the user namespace
//! and waits.  The second has left all of the host's namespaces, is the first process of its own,
//! and ends all others of the cell when it ends.  The third is the program.
//!
//! ```text
//! forkd-vmm cell ── waits ── forkd-vmm, pid 1 ── reaps ── the program
//! ```
//!
//! All three end with whoever started the first.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use forkd_proto::cell::CellConfig;

use crate::error::Error;
use crate::jail::namespaces::{self, HARMLESS, make_folder};
use crate::jail::{denied, rights, trees};
use crate::sys::descriptors;
use crate::sys::process::{self, Forked};

/// Where the new root is put together; nothing of it is needed until there is another.
const SPARE: &str = "/proc";
const ROOT_OPTIONS: &str = "mode=0755,size=1m,nr_inodes=4k";
/// Of files in memory that the program makes; they count against its cgroup.
const TMP_OPTIONS: &str = "mode=1777,size=1g,nr_inodes=64k";
const NO_DEVICES: libc::c_ulong = libc::MS_NOSUID | libc::MS_NODEV;

const DEVICES: [&str; 6] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];
const LINKS: [(&str, &str); 5] = [
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
    ("/dev/ptmx", "pts/ptmx"),
];
const IN_MEMORY: [&str; 4] = ["/tmp", "/run", "/dev/shm", "/var/tmp"];
/// Terminals of the cell's own.
const TERMINALS: &str = "newinstance,ptmxmode=0666,mode=0620";

/// Of what a program would be told that was killed by a signal: its number and this, as by a shell.
const KILLED: i32 = 128;

/// Runs a program in the cell that `config` describes as JSON, and ends as it has ended.
///
/// # Errors
///
/// [`Error::Request`]; [`Error::Io`] naming what the kernel refused.  Without a cell nothing runs.
pub fn run(config: &str, command: &[&str]) -> Result<(), Error> {
    process::exit_now(status_in(&CellConfig::parse(config.as_bytes())?, command)?)
}

/// Runs a program in a cell, and returns the status to end with.
fn status_in(config: &CellConfig, command: &[&str]) -> Result<i32, Error> {
    let cgroup = config.cgroup.as_deref().map(process::open_cgroup).transpose()?;
    namespaces::unshare(libc::CLONE_NEWPID, "unshare pid namespaces")?;
    let (mut left, mut told_left) = descriptors::pipe()?;
    let (mut go, mut may_go) = descriptors::pipe()?;
    match process::fork_into(cgroup.as_ref())? {
        Forked::Child => {
            drop((left, may_go, cgroup));
            enter(config)?;
            told_left.write_all(&[1]).map_err(Error::io("tell of a user namespace"))?;
            // Whoever waits outside may have ended before we could ask to end with it.
            become_inmate(config, &mut go)?;
            serve(command)
        }
        Forked::Parent(pid) => {
            drop((told_left, go));
            if left.read_exact(&mut [0]).is_ok() {
                if config.uid_count > 1 {
                    write_maps(pid, config)?;
                }
                // It has ended, and said why, if it does not hear of this.
                drop(may_go.write_all(&[1]));
            }
            let status = wait_for(pid)?;
            drop(may_go);
            Ok(status)
        }
    }
}

fn enter(config: &CellConfig) -> Result<(), Error> {
    let network = if config.network { 0 } else { libc::CLONE_NEWNET };
    let others = libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;
    let left = libc::CLONE_NEWNS | others | network;
    namespaces::leave(left, "unshare mount, IPC, UTS, cgroup and network namespaces")?;
    let reading = config.read.iter().map(|path| (path.as_path(), false));
    let devices = DEVICES.iter().map(|path| (Path::new(*path), false));
    let writing = config.write.iter().map(|path| (path.as_path(), true));
    let mut all: Vec<(&Path, bool)> = reading.chain(devices).chain(writing).collect();
    all.sort_by_key(|(path, _)| path.components().count()); // what is above comes first
    let taken: Vec<_> = all
        .into_iter()
        .map(|(path, writable)| Ok((path, trees::take(path, writable)?)))
        .collect::<Result<_, Error>>()?;
    let spare = Path::new(SPARE);
    namespaces::mount(Some(Path::new("forkd")), spare, Some("tmpfs"), HARMLESS, ROOT_OPTIONS)?;
    let below = |path: &Path| spare.join(path.strip_prefix("/").unwrap_or(path));
    for path in IN_MEMORY.iter().map(Path::new) {
        let options = if path == Path::new("/run") { ROOT_OPTIONS } else { TMP_OPTIONS };
        make_folder(&below(path))?;
        let tmpfs = Some(Path::new("tmpfs"));
        namespaces::mount(tmpfs, &below(path), Some("tmpfs"), NO_DEVICES, options)?;
    }
    let terminals = below(Path::new("/dev/pts"));
    make_folder(&terminals)?;
    let devpts = Some(Path::new("devpts"));
    namespaces::mount(
        devpts,
        &terminals,
        Some("devpts"),
        libc::MS_NOSUID | libc::MS_NOEXEC,
        TERMINALS,
    )?;
    for (path, target) in LINKS {
        symlink(target, below(Path::new(path))).map_err(Error::io(format!("link {path}")))?;
    }
    taken.iter().try_for_each(|(path, tree)| trees::put(tree, &below(path)))?;
    let proc = below(Path::new("/proc"));
    make_folder(&proc)?;
    namespaces::mount(Some(Path::new("proc")), &proc, Some("proc"), HARMLESS, "")?;
    namespaces::enter_root(spare)?;
    if config.uid_count > 1 {
        let both = libc::CLONE_NEWUSER | libc::CLONE_NEWNS;
        return namespaces::unshare(both, "unshare user and mount namespaces");
    }
    Ok(())
}

/// Gives up the rights that the program is not to have, once the maps are written.
fn become_inmate(config: &CellConfig, go: &mut File) -> Result<(), Error> {
    let of_its_own = config.uid_count > 1;
    let wait = |go: &mut File| {
        let waited = go.read_exact(&mut [0]);
        waited.map_err(Error::io("wait to be let into a cell"))
    };
    if of_its_own {
        wait(go)?;
        rights::become_root_inside()?;
    } else {
        rights::become_inmate(config.uid)?;
    }
    // Changing users forgets it.
    rights::set(libc::PR_SET_PDEATHSIG, libc::SIGKILL.unsigned_abs().into(), "die with a parent")?;
    if !of_its_own {
        wait(go)?;
    }
    denied::put_on(of_its_own)
}

/// Starts the program, and reaps all that ends until it has ended.
fn serve(command: &[&str]) -> Result<i32, Error> {
    match process::fork_into(None)? {
        Forked::Child => Err(execute(command)),
        Forked::Parent(program) => wait_for_all(program),
    }
}

fn execute(command: &[&str]) -> Error {
    let words: Result<Vec<CString>, _> =
        command.iter().map(|word| CString::new(word.as_bytes())).collect();
    let Ok(words) = words else {
        return Error::Invalid { field: "command", problem: "a word has a NUL in it".to_owned() };
    };
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    let Some(first) = words.first() else {
        return Error::Invalid { field: "command", problem: "there is none".to_owned() };
    };
    // SAFETY: the words end in NUL, their list in a null pointer, and both outlive the call.
    unsafe { libc::execvp(first.as_ptr(), pointers.as_ptr()) };
    Error::last_os(format!("start {}", command.first().unwrap_or(&"")))
}

fn wait_for_all(program: libc::pid_t) -> Result<i32, Error> {
    process::let_go_of_streams()?;
    loop {
        let (pid, status) = process::wait(-1)?;
        if pid == program {
            return Ok(status_of(status));
        }
    }
}

fn wait_for(pid: libc::pid_t) -> Result<i32, Error> {
    process::let_go_of_streams()?;
    process::wait(pid).map(|(_, status)| status_of(status))
}

fn status_of(status: i32) -> i32 {
    let ended = ExitStatus::from_raw(status);
    ended.code().unwrap_or_else(|| KILLED + ended.signal().unwrap_or_default())
}

fn write_maps(pid: libc::pid_t, config: &CellConfig) -> Result<(), Error> {
    let map = format!("0 {} {}\n", config.uid, config.uid_count);
    for name in ["uid_map", "gid_map"] {
        let path = PathBuf::from(format!("/proc/{pid}/{name}"));
        std::fs::write(&path, &map).map_err(Error::io(format!("write {}", path.display())))?;
    }
    Ok(())
}
