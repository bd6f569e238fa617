//! `forkd-floor`: what forking and branching machines costs before forkd adds anything.
//!
//! ```text
//! forkd-floor [--n 100] [--repeat 4] [--touch 64]
//! forkd-floor branch --dirty-mib 256
//! ```
//!
//! The first: a process that maps a 256 MiB image (100 MiB of it resident) copy-on-write forks `n`
//! children.  Each child creates a KVM machine over its own view, dirties `touch` pages from inside
//! the guest and answers with one I/O exit.  The clock runs from before the first fork until the
//! last answer, while every child is still alive.  Then all are let go, waited for, and the next
//! round begins.  One round more than `repeat` is run: the first is cold, and is reported as
//! `cold_ms` but counts for nothing else.  The result is one line of JSON; `child_ms_*` are the
//! latencies of single children, each from its own fork to its answer.  With `--n 1` that is the
//! floor of one child alone.
//!
//! The second: a machine with one vCPU that writes to each page of `dirty-mib` in turn, without
//! end.  For each line on standard input it is branched once (stopped, its registers read, its
//! process forked, let go), and says in one line of JSON how long that took; `branch.rs` has the
//! clocks.

mod branch;
mod guest;
mod spawn;
mod words;

fn main() -> Result<(), guest::Failure> {
    let mut words = std::env::args().skip(1).peekable();
    if words.next_if(|word| word == "branch").is_some() {
        return branch::run(words);
    }
    println!("{}", spawn::run(words)?);
    Ok(())
}
