//! What could not be copied: as much of it as fits an answer.

use std::path::Path;

use forkd_proto::guest::SkippedEntry;

/// Most bytes of names and reasons that are kept; further ones are counted.
const BYTES_MAX: usize = 32 << 10;

/// What was left out of a copy.
#[derive(Debug, Default)]
pub struct Skipped {
    /// The first ones.
    pub entries: Vec<SkippedEntry>,
    /// How many there were besides.
    pub more: u64,
    bytes: usize,
}

impl Skipped {
    /// Notes that `path` was left out.
    pub fn add(&mut self, path: &Path, reason: &str) {
        let entry =
            SkippedEntry { path: path.to_string_lossy().into_owned(), reason: reason.to_owned() };
        self.bytes += entry.path.len() + entry.reason.len();
        if self.bytes > BYTES_MAX {
            self.more += 1;
        } else {
            self.entries.push(entry);
        }
    }
}
