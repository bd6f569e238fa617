//! Making one layer of several.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forkd_devices::disk::{Layer, Run as DiskRun};
use forkd_devices::virtio::block::Disk;

use crate::disk::layers::{Lower, NoTop, Stored, Stratum};
use crate::disk::top::Tops;
use crate::error::Error;
use crate::snapshot::runs::{Collector, UNIT_BYTES};
use crate::sys::files;

/// Layers that are to be one.
#[derive(Debug)]
pub struct Merge {
    pub(super) index: usize,
    pub(super) layers: Lower,
    pub(super) tops: Tops,
}

/// What came of it.
#[derive(Debug)]
pub struct Merged {
    pub(super) index: usize,
    /// How many layers it takes the place of.
    pub(super) count: usize,
    pub(super) stratum: Stratum,
}

impl Merge {
    /// Copies what they hold into a file without a name.  Needs no lock: none of them changes.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written, or would use up the reserve of its folder.
    pub fn make(self) -> Result<Merged, Error> {
        let Self { index, layers, tops } = self;
        let count = layers.layers.len();
        let failed = || Error::io("merge layers");
        let (units, discarded) = layers.kept_and_discarded(0);
        let mut file = tops.file().map_err(failed())?;
        tops.admit(&file, units.iter().count() as u64 * UNIT_BYTES).map_err(failed())?;
        let mut all = layers.disk(NoTop, count, 0)?;
        let mut collector = Collector::default();
        let mut block = [0; 4096];
        for unit in units.iter() {
            all.read_at(unit * UNIT_BYTES, &mut block)
                .and_then(|()| file.write_all(&block))
                .map_err(failed())?;
            collector.add(unit);
        }
        let runs: Vec<DiskRun> = collector
            .into_runs()
            .iter()
            .map(|run| DiskRun { first: run.first, blocks: run.count })
            .collect();
        // Siblings inherit it.
        let file = files::read_only(&file).map_err(failed())?;
        let fd = file.as_raw_fd();
        let layer = Layer::from_runs(Stored(file), layers.size_bytes, 0, &runs)
            .map_err(|error| Error::Damaged(format!("merged layers: {error}")))?
            // Layers below these may still have them.
            .with_discarded(discarded.iter());
        Ok(Merged { index, count, stratum: Stratum::nameless(Arc::new(layer), fd) })
    }
}
