//! Making one layer of two.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use forkd_devices::disk::{Layer, Run as DiskRun};
use forkd_devices::virtio::block::Disk;

use crate::disk::layers::{Lower, NoTop, Stored, Stratum};
use crate::disk::top::Tops;
use crate::error::Error;
use crate::snapshot::runs::{Collector, UNIT_BYTES, Units};
use crate::sys::files;

/// Two layers that are to be one.
#[derive(Debug)]
pub struct Merge {
    pub(super) index: usize,
    pub(super) pair: Lower,
    pub(super) tops: Tops,
}

/// What came of it.
#[derive(Debug)]
pub struct Merged {
    pub(super) index: usize,
    pub(super) stratum: Stratum,
}

impl Merge {
    /// Copies what both hold into a file without a name.  Needs no lock: neither changes.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written, or would use up the reserve of its folder.
    pub fn make(self) -> Result<Merged, Error> {
        let Self { index, pair, tops } = self;
        let failed = || Error::io("merge two layers");
        let bytes = pair.layers.iter().map(Stratum::blocks).sum::<u64>() * UNIT_BYTES;
        let mut file = tops.file().map_err(failed())?;
        tops.admit(&file, bytes).map_err(failed())?;
        let mut units = Units::none_of(pair.size_bytes);
        units.add_runs(pair.layers.iter().flat_map(Stratum::runs));
        let mut both = pair.disk(NoTop, pair.layers.len(), 0)?;
        let mut collector = Collector::default();
        let mut block = [0; 4096];
        for unit in units.iter() {
            both.read_at(unit * UNIT_BYTES, &mut block)
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
        let layer = Layer::from_runs(Stored(file), pair.size_bytes, 0, &runs)
            .map_err(|error| Error::Damaged(format!("merged layers: {error}")))?;
        Ok(Merged { index, stratum: Stratum { layer: Arc::new(layer), fd, path: None } })
    }
}
