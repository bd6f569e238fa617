//! The serial console's log: a file that a talkative guest cannot grow without end.
//!
//! Two files of at most [`LOG_BYTES_MAX`] each: `console.log`, and `console.log.1` with
//! what came before.  The file is made on the first byte, so a silent fork has none.

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

/// Largest size of each of the two files, in bytes.
pub const LOG_BYTES_MAX: u64 = 512 << 10;

/// Bytes of a console that go into a message.
const TAIL_BYTES: usize = 700;

/// What Linux prints before it stops its processors for good (`kernel_halt`), at any log level.
const HALTED: &[u8] = b"reboot: System halted";

/// What Linux prints when it panics, likewise.
const PANICKED: &[u8] = b"Kernel panic - not syncing";

/// Looks for a phrase in a stream of bytes.  The phrase's first byte is in it only once, or a match
/// could be missed.
#[derive(Debug)]
struct Phrase {
    bytes: &'static [u8],
    matched: usize,
    heard: bool,
}

impl Phrase {
    fn new(bytes: &'static [u8]) -> Self {
        Self { bytes, matched: 0, heard: false }
    }

    fn listen(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.matched = match self.bytes {
                phrase if phrase[self.matched] == *byte => self.matched + 1,
                phrase => usize::from(phrase[0] == *byte),
            };
            if self.matched == self.bytes.len() {
                (self.matched, self.heard) = (0, true);
            }
        }
    }
}

/// Where the guest's serial output goes.
#[derive(Debug)]
pub struct ConsoleLog {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
    halted: Phrase,
    panicked: Phrase,
}

impl ConsoleLog {
    /// A log at `path`.  Touches nothing yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        let (halted, panicked) = (Phrase::new(HALTED), Phrase::new(PANICKED));
        Self { path, file: None, bytes: 0, halted, panicked }
    }

    /// Whether the guest has said that it halts.  Says so once.  Any program of the guest may have
    /// printed it.
    pub fn take_halted(&mut self) -> bool {
        std::mem::take(&mut self.halted.heard)
    }

    /// Whether the guest has said that its kernel panicked.
    #[must_use]
    pub fn has_panicked(&self) -> bool {
        self.panicked.heard
    }

    /// Takes the log out, to go on elsewhere; what stays behind is a log of the same name.  Neither
    /// knows what the guest has said.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let path = self.path.clone();
        let mut taken = std::mem::replace(self, Self::new(path));
        (taken.halted, taken.panicked) = (Phrase::new(HALTED), Phrase::new(PANICKED));
        taken
    }

    fn rotate(&mut self) -> io::Result<()> {
        std::fs::rename(&self.path, self.path.with_extension("log.1"))?;
        self.file = None;
        self.bytes = 0;
        Ok(())
    }
}

impl Write for ConsoleLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // First: what is said counts although the disk is full.
        self.halted.listen(bytes);
        self.panicked.listen(bytes);
        if self.file.is_some() && self.bytes >= LOG_BYTES_MAX {
            self.rotate()?;
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(File::options().create(true).append(true).open(&self.path)?),
        };
        let written = file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the guest in `directory` said last, to be appended to a message; empty if it said nothing.
#[must_use]
pub fn tail(directory: &std::path::Path) -> String {
    let Ok(log) = std::fs::read(directory.join("console.log")) else { return String::new() };
    let last = &log[log.len().saturating_sub(TAIL_BYTES)..];
    format!("; its console: {}", String::from_utf8_lossy(last).trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log that nobody can write to, as on a full disk.
    fn unwritable() -> ConsoleLog {
        ConsoleLog::new(PathBuf::from("/nowhere/console.log"))
    }

    /// Writes as a serial port does.
    fn say(log: &mut ConsoleLog, text: &str) {
        text.bytes().for_each(|byte| drop(log.write(&[byte])));
    }

    #[test]
    fn a_guest_that_says_that_it_halts_is_heard_once_also_on_a_full_disk() {
        let mut log = unwritable();
        say(&mut log, "rereboot: System halte\nreboot: Restarting system\n");
        assert!(!log.take_halted());

        say(&mut log, "[    1.5] reboot: rreboot: System halted\r\n");

        assert!(log.take_halted());
        assert!(!log.take_halted() && !log.has_panicked());
    }

    #[test]
    fn a_panic_is_known_until_the_log_goes_on_elsewhere() {
        let mut log = unwritable();

        say(&mut log, "KKernel panic - not syncing: sysrq triggered crash\n");

        assert!(log.has_panicked() && log.has_panicked() && !log.take_halted());
        assert!(!log.take().has_panicked());
        assert!(!log.has_panicked());
    }

    #[test]
    fn a_talkative_guest_gets_two_files_of_bounded_size() {
        let folder = std::env::temp_dir().join(format!("forkd-console-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut log = ConsoleLog::new(folder.join("console.log"));

        for _ in 0..(3 * LOG_BYTES_MAX / 1024) {
            log.write_all(&[b'x'; 1024]).unwrap();
        }

        let sizes: Vec<u64> = ["console.log", "console.log.1"]
            .iter()
            .map(|name| std::fs::metadata(folder.join(name)).unwrap().len())
            .collect();
        std::fs::remove_dir_all(folder).unwrap();
        assert_eq!(sizes, [LOG_BYTES_MAX, LOG_BYTES_MAX]);
    }
}
