//! The files that a machine may have made in its folder before it failed.

use std::path::{Path, PathBuf};

/// What the guest said.
const CONSOLE: &str = "console.log";
/// All that there may be.
const FILES: [&str; 4] = ["control.sock", "vsock.sock", CONSOLE, "console.log.1"];

/// Removes what a failed attempt has left but its console, which is kept under another name.
pub(super) fn set_aside(directory: &Path, attempt: u32) {
    // A guest that said nothing has none.
    drop(std::fs::rename(directory.join(CONSOLE), console_of(directory, attempt)));
    remove(directory);
}

/// Removes what a failed attempt, and those before it, have left.
pub(super) fn remove_all(directory: &Path, attempts: u32) {
    remove(directory);
    for attempt in 1..attempts {
        drop(std::fs::remove_file(console_of(directory, attempt)));
    }
}

fn remove(directory: &Path) {
    for name in FILES {
        // Most were never made.
        drop(std::fs::remove_file(directory.join(name)));
    }
}

fn console_of(directory: &Path, attempt: u32) -> PathBuf {
    directory.join(format!("{CONSOLE}.attempt-{attempt}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_of_an_attempt_is_kept_until_the_last_one_has_failed() {
        let folder = std::env::temp_dir().join(format!("forkd-leavings-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let fill = || FILES.map(|name| std::fs::write(folder.join(name), name).unwrap());
        let names = || {
            let entries = std::fs::read_dir(&folder).unwrap();
            entries.map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>()
        };
        fill();

        set_aside(&folder, 1);
        assert_eq!(names(), ["console.log.attempt-1"]);
        fill();
        remove_all(&folder, 2);

        assert!(names().is_empty());
        std::fs::remove_dir(folder).unwrap();
    }
}
