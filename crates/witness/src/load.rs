//! What a witness's workers do, how many there are of each kind, and in what hurry.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::children::Children;
use crate::duty::Duty;
use crate::folder::Folder;
use crate::ledger::Ledger;
use crate::region::Region;

/// How hurried a worker is.
#[derive(Clone, Copy, Debug)]
pub struct Hurry {
    /// How many steps it does without a rest.
    pub burst: u32,
    /// For how many milliseconds it rests then.
    rest_ms: u64,
    /// And for how many times as long as the steps took.
    rest_times: u32,
}

impl Hurry {
    /// How long it rests after a burst that took so long.
    pub fn rest(self, took: Duration) -> Duration {
        Duration::from_millis(self.rest_ms) + took.saturating_mul(self.rest_times)
    }
}

/// One step now and then.
const fn every(rest_ms: u64) -> Hurry {
    Hurry { burst: 1, rest_ms, rest_times: 0 }
}

/// Many steps, and rests that are so many times as long, whatever the processor.
const fn busy(burst: u32, rest_times: u32) -> Hurry {
    Hurry { burst, rest_ms: 0, rest_times }
}

/// A worker: what it keeps, and how hurried it is.
pub type Post = (Box<dyn Duty>, Hurry);

/// How many workers of each kind, what each has, and how hurried they are.
///
/// None of them fills a processor, or several machines could not share one.
#[derive(Debug)]
pub struct Load {
    /// What it is called.
    pub name: &'static str,
    /// How many, and the pages of each.
    regions: (u64, usize, Hurry),
    /// How many, and the blocks of each.
    ledgers: (u64, u64, Hurry),
    folders: (u64, Hurry),
    children: (u64, Hurry),
}

const NONE: (u64, Hurry) = (0, every(0));

const LOADS: [Load; 4] = [
    Load {
        name: "idle",
        regions: (3, 64, every(50)),
        ledgers: (1, 64, every(200)),
        folders: NONE,
        children: NONE,
    },
    // 64 MiB, written over and over.
    Load {
        name: "memory",
        regions: (4, 4096, busy(64, 9)),
        ledgers: (1, 64, every(50)),
        folders: NONE,
        children: NONE,
    },
    Load {
        name: "disk",
        regions: (2, 64, every(50)),
        ledgers: (2, 256, busy(1, 2)),
        folders: (1, busy(1, 2)),
        children: NONE,
    },
    Load {
        name: "fork",
        regions: (2, 512, busy(8, 9)),
        ledgers: (1, 64, every(50)),
        folders: NONE,
        children: (2, busy(1, 3)),
    },
];

impl Load {
    /// The load that is called `name`.
    pub fn named(name: &str) -> Option<Self> {
        LOADS.into_iter().find(|load| load.name == name)
    }

    /// Makes what its workers keep, with files below `files`.
    pub fn posts(&self, files: &Path) -> io::Result<Vec<Post>> {
        let mut posts = Vec::new();
        let (count, pages, hurry) = self.regions;
        for _ in 0..count {
            add(&mut posts, hurry, |owner| Ok(Region::new(owner, pages)))?;
        }
        let (count, blocks, hurry) = self.ledgers;
        for _ in 0..count {
            let new = |owner| Ledger::new(owner, blocks, files.join(format!("ledger-{owner}")));
            add(&mut posts, hurry, new)?;
        }
        let (count, hurry) = self.folders;
        for _ in 0..count {
            let new = |owner| Folder::new(owner, files.join(format!("folder-{owner}")));
            add(&mut posts, hurry, new)?;
        }
        let (count, hurry) = self.children;
        for _ in 0..count {
            add(&mut posts, hurry, |owner| Ok(Children::new(owner)))?;
        }
        Ok(posts)
    }
}

fn add<D: Duty + 'static>(
    posts: &mut Vec<Post>,
    hurry: Hurry,
    new: impl FnOnce(u64) -> io::Result<D>,
) -> io::Result<()> {
    let duty = new(posts.len() as u64)?;
    posts.push((Box::new(duty), hurry));
    Ok(())
}
