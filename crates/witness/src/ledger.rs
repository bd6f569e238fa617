//! Blocks of one file, which one worker writes and syncs in turn.
//!
//! A block is on the disk before the step that wrote it counts.  So at any instant the file is at
//! the worker's number, or one block ahead, and a disk of another instant than the memory shows.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::blocks;
use crate::duty::Duty;
use crate::page::{self, BYTES, Place, WORDS};

/// A worker's file.
#[derive(Debug)]
pub struct Ledger {
    owner: u64,
    seq: u64,
    count: u64,
    path: PathBuf,
    file: File,
    direct: File,
}

impl Ledger {
    /// Makes a file of `count` blocks, each written once.
    pub fn new(owner: u64, count: u64, path: PathBuf) -> io::Result<Self> {
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        let direct = blocks::open_direct(&path)?;
        let ledger = Self { owner, seq: count - 1, count, path, file, direct };
        for index in 0..count {
            ledger.write(Place { owner, index }, index)?;
        }
        ledger.file.sync_all()?;
        Ok(ledger)
    }

    fn write(&self, place: Place, seq: u64) -> io::Result<()> {
        let (mut page, mut bytes) = ([0; WORDS], [0; BYTES]);
        page::fill(&mut page, place, seq);
        page::to_bytes(&page, &mut bytes);
        self.file.write_all_at(&bytes, place.index * BYTES as u64)
    }

    fn replace(&self, place: Place, seq: u64) -> io::Result<page::Page> {
        let before = blocks::read(&self.direct, place.index)?;
        self.write(place, seq)?;
        self.file.sync_data()?;
        Ok(before)
    }

    fn named(&self, error: impl std::fmt::Display) -> String {
        format!("{}: {error}", self.path.display())
    }
}

impl Duty for Ledger {
    fn seq(&self) -> u64 {
        self.seq
    }

    fn step(&mut self) -> Result<(), String> {
        let seq = self.seq + 1;
        let place = Place { owner: self.owner, index: seq % self.count };
        let before = self.replace(place, seq).map_err(|error| self.named(error))?;
        self.seq = seq;
        page::check(&before, place, seq - self.count).map_err(|found| self.named(found))
    }

    fn check(&mut self) -> Result<u64, String> {
        let checked = blocks::each(&self.file, self.count, |index, block| {
            let place = Place { owner: self.owner, index };
            page::check(block, place, page::last_write(index, self.count, self.seq))
        });
        checked.map_err(|found| self.named(found)).map(|()| self.count)
    }

    fn on_disk(&self) -> bool {
        true
    }
}
