//! Filters of system calls (seccomp): what each kind of thread may ask the kernel.
//!
//! A process puts [`Role::Process`] on before it reads the first byte of a snapshot.  Whatever it
//! forks has the same filter for nothing.  Threads and processes that need less put a narrower one
//! on top: the kernel asks all of them, and nothing takes one off again.
//!
//! A call that is in no list is not made; the process says which it was and dies ([`violation`]).
//! Those of another architecture, i386, end it at once; those of x32 are in no list.

mod lists;
mod names;
mod program;
mod violation;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use seccompiler::BpfProgram;

use crate::error::Error;
pub use violation::log_to;

const PUT_ON: &str = "put on a filter of system calls";

/// Whether filters are put on at all.
static WANTED: AtomicBool = AtomicBool::new(true);

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The first thread of a zygote, of a machine, of a seed: it loads, forks, and serves.
    Process,
    /// Runs a vCPU, and the devices that the guest rings for.
    Vcpu,
    /// A process that writes out what its zygote holds.
    Writer,
    /// A retired seed, which only holds memory.
    Holder,
    /// A process that compares disks, once they are open.
    Comparer,
}

/// What this process was started with, but for `--no-filter` at the end: that has [`put_on`] do
/// nothing, in this process and in those that it forks.
#[must_use]
pub fn arguments() -> Vec<String> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.pop_if(|last| last == "--no-filter").is_some() {
        WANTED.store(false, Ordering::Relaxed);
    }
    arguments
}

/// Confines the calling thread, and what it starts from now on, to what `role` needs.
///
/// # Errors
///
/// [`Error::Io`] if the kernel refuses, and the thread must not go on then.
pub fn put_on(role: Role) -> Result<(), Error> {
    if !WANTED.load(Ordering::Relaxed) {
        return Ok(());
    }
    if role == Role::Process || role == Role::Comparer {
        violation::handle()?;
    }
    let program = match role {
        // Before a zygote forks, so that its children need not.
        Role::Process => prepared_vcpu().and_then(|_| compile(role))?,
        Role::Vcpu => of_this_process(prepared_vcpu()?),
        _ => of_this_process(&compile(role)?),
    };
    seccompiler::apply_filter(&program).map_err(failed)
}

/// Stands for the id of the process in programs that were made before it was known: no process
/// has this one.
const ANY_PID: u32 = 0x7fff_fff1;

fn prepared_vcpu() -> Result<&'static BpfProgram, Error> {
    static PROGRAM: OnceLock<BpfProgram> = OnceLock::new();
    match PROGRAM.get() {
        Some(program) => Ok(program),
        None => compile(Role::Vcpu).map(|program| PROGRAM.get_or_init(|| program)),
    }
}

fn of_this_process(program: &BpfProgram) -> BpfProgram {
    let mut program = program.clone();
    for instruction in program.iter_mut().filter(|instruction| instruction.k == ANY_PID) {
        instruction.k = std::process::id();
    }
    program
}

fn compile(role: Role) -> Result<BpfProgram, Error> {
    program::of(role.list()).map_err(|program::Unfit| {
        let source = std::io::Error::other("a list is too long for a program");
        Error::Io { what: PUT_ON.into(), source }
    })
}

fn failed(error: seccompiler::Error) -> Error {
    let source = match error {
        seccompiler::Error::Prctl(source) | seccompiler::Error::Seccomp(source) => source,
        other => std::io::Error::other(other),
    };
    Error::Io { what: PUT_ON.into(), source }
}

#[cfg(test)]
mod tests;
