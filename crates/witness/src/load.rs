//! What a witness's workers do, how many there are of each kind, and in what hurry.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::children::Children;
use crate::folder::Folder;
use crate::ledger::Ledger;
use crate::region::Region;

/// What was checked and found right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// Pages of memory.
    Pages(u64),
    /// Blocks of files, each time that one was read.
    Blocks(u64),
}

/// What one worker keeps.
pub trait Duty: Send {
    /// The number of the last step that is done.
    fn seq(&self) -> u64;

    /// Does one step.  Before it writes anything over it checks what is there, and says what was
    /// wrong with it.
    fn step(&mut self) -> Result<(), String>;

    /// Checks everything, between two steps.
    fn check(&mut self) -> Result<Checked, String>;
}

/// A worker's duty, and for how long it rests after each step.
pub type Post = (Box<dyn Duty>, Duration);

/// How many workers of each kind, and the milliseconds for which they rest.
#[derive(Debug)]
pub struct Load {
    /// What it is called.
    pub name: &'static str,
    regions: (u64, usize),
    regions_rest_ms: u64,
    ledgers: (u64, u64),
    ledgers_rest_ms: u64,
    folders: u64,
    children: u64,
}

const LOADS: [Load; 4] = [
    Load {
        name: "idle",
        regions: (3, 64),
        regions_rest_ms: 50,
        ledgers: (1, 64),
        ledgers_rest_ms: 200,
        folders: 0,
        children: 0,
    },
    Load {
        name: "memory",
        regions: (4, 4096),
        regions_rest_ms: 0,
        ledgers: (1, 64),
        ledgers_rest_ms: 50,
        folders: 0,
        children: 0,
    },
    Load {
        name: "disk",
        regions: (2, 64),
        regions_rest_ms: 20,
        ledgers: (2, 256),
        ledgers_rest_ms: 0,
        folders: 1,
        children: 0,
    },
    Load {
        name: "fork",
        regions: (2, 512),
        regions_rest_ms: 5,
        ledgers: (1, 64),
        ledgers_rest_ms: 50,
        folders: 0,
        children: 2,
    },
];

impl Load {
    /// The load that is called `name`.
    pub fn named(name: &str) -> Option<Self> {
        LOADS.into_iter().find(|load| load.name == name)
    }

    /// Makes what its workers keep, with files below `files`.
    pub fn posts(&self, files: &Path) -> io::Result<Vec<Post>> {
        let rest = Duration::from_millis;
        let mut posts: Vec<Post> = Vec::new();
        for owner in 0..self.regions.0 {
            let region = Region::new(owner, self.regions.1);
            posts.push((Box::new(region), rest(self.regions_rest_ms)));
        }
        for _ in 0..self.ledgers.0 {
            let owner = posts.len() as u64;
            let ledger = Ledger::new(owner, self.ledgers.1, files.join(format!("ledger-{owner}")))?;
            posts.push((Box::new(ledger), rest(self.ledgers_rest_ms)));
        }
        for _ in 0..self.folders {
            let owner = posts.len() as u64;
            let path = files.join(format!("folder-{owner}"));
            posts.push((Box::new(Folder::new(owner, path)?), Duration::ZERO));
        }
        for _ in 0..self.children {
            posts.push((Box::new(Children::new(posts.len() as u64)), Duration::ZERO));
        }
        Ok(posts)
    }
}
