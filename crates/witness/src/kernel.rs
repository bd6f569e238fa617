//! What the guest's kernel complains of.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

/// `O_NONBLOCK`: the end of the log is an error, not a wait.
const NONBLOCK: i32 = 0o4_000;
/// Longest record that the kernel hands out.
const RECORD_BYTES_MAX: usize = 8192;

/// What a sound machine's kernel never says.
const WRONG: [&str; 9] = [
    "I/O error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "JBD2: ",
    "BUG: ",
    "Oops",
    "general protection",
    "Bad page",
    "WARNING: CPU",
];

/// What it says of a host that is slow.
const SLOW: [&str; 1] = ["soft lockup"];

/// The kernel's log, from when it was opened on.
#[derive(Debug)]
pub struct Log {
    file: File,
    complaints: Vec<String>,
}

impl Log {
    /// Opens it behind what is there: of a boot, a test has nothing to say.
    pub fn open() -> io::Result<Self> {
        let mut file = File::options().read(true).custom_flags(NONBLOCK).open("/dev/kmsg")?;
        file.seek(SeekFrom::End(0))?;
        Ok(Self { file, complaints: Vec::new() })
    }

    /// The lines that tell of something wrong.
    pub fn complaints(&mut self) -> io::Result<&[String]> {
        let mut record = [0; RECORD_BYTES_MAX];
        loop {
            match self.file.read(&mut record) {
                Ok(0) => return Ok(&self.complaints),
                Ok(length) => {
                    let record = String::from_utf8_lossy(&record[..length]);
                    self.complaints.extend(complaint(&record));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(&self.complaints);
                }
                // Records were overwritten before we came to them.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn complaint(record: &str) -> Option<String> {
    let message = record.split_once(';')?.1.lines().next()?;
    let has = |words: &[&str]| words.iter().any(|word| message.contains(word));
    (has(&WRONG) && !has(&SLOW)).then(|| message.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_tells_of_something_wrong_is_a_complaint() {
        let wrong = "3,512,99,-;EXT4-fs error (device vda): ext4_lookup\n SUBSYSTEM=block\n";
        assert_eq!(complaint(wrong).unwrap(), "EXT4-fs error (device vda): ext4_lookup");
        assert_eq!(complaint("6,5,99,-;EXT4-fs (vda): mounted filesystem"), None);
        assert_eq!(complaint("0,5,99,-;watchdog: BUG: soft lockup - CPU#0 stuck"), None);
    }
}
