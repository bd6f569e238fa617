//! A snapshot's three files, written together or not at all.

use std::fs::File;
use std::path::Path;
use std::time::Instant;

use forkd_proto::control::{SaveLink, SaveReply, SavedFile};

use crate::disk::layers::Lower;
use crate::error::Error;
use crate::kvm::cpu::VcpuState;
use crate::memory::delta;
use crate::memory::ram::Ram;
use crate::snapshot::header::Written;
use crate::snapshot::pages::Lineage;
use crate::snapshot::state::MachineState;

const FILES: [&str; 3] = ["disk.layer", "memory", "state"];

/// A machine that is paused, or was when it was forked.
#[derive(Clone, Copy, Debug)]
pub struct Still<'a> {
    /// Registers and devices.
    pub state: &'a MachineState,
    /// Memory.
    pub ram: &'a Ram,
    /// What the memory was loaded from.
    pub lineage: &'a Lineage,
    /// The disk's layers, if there is a disk.
    pub lower: Option<&'a Lower>,
}

/// Writes `still` into a folder: `state`, `memory` and `disk.layer`, as much of it as `to` says.
///
/// # Errors
///
/// [`Error::Invalid`] if the folder is not there or not empty, [`Error::Io`] for one if the disk is
/// full; none of the files is left then.
pub fn save(still: Still<'_>, to: &SaveLink) -> Result<SaveReply, Error> {
    check_empty(&to.directory)?;
    let started = Instant::now();
    let saved = write(still, to);
    if saved.is_err() {
        remove(&to.directory);
    }
    let duration_ms = started.elapsed().as_secs_f64() * 1e3;
    Ok(SaveReply {
        files: saved?,
        duration_ms,
        cpu: still.state.vcpus.first().map(VcpuState::seen),
    })
}

/// Writes `disk.layer` alone into a folder: what `lower` has above its `above` lowest layers.
///
/// # Errors
///
/// As [`save`].
pub fn save_disk(lower: &Lower, directory: &Path, above: usize) -> Result<SaveReply, Error> {
    let started = Instant::now();
    let [disk, ..] = FILES;
    let saved = lower.save(above, &directory.join(disk));
    if saved.is_err() {
        remove(directory);
    }
    let Written { bytes, digest } = saved?;
    let files = vec![SavedFile { name: disk.to_owned(), bytes, digest }];
    Ok(SaveReply { files, duration_ms: started.elapsed().as_secs_f64() * 1e3, cpu: None })
}

/// Removes what an attempt to save may have left.
pub fn remove(directory: &Path) {
    for name in FILES {
        let path = directory.join(name);
        // What was not written yet is not there to be removed.
        drop(std::fs::remove_file(path.with_extension("partial")));
        drop(std::fs::remove_file(path));
    }
}

fn write(still: Still<'_>, to: &SaveLink) -> Result<Vec<SavedFile>, Error> {
    let mut files = Vec::new();
    let mut record = |name: &str, written: Written| {
        let Written { bytes, digest } = written;
        files.push(SavedFile { name: name.to_owned(), bytes, digest });
    };
    let [disk, memory, state] = FILES.map(|name| to.directory.join(name));
    if let Some(lower) = still.lower {
        record("disk.layer", lower.save(to.disk_layers, &disk)?);
    }
    record("memory", delta::save(still.ram, still.lineage, &to.memory, &memory)?);
    record("state", still.state.write(&state)?);
    // The names are durable only once their folder is.
    File::open(&to.directory)
        .and_then(|folder| folder.sync_all())
        .map_err(Error::io(format!("sync {}", to.directory.display())))?;
    Ok(files)
}

/// Refuses a folder that is not there, or has something in it.
///
/// # Errors
///
/// [`Error::Invalid`].
pub fn check_empty(directory: &Path) -> Result<(), Error> {
    let invalid = |problem: String| Error::Invalid { field: "directory", problem };
    let mut entries = std::fs::read_dir(directory)
        .map_err(|error| invalid(format!("{}: {error}", directory.display())))?;
    match entries.next() {
        None => Ok(()),
        Some(_) => Err(invalid(format!("{} is not empty", directory.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_something_in_it_is_not_saved_into() {
        let folder = std::env::temp_dir().join(format!("forkd-save-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(check_empty(&folder).is_ok());

        std::fs::write(folder.join("precious"), "x").unwrap();

        assert!(check_empty(&folder).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
