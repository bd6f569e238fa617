//! The immutable layers of a disk as files.
//!
//! They are opened and verified once, by whoever boots a machine or holds a
//! snapshot; forks share them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_devices::disk::{Blocks, Layer, LayeredDisk, Run as DiskRun, Top};
use forkd_devices::virtio::block::Disk;

use crate::error::Error;
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};
use crate::snapshot::runs::{Collector, Run, Table, UNIT_BYTES, Units};
use crate::sys::handed;

/// Bytes copied at a time when a layer is written.
const COPY_BYTES: u64 = 1 << 20;
/// The unit of `st_blocks`; stat(2).
const STAT_BLOCK_BYTES: u64 = 512;

/// The immutable layers of a disk, opened and verified; cheap to clone.
#[derive(Clone, Debug)]
pub struct Lower {
    pub(super) layers: Vec<Stratum>,
    pub(super) size_bytes: u64,
}

/// One of the layers.
#[derive(Clone, Debug)]
pub(super) struct Stratum {
    pub(super) layer: Arc<Layer>,
    /// Its descriptor, which the layer owns.
    pub(super) fd: i32,
    /// The file it was opened from; `None` if it was the top of a machine.
    pub(super) path: Option<PathBuf>,
    /// What the host stores for it.
    pub(super) stored_bytes: u64,
}

impl Lower {
    /// Opens layers, lowest first: a raw image, then layer files.  As long as they are those that
    /// `parent` was opened from, its are shared.
    ///
    /// Layer files are verified against their digest.  The image is not: its content is its key,
    /// and the store looks after that.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming the file.
    pub fn open(paths: &[PathBuf], size_bytes: u64, parent: Option<&Self>) -> Result<Self, Error> {
        let known = parent.map_or(&[][..], |parent| &parent.layers);
        let same = |(path, stratum): &(&PathBuf, &Stratum)| stratum.path.as_ref() == Some(*path);
        let mut layers: Vec<Stratum> =
            paths.iter().zip(known).take_while(same).map(|(_, stratum)| stratum.clone()).collect();
        for path in &paths[layers.len()..] {
            let opened =
                if layers.is_empty() { open_image(path)? } else { open_layer(path, size_bytes)? };
            layers.push(Stratum { path: Some(path.clone()), ..opened });
        }
        Ok(Self { layers, size_bytes })
    }

    /// Size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The descriptors of all layers.
    pub fn descriptors(&self) -> impl Iterator<Item = i32> + '_ {
        self.layers.iter().map(|stratum| stratum.fd)
    }

    /// Writes the blocks in which the disk differs from its `above` lowest layers to `target`, as
    /// a layer file.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if there are not so many layers; [`Error::Io`], and nothing is left under
    /// the name then.
    pub fn save(&self, above: usize, target: &Path) -> Result<Written, Error> {
        if above > self.layers.len() {
            let problem = format!("the disk has {} layers, not {above}", self.layers.len());
            return Err(Error::Invalid { field: "disk_layers", problem });
        }
        let units = self.blocks_above(above);
        let mut whole = self.disk(NoTop, self.layers.len(), 0)?;
        let mut parent = self.disk(NoTop, above, 0)?;
        let mut collector = Collector::default();
        let (mut now, mut then) = ([0; 4096], [0; 4096]);
        let failed = || Error::io(format!("write {}", target.display()));
        for unit in units.iter() {
            whole.read_at(unit * UNIT_BYTES, &mut now).map_err(failed())?;
            parent.read_at(unit * UNIT_BYTES, &mut then).map_err(failed())?;
            if now != then {
                collector.add(unit);
            }
        }
        let table = Table { total_bytes: self.size_bytes, runs: collector.into_runs() };
        let mut writer = BodyWriter::create(target, Kind::Layer)?;
        table.write(&mut writer)?;
        let mut buffer = vec![0; usize::try_from(COPY_BYTES).unwrap_or(0)];
        for run in &table.runs {
            let (mut at, end) = (run.first * UNIT_BYTES, (run.first + run.count) * UNIT_BYTES);
            while at < end {
                let length = usize::try_from(COPY_BYTES.min(end - at)).unwrap_or(0);
                whole
                    .read_at(at, &mut buffer[..length])
                    .and_then(|()| writer.write_all(&buffer[..length]))
                    .map_err(failed())?;
                at += length as u64;
            }
        }
        writer.commit()
    }

    /// The blocks that are in a layer above the `above` lowest ones, and were not discarded since.
    #[must_use]
    pub fn blocks_above(&self, above: usize) -> Units {
        self.kept_and_discarded(above).0
    }

    /// The blocks that layers above the `above` lowest ones have, and those that they discard.
    pub(super) fn kept_and_discarded(&self, above: usize) -> (Units, Units) {
        let mut kept = Units::none_of(self.size_bytes);
        let mut discarded = Units::none_of(self.size_bytes);
        for stratum in self.layers.iter().skip(above) {
            kept.remove_runs(stratum.discarded_runs());
            kept.add_runs(stratum.runs());
            discarded.remove_runs(stratum.runs());
            discarded.add_runs(stratum.discarded_runs());
        }
        (kept, discarded)
    }

    /// What the host stores for all of them.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.layers.iter().map(|stratum| stratum.stored_bytes).sum()
    }

    /// The disk, to be read only.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the layers do not make a disk.
    pub fn view(&self) -> Result<View, Error> {
        self.disk(NoTop, self.layers.len(), 0).map(View)
    }

    /// A disk over the lowest of the layers.
    pub(super) fn disk<T: Top + 'static>(
        &self,
        top: T,
        layers: usize,
        limit: u64,
    ) -> Result<LayeredDisk<T>, Error> {
        let layers = self.layers[..layers].iter().map(|stratum| Arc::clone(&stratum.layer));
        let layers = layers.collect();
        LayeredDisk::new(self.size_bytes, layers, top, limit)
            .map_err(|error| Error::Damaged(format!("disk: {error}")))
    }
}

impl Stratum {
    /// A layer that is read by the descriptor `fd`.
    pub(super) fn nameless(layer: Arc<Layer>, fd: i32) -> Self {
        let stored_bytes = layer.blocks() * UNIT_BYTES;
        Self { layer, fd, path: None, stored_bytes }
    }

    fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        self.layer.runs().into_iter().map(run_of)
    }

    fn discarded_runs(&self) -> impl Iterator<Item = Run> + use<> {
        self.layer.discarded_runs().into_iter().map(run_of)
    }
}

fn run_of(run: DiskRun) -> Run {
    Run { first: run.first, count: run.blocks }
}

fn open_image(path: &Path) -> Result<Stratum, Error> {
    let name = path.display();
    let file = handed::open(path).map_err(Error::io(format!("open image {name}")))?;
    let found = file.metadata().map_err(Error::io(format!("read image {name}")))?;
    let fd = file.as_raw_fd();
    let layer = Arc::new(Layer::raw(Stored(file), found.len()));
    Ok(Stratum { stored_bytes: found.blocks() * STAT_BLOCK_BYTES, ..Stratum::nameless(layer, fd) })
}

fn open_layer(path: &Path, size_bytes: u64) -> Result<Stratum, Error> {
    let mut reader = BodyReader::open(path, Kind::Layer)?;
    let table = Table::read(&mut reader)?;
    let name = reader.name().to_owned();
    if table.total_bytes != size_bytes {
        return Err(Error::Damaged(format!(
            "{name} is of a disk of {} bytes, the disk has {size_bytes}",
            table.total_bytes
        )));
    }
    reader.skip_rest()?;
    let file = reader.finish()?;
    let runs: Vec<DiskRun> =
        table.runs.iter().map(|run| DiskRun { first: run.first, blocks: run.count }).collect();
    let fd = file.as_raw_fd();
    Layer::from_runs(Stored(file), size_bytes, table.data_offset(), &runs)
        .map(|layer| Stratum::nameless(Arc::new(layer), fd))
        .map_err(|error| Error::Damaged(format!("{name}: {error}")))
}

/// A file that is only read.
pub(super) struct Stored(pub(super) File);

impl Blocks for Stored {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }
}

/// The top of a disk that is only read.
#[derive(Debug)]
pub(super) struct NoTop;

impl Blocks for NoTop {
    fn read_at(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Top for NoTop {
    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A disk that is only read.
#[derive(Debug)]
pub struct View(LayeredDisk<NoTop>);

impl forkd_ext4::Disk for View {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buffer)
    }
}
