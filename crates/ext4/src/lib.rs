//! Reads the ext4 that guests leave on their disks, and says how two of them differ.
//!
//! ```text
//!   compare      walks two trees side by side: added, changed, removed
//!      │
//!   folder       the entries of a folder
//!   extents      which block of the disk holds which block of a file
//!   volume       superblock, groups, inodes
//!      │
//!   Disk         what the caller gives: bytes at an offset
//! ```
//!
//! # Trust
//!
//! Every byte of the disk is a guest's choice.  None of them reaches a panic, an endless loop or
//! an allocation beyond a named limit; what breaks the rules of ext4 is an [`Error`] that says
//! where.  Checksums are not looked at: whoever writes the disk writes those, too.
//!
//! # What it reads
//!
//! File systems as forkd makes them: blocks of 4 KiB, files made of extents.  Of one with a journal
//! what the journal holds is not seen, so it must have been written back.

#![forbid(unsafe_code)]

use std::fmt;
use std::io;

pub mod compare;
mod extents;
mod folder;
mod volume;

pub use volume::{Inode, Kind, Volume};

/// Bytes of a block.
pub const BLOCK_BYTES: u64 = 4096;

/// A disk that is only read.
pub trait Disk {
    /// Fills `buffer` from `offset` on.
    ///
    /// # Errors
    ///
    /// It could not, or the disk ends before.
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Disk for &[u8] {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|offset| self.get(offset..));
        match from.and_then(|bytes| bytes.get(..buffer.len())) {
            Some(bytes) => buffer.copy_from_slice(bytes),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        Ok(())
    }
}

/// Why a file system could not be read.
#[derive(Debug)]
pub enum Error {
    /// The disk could not be read.
    Io(io::Error),
    /// It breaks a rule of ext4; says which.
    Damaged(String),
    /// It is none, or uses what this does not read; says what.
    Unsupported(String),
    /// It is larger than a limit; says which.
    TooMuch(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(source) => write!(f, "it cannot be read: {source}"),
            Self::Damaged(what) => write!(f, "it is damaged: {what}"),
            Self::Unsupported(what) | Self::TooMuch(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(source) => Some(source),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(source: io::Error) -> Self {
        Self::Io(source)
    }
}

fn damaged(what: impl Into<String>) -> Error {
    Error::Damaged(what.into())
}

/// The integer of two bytes at `at`; 0 beyond the end.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes)
}

/// The integer of four bytes at `at`; 0 beyond the end.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}
