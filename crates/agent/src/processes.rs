//! Which programs run in this guest.

use std::fs;
use std::io;

use nix::unistd::Pid;

/// Of a process: it is a thread of the kernel's (`include/linux/sched.h`).
const PF_KTHREAD: u64 = 0x0020_0000;

/// Where the flags are in `/proc/PID/stat`, counted from its third field (proc(5)).
const FLAGS_AT: usize = 6;

/// Whether no program runs but those that are `known`.  Threads of the kernel and processes that
/// have ended are no programs.
///
/// # Errors
///
/// There is no `/proc`.
pub fn none_but(known: &[Pid]) -> io::Result<bool> {
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if known.contains(&Pid::from_raw(pid)) {
            continue;
        }
        // One that has ended in the meantime has no file any more.
        if fs::read(format!("/proc/{pid}/stat")).is_ok_and(|stat| is_program(&stat)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What cannot be understood is taken for a program.
fn is_program(stat: &[u8]) -> bool {
    let stat = String::from_utf8_lossy(stat);
    // The name before it, in brackets, may hold any character.
    let Some((_, fields)) = stat.rsplit_once(')') else { return true };
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next();
    let flags = fields.nth(FLAGS_AT - 1).and_then(|field| field.parse::<u64>().ok());
    let is_kernels = flags.is_some_and(|flags| flags & PF_KTHREAD != 0);
    !matches!(state, Some("Z" | "X")) && !is_kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_the_kernel_and_the_dead_are_no_programs() {
        for (stat, expected) in [
            ("10 (kworker/0:1-events) I 2 0 0 0 -1 69238880 0", false),
            ("70 (sh) Z 1 70 70 0 -1 4194316 0", false),
            ("71 (sleep) S 1 71 71 0 -1 4194304 0", true),
            // A name that looks like what follows a name.
            ("72 (x) Z 2 0 0 0 -1 69238880) S 1 72 72 0 -1 4194304 0", true),
            ("73 (sleep) S 1", true),
            ("", true),
        ] {
            assert_eq!(is_program(stat.as_bytes()), expected, "{stat}");
        }
    }

    #[test]
    fn a_program_that_is_not_known_is_found() {
        let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
        let known = entries.filter_map(|name| name.to_str()?.parse().ok()).map(Pid::from_raw);
        let known: Vec<Pid> = known.collect();
        let mut sleep = std::process::Command::new("sleep").arg("600").spawn().unwrap();

        let found = !none_but(&known).unwrap();

        sleep.kill().unwrap();
        sleep.wait().unwrap();
        assert!(found);
    }
}
