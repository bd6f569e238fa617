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

/// Where the guest's serial output goes.
#[derive(Debug)]
pub struct ConsoleLog {
    path: PathBuf,
    file: Option<File>,
    bytes: u64,
}

impl ConsoleLog {
    /// A log at `path`.  Touches nothing yet.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self { path, file: None, bytes: 0 }
    }

    /// Takes the log out, to go on elsewhere; what stays behind is a log of the same name.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let path = self.path.clone();
        std::mem::replace(self, Self::new(path))
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
