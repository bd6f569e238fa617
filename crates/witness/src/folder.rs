//! Whole files, which one worker replaces in turn: written aside, synced, renamed.
//!
//! This is what changes a file system's own structures: inodes, folders, its journal.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::blocks;
use crate::duty::Duty;
use crate::page::{self, BYTES, Place, WORDS};

/// Files of a folder.
const FILES: u64 = 8;
/// Blocks of each file.
const BLOCKS: u64 = 16;

/// A worker's folder.
#[derive(Debug)]
pub struct Folder {
    owner: u64,
    seq: u64,
    path: PathBuf,
    itself: File,
}

impl Folder {
    /// Makes a folder with all its files, each written once.
    pub fn new(owner: u64, path: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&path)?;
        let itself = File::open(&path)?;
        let folder = Self { owner, seq: FILES - 1, path, itself };
        for seq in 0..FILES {
            folder.put(seq)?;
        }
        Ok(folder)
    }

    fn file(&self, seq: u64) -> PathBuf {
        self.path.join(format!("{}", seq % FILES))
    }

    fn place(&self, index: u64) -> Place {
        Place { owner: self.owner, index }
    }

    fn put(&self, seq: u64) -> io::Result<()> {
        let aside = self.path.join("aside");
        let mut file = File::create(&aside)?;
        for index in 0..BLOCKS {
            let (mut page, mut bytes) = ([0; WORDS], [0; BYTES]);
            page::fill(&mut page, self.place(index), seq);
            page::to_bytes(&page, &mut bytes);
            file.write_all(&bytes)?;
        }
        file.sync_all()?;
        fs::rename(&aside, self.file(seq))?;
        self.itself.sync_all()
    }

    /// Checks that a file, as `open` opens it, is all of write `seq`.
    fn check_file(
        &self,
        seq: u64,
        open: impl FnOnce(&Path) -> io::Result<File>,
    ) -> Result<(), String> {
        let path = self.file(seq);
        let named = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let file = open(&path).map_err(|error| named(&error))?;
        let bytes = file.metadata().map_or(0, |found| found.len());
        if bytes != BLOCKS * BYTES as u64 {
            return Err(named(&format!("{bytes} bytes")));
        }
        let look = |index, block: &page::Page| page::check(block, self.place(index), seq);
        blocks::each(&file, BLOCKS, look).map_err(|found| named(&found))
    }
}

impl Duty for Folder {
    fn seq(&self) -> u64 {
        self.seq
    }

    fn step(&mut self) -> Result<(), String> {
        let seq = self.seq + 1;
        let before = self.check_file(seq - FILES, blocks::open_direct);
        self.put(seq).map_err(|error| format!("{}: {error}", self.path.display()))?;
        self.seq = seq;
        before
    }

    fn check(&mut self) -> Result<u64, String> {
        for index in 0..FILES {
            let seq = page::last_write(index, FILES, self.seq);
            self.check_file(seq, |path| File::open(path))?;
        }
        let here = fs::read_dir(&self.path).map_or(0, Iterator::count) as u64;
        if here != FILES {
            return Err(format!("{}: {here} files", self.path.display()));
        }
        Ok(FILES * BLOCKS)
    }

    fn on_disk(&self) -> bool {
        true
    }
}
