//! Processes, one after the other, each of which checks the pages that it is given.
//!
//! The program is forked with all its memory, which `vfork` would not do, and run again.

use std::io::{self, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::duty::Duty;
use crate::page::{self, BYTES};
use crate::region::Region;

/// This program.
const ITSELF: &str = "/proc/self/exe";
/// Pages that a child is given.
const PAGES: usize = 16;

/// A worker with a region of its own, that it has a child check at each step.
#[derive(Debug)]
pub struct Children {
    owner: u64,
    region: Region,
}

impl Children {
    /// Makes the region.
    pub fn new(owner: u64) -> Self {
        Self { owner, region: Region::new(owner, PAGES) }
    }

    fn ask_child(&self) -> io::Result<bool> {
        let mut given = Vec::with_capacity(16 + PAGES * BYTES);
        for number in [self.owner, self.region.seq()] {
            given.extend_from_slice(&number.to_le_bytes());
        }
        for page in self.region.pages() {
            let mut bytes = [0; BYTES];
            page::to_bytes(page, &mut bytes);
            given.extend_from_slice(&bytes);
        }
        // A user is named so that std forks: what it could spawn otherwise shares our memory.
        let mut child = Command::new(ITSELF)
            .arg("child")
            .uid(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        let told = child.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&given));
        let ended = child.wait()?;
        told.map(|()| ended.success())
    }
}

impl Duty for Children {
    fn seq(&self) -> u64 {
        self.region.seq()
    }

    fn step(&mut self) -> Result<(), String> {
        let right = self.ask_child();
        self.region.step()?;
        match right {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("worker {}: its child found another region", self.owner)),
            Err(error) => Err(format!("worker {}: no child: {error}", self.owner)),
        }
    }

    fn check(&mut self) -> Result<u64, String> {
        self.region.check()
    }

    fn on_disk(&self) -> bool {
        false
    }
}

/// In the child: checks what comes through standard input.
pub fn check_given() -> io::Result<()> {
    let mut given = Vec::new();
    io::stdin().lock().read_to_end(&mut given)?;
    let mut owner_and_seq = [0; 2];
    for (number, bytes) in owner_and_seq.iter_mut().zip(given.chunks_exact(8)) {
        *number = bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte));
    }
    let [owner, seq] = owner_and_seq;
    let pages = given.get(16..).unwrap_or(&[]).chunks_exact(BYTES).map(page::from_bytes).collect();
    match Region::given(owner, seq, pages).check() {
        Ok(count) if count == PAGES as u64 => Ok(()),
        Ok(_) => Err(io::Error::other("not all pages came")),
        Err(found) => Err(io::Error::other(found)),
    }
}
