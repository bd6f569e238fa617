//! forkd's witness: a program for a guest, that notices when a branch of it is unsound.
//!
//! Tests branch a machine in which it runs, and ask it in every sibling.  Its workers keep each
//! page of their memory and each block of their files a function of one sequence number, so that
//! at any instant all of it is known, up to the one record that each worker is writing; and
//! they move money between accounts, of which none may be lost, and no step be done twice.
//!
//! ```text
//!   forkd-witness run LOAD      keep the invariant; says "ready" when it does
//!   forkd-witness ask look      how far each worker is
//!   forkd-witness ask check     stop the workers, check all there is, have each take a step
//! ```
//!
//! | module       | what it keeps                                                  |
//! |--------------|----------------------------------------------------------------|
//! | [`page`]     | what a page holds: a function of its writer, place and number  |
//! | [`blocks`]   | files, read through the cache of the disk or past it            |
//! | [`region`]   | pages of memory, written in turn                               |
//! | [`ledger`]   | blocks of one file, written and synced in turn                 |
//! | [`folder`]   | whole files, replaced by renaming                              |
//! | [`children`] | processes, each of which checks the pages that it is given     |
//! | [`bank`]     | accounts between all of them, and who has done how many steps  |
//! | [`gate`]     | where workers stop between steps                               |
//! | [`duty`]     | what a worker does, whatever it keeps                          |
//! | [`load`]     | how many of what, in what hurry                                |
//! | [`run`]      | all of it together, and answers on a Unix socket               |
//! | [`kernel`]   | what the guest's kernel complains of                           |

#![forbid(unsafe_code)]

use std::io;
use std::process::ExitCode;

mod bank;
mod blocks;
mod children;
mod duty;
mod folder;
mod gate;
mod kernel;
mod ledger;
mod load;
mod page;
mod region;
mod report;
mod run;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        [_, "run", name] => load::Load::named(name)
            .ok_or_else(|| io::Error::other(format!("no load is called {name}")))
            .and_then(run::run),
        [_, "ask", question] => run::ask(question),
        [_, "child"] => children::check_given(),
        _ => Err(io::Error::other("usage: forkd-witness run LOAD | ask look | ask check")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("forkd-witness: {error}");
            ExitCode::FAILURE
        }
    }
}
