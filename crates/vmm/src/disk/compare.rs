//! `forkd-vmm compare`: how the files of two disks differ.
//!
//! What is on the disks was written by guests, so it is read by a process that has nothing to
//! lose: it opens what it was told of, gives up whatever it could do besides reading that and
//! saying one line ([`crate::sys::process::confine`]), and only then looks.

use forkd_ext4::Volume;
use forkd_ext4::compare::{Change, Differences, Limits, Side, compare};
use forkd_proto::compare::{CompareConfig, CompareEvent, FileChange};

use crate::disk::layers::Lower;
use crate::error::Error;
use crate::jail::{
    self,
    filter::{self, Role},
};
use crate::sys::process;

/// Compares the files of two disks.  This process is of no use for anything else afterwards.
///
/// # Errors
///
/// [`Error::Io`], [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming a layer;
/// [`Error::Guest`] if a guest's file system is none that can be compared.
pub fn run(config: &CompareConfig) -> Result<CompareEvent, Error> {
    if config.rootless {
        jail::rootless::go_inside()?;
    }
    let stack = |top: &Option<_>| config.layers.iter().chain(top).cloned().collect::<Vec<_>>();
    let before = Lower::open(&stack(&config.before), config.size_bytes, None)?;
    let after = Lower::open(&stack(&config.after), config.size_bytes, Some(&before))?;
    if let Some(uid) = config.uid {
        jail::enter_as_reader(uid)?;
    } else if config.rootless {
        jail::enter_as_rootless_reader()?;
    }
    process::confine(jail::rootless::is_inside())?;
    filter::put_on(Role::Comparer)?;
    let common = config.layers.len();
    let (one, other) = (before.blocks_above(common), after.blocks_above(common));
    let may_differ = |block| one.contains(block) || other.contains(block);
    let (entries_max, changes_max) = (config.entries_max, config.changes_max);
    let limits = Limits { entries_max, changes_max };
    let (before, after) = (before.view()?, after.view()?);
    let open = || {
        Ok((Volume::open(before).map_err(Side::Before)?, Volume::open(after).map_err(Side::After)?))
    };
    let found = open().and_then(|(one, other)| compare(one, other, &may_differ, limits));
    found.map(said).map_err(|side| {
        let (which, error) = match side {
            Side::Before(error) => ("first", error),
            Side::After(error) => ("second", error),
        };
        Error::Guest(format!("the file system of the {which}: {error}"))
    })
}

fn said(found: Differences) -> CompareEvent {
    let change = |change: forkd_ext4::compare::FileChange| FileChange {
        path: String::from_utf8_lossy(&change.path).into_owned(),
        change: match change.change {
            Change::Added => "added",
            Change::Changed => "changed",
            Change::Removed => "removed",
        },
        kind: change.kind.letter(),
        size_bytes: change.size_bytes,
    };
    let changes = found.changes.into_iter().map(change).collect();
    CompareEvent::Compared { changes, more: found.more }
}
