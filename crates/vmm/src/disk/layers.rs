//! The disk's layers as files.
//!
//! Lower layers are opened and verified once, by whoever boots a machine or holds
//! a snapshot; forks share them.  The private top is a sparse file that is made on
//! the first write, so that a fork which writes nothing costs no file.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use forkd_devices::disk::{Blocks, LAYERS_MAX, Layer, LayeredDisk, Run as DiskRun, Top};
use forkd_devices::virtio::block::Disk;
use forkd_proto::control::DiskMetrics;

use crate::error::Error;
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};
use crate::snapshot::runs::{Collector, Run, Table, UNIT_BYTES, Units};

/// Most layers of a disk that were tops of machines: from there on each branch makes one of two, so
/// that a machine can be branched any number of times.
const FROZEN_MAX: usize = 64;
/// Bytes copied at a time when a layer is written.
const COPY_BYTES: u64 = 1 << 20;

/// The immutable layers of a disk, opened and verified; cheap to clone.
#[derive(Clone, Debug)]
pub struct Lower {
    layers: Vec<Stratum>,
    size_bytes: u64,
}

/// One of the layers.
#[derive(Clone, Debug)]
struct Stratum {
    layer: Arc<Layer>,
    /// Its descriptor, which the layer owns.
    fd: i32,
    /// The file it was opened from; `None` if it was the top of a machine.
    path: Option<PathBuf>,
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
            let (layer, fd) =
                if layers.is_empty() { open_image(path)? } else { open_layer(path, size_bytes)? };
            layers.push(Stratum { layer: Arc::new(layer), fd, path: Some(path.clone()) });
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

    /// The blocks that are in a layer above the `above` lowest ones.
    #[must_use]
    pub fn blocks_above(&self, above: usize) -> Units {
        let mut units = Units::none_of(self.size_bytes);
        units.add_runs(self.layers.iter().skip(above).flat_map(Stratum::runs));
        units
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
    fn disk<T: Top + 'static>(
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

/// Two layers that are to be one.
#[derive(Debug)]
pub struct Merge {
    index: usize,
    pair: Lower,
    path: PathBuf,
}

/// What came of it.
#[derive(Debug)]
pub struct Merged {
    index: usize,
    stratum: Stratum,
}

impl Merge {
    /// Copies what both hold into a file without a name.  Needs no lock: neither changes.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the file cannot be written.
    pub fn make(self) -> Result<Merged, Error> {
        let Self { index, pair, path } = self;
        let failed = || Error::io(format!("merge layers into {}", path.display()));
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let mut file = file.map_err(failed())?;
        std::fs::remove_file(&path).map_err(failed())?;
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
        let fd = file.as_raw_fd();
        let layer = Layer::from_runs(Stored(file), pair.size_bytes, 0, &runs)
            .map_err(|error| Error::Damaged(format!("merged layers: {error}")))?;
        Ok(Merged { index, stratum: Stratum { layer: Arc::new(layer), fd, path: None } })
    }
}

impl Stratum {
    fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        let runs = self.layer.runs();
        runs.into_iter().map(|run| Run { first: run.first, count: run.blocks })
    }

    fn blocks(&self) -> u64 {
        self.runs().map(|run| run.count).sum()
    }
}

fn open_image(path: &Path) -> Result<(Layer, i32), Error> {
    let name = path.display();
    let file = File::open(path).map_err(Error::io(format!("open image {name}")))?;
    let bytes = file.metadata().map_err(Error::io(format!("read image {name}")))?.len();
    let fd = file.as_raw_fd();
    Ok((Layer::raw(Stored(file), bytes), fd))
}

fn open_layer(path: &Path, size_bytes: u64) -> Result<(Layer, i32), Error> {
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
        .map(|layer| (layer, fd))
        .map_err(|error| Error::Damaged(format!("{name}: {error}")))
}

/// A file that is only read.
struct Stored(File);

impl Blocks for Stored {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }
}

/// The top of a disk that is only read.
#[derive(Debug)]
struct NoTop;

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

/// The private top: `disk.top` in the machine's folder, from the first write on.
#[derive(Debug)]
pub struct TopFile {
    path: PathBuf,
    size_bytes: u64,
    file: OnceLock<File>,
}

impl TopFile {
    fn new(path: &Path, size_bytes: u64) -> Self {
        Self { path: path.to_path_buf(), size_bytes, file: OnceLock::new() }
    }

    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        // Never an older one: that may be a layer now.
        let file = File::options().read(true).write(true).create_new(true).open(&self.path)?;
        file.set_len(self.size_bytes)?;
        Ok(self.file.get_or_init(|| file))
    }
}

impl Blocks for TopFile {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file()?.read_exact_at(buffer, offset)
    }
}

impl Top for TopFile {
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file()?.write_all_at(data, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.get().map_or(Ok(()), File::sync_data)
    }

    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (Some(file), Ok(offset), Ok(length)) =
            (self.file.get(), i64::try_from(offset), i64::try_from(length))
        else {
            return Ok(());
        };
        // SAFETY: the descriptor is open; the call takes no pointers.
        if unsafe { libc::fallocate(file.as_raw_fd(), PUNCH, offset, length) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// A machine's disk.
#[derive(Debug)]
pub struct HostDisk {
    disk: LayeredDisk<TopFile>,
    lower: Lower,
    path: PathBuf,
    /// How many of the layers it was made over.
    given: usize,
    limit: u64,
    /// Bytes in layers that were tops of this machine.
    frozen_bytes: u64,
}

impl HostDisk {
    /// A disk over `lower` whose private top lives in `directory`, with at most `limit` bytes of
    /// its own.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the layers do not make a disk of that size.
    pub fn new(lower: &Lower, directory: &Path, limit: Option<u64>) -> Result<Self, Error> {
        Self::over(lower, directory.join("disk.top"), limit.unwrap_or(lower.size_bytes))
    }

    /// The layers below the top.
    #[must_use]
    pub fn lower(&self) -> &Lower {
        &self.lower
    }

    /// Forgets every write since the disk was made over `lower`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the top's name cannot be taken away, [`Error::Damaged`] if the layers do
    /// not make a disk.
    pub fn rewind(&mut self, lower: &Lower) -> Result<(), Error> {
        if self.disk.top().file.get().is_some() {
            std::fs::remove_file(&self.path)
                .map_err(Error::io(format!("remove {}", self.path.display())))?;
        }
        *self = Self::over(lower, self.path.clone(), self.limit)?;
        Ok(())
    }

    fn over(lower: &Lower, path: PathBuf, limit: u64) -> Result<Self, Error> {
        let given = lower.layers.len();
        let disk = lower.disk(TopFile::new(&path, lower.size_bytes), given, limit)?;
        Ok(Self { disk, lower: lower.clone(), path, given, limit, frozen_bytes: 0 })
    }

    /// Two neighbours to make one layer of, if there are more than [`FROZEN_MAX`] frozen ones:
    /// those that hold least.
    #[must_use]
    pub fn crowded(&self) -> Option<Merge> {
        let frozen = |stratum: &&Stratum| stratum.path.is_none();
        if self.lower.layers.iter().filter(frozen).count() <= FROZEN_MAX {
            return None;
        }
        let pairs = self.lower.layers.windows(2).enumerate().filter(|(index, pair)| {
            // What it was made over and what was its own stay apart.
            pair.iter().all(|stratum| stratum.path.is_none()) && index + 1 != self.given
        });
        let (index, pair) =
            pairs.min_by_key(|(_, pair)| pair.iter().map(Stratum::blocks).sum::<u64>())?;
        let pair = Lower { layers: pair.to_vec(), size_bytes: self.lower.size_bytes };
        Some(Merge { index, pair, path: self.path.with_extension("merged") })
    }

    /// Goes on with the layer that a merge made of two; they have not changed since it was begun.
    pub fn adopt(&mut self, merged: Merged) {
        let Merged { index, stratum } = merged;
        self.lower.layers.splice(index..index + 2, [stratum]);
        self.given -= usize::from(index < self.given);
        let layers = self.lower.layers.iter().map(|stratum| Arc::clone(&stratum.layer));
        self.disk.restack(layers.collect(), self.lower.layers.len() - self.given);
    }

    /// How many of those layers it was made over; those above were its top.
    #[must_use]
    pub fn given(&self) -> usize {
        self.given
    }

    /// Makes what the top holds a layer, and goes on with an empty one.  Costs the same whatever it
    /// holds.  The layer's file loses its name and lives as long as somebody has it open.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the name cannot be taken away, [`Error::State`] if there are as many layers
    /// as there may be; nothing has changed then.
    pub fn freeze(&mut self) -> Result<(), Error> {
        let Some(fd) = self.disk.top().file.get().map(AsRawFd::as_raw_fd) else { return Ok(()) };
        if self.disk.top_bytes() == 0 {
            return Ok(());
        }
        if self.lower.layers.len() >= LAYERS_MAX {
            return Err(Error::State("the disk has as many layers as it may have"));
        }
        std::fs::remove_file(&self.path)
            .map_err(Error::io(format!("freeze {}", self.path.display())))?;
        self.frozen_bytes += self.disk.top_bytes();
        let layer = self.disk.freeze(TopFile::new(&self.path, self.lower.size_bytes));
        self.lower.layers.push(Stratum { layer, fd, path: None });
        Ok(())
    }

    /// What happened so far.
    #[must_use]
    pub fn metrics(&self) -> DiskMetrics {
        let stats = self.disk.stats();
        DiskMetrics {
            top_bytes: self.frozen_bytes + self.disk.top_bytes(),
            reads: stats.reads,
            writes: stats.writes,
            flushes: stats.flushes,
        }
    }
}

impl Disk for HostDisk {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes()
    }

    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(offset, buffer)
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.disk.write_at(offset, data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.disk.flush()
    }

    fn discard(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.disk.discard(offset, length)
    }

    fn write_zeroes(&mut self, offset: u64, length: u64) -> io::Result<()> {
        self.disk.write_zeroes(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("forkd-disk-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_saved_top_is_a_layer_for_the_next_machine() {
        let folder = folder("layer");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        disk.write_at(4096, &[2; 4096]).unwrap();
        let layer = folder.join("disk.layer");

        disk.freeze().unwrap();
        disk.lower().save(disk.given(), &layer).unwrap();

        let lower = Lower::open(&[image, layer], 8 * 4096, None).unwrap();
        let mut next = HostDisk::new(&lower, &folder.join("next"), None).unwrap();
        let mut bytes = [0; 3];
        next.read_at(4095, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 2]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_frozen_top_is_below_the_next_one_and_saved_with_it() {
        let folder = folder("frozen");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        disk.write_at(0, &[2; 8192]).unwrap();
        disk.freeze().unwrap();
        let then = disk.lower().clone();

        disk.write_at(4096, &[3; 4096]).unwrap();
        disk.write_at(8192, &[1; 4096]).unwrap();

        let mut sibling = HostDisk::new(&then, &folder.join("sibling"), None).unwrap();
        let (mut ours, mut theirs) = ([0; 3], [0; 3]);
        disk.read_at(4095, &mut ours).unwrap();
        sibling.read_at(4095, &mut theirs).unwrap();
        assert_eq!((ours, theirs), ([2, 3, 3], [2, 2, 2]));
        assert_eq!(disk.metrics().top_bytes, 4 * 4096);
        let layer = folder.join("disk.layer");
        disk.freeze().unwrap();
        disk.lower().save(disk.given(), &layer).unwrap();
        let blocks = (std::fs::metadata(&layer).unwrap().len() - 96 - 16) / 4096;
        assert_eq!(blocks, 2, "a block that is as in the image is not stored");
        assert!(then.save(3, &layer).is_err());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_is_frozen_once_too_often_merges_two_layers_and_reads_the_same() {
        let folder = folder("merged");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 8 * 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        let mut expected = [1_u8; 8];
        for round in 0..=FROZEN_MAX {
            assert!(disk.crowded().is_none(), "{round}");
            let (block, value) = (round * 3 % 8, u8::try_from(round + 2).unwrap());
            disk.write_at(block as u64 * 4096, &[value; 4096]).unwrap();
            expected[block] = value;
            disk.freeze().unwrap();
        }

        let merged = disk.crowded().unwrap().make().unwrap();
        disk.adopt(merged);

        assert!(disk.crowded().is_none());
        let mut found = [0; 8];
        for (block, slot) in (0..).step_by(4096).zip(found.chunks_mut(1)) {
            disk.read_at(block, slot).unwrap();
        }
        assert_eq!((found, disk.given()), (expected, 1));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn layers_that_the_parent_has_open_are_shared() {
        let folder = folder("shared");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let parent = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();

        let lower = Lower::open(std::slice::from_ref(&image), 4096, Some(&parent)).unwrap();

        assert!(lower.descriptors().eq(parent.descriptors()));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_is_only_read_makes_no_file() {
        let folder = folder("silent");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();

        disk.read_at(0, &mut [0; 10]).unwrap();
        disk.flush().unwrap();

        assert!(!folder.join("disk.top").exists());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_flipped_bit_in_a_layer_is_found_when_opening() {
        let folder = folder("flipped");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 4096, None).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        disk.write_at(0, &[3; 4096]).unwrap();
        let path = folder.join("disk.layer");
        disk.freeze().unwrap();
        disk.lower().save(1, &path).unwrap();
        let mut stored = std::fs::read(&path).unwrap();
        let last = stored.len() - 1;
        stored[last] ^= 1;
        std::fs::write(&path, stored).unwrap();

        let error = Lower::open(&[image, path], 4096, None).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::Damaged);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
