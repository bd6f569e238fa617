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

use forkd_devices::disk::{Blocks, Layer, LayeredDisk, Run as DiskRun, Top};
use forkd_devices::virtio::block::Disk;
use forkd_proto::control::DiskMetrics;

use crate::error::Error;
use crate::snapshot::header::{BodyReader, BodyWriter, Kind, Written};
use crate::snapshot::runs::{Run, Table, UNIT_BYTES};

/// Bytes copied at a time when a layer is written.
const COPY_BYTES: u64 = 1 << 20;

/// The immutable layers of a disk, opened and verified; cheap to clone.
#[derive(Clone, Debug)]
pub struct Lower {
    layers: Vec<Arc<Layer>>,
    size_bytes: u64,
}

impl Lower {
    /// Opens layers, lowest first: a raw image, then layer files.
    ///
    /// Layer files are verified against their digest.  The image is not: its content is its key,
    /// and the store looks after that.
    ///
    /// # Errors
    ///
    /// [`Error::Io`], [`Error::NotOurs`], [`Error::TooNew`] or [`Error::Damaged`] naming the file.
    pub fn open(paths: &[PathBuf], size_bytes: u64) -> Result<Self, Error> {
        let layers = paths
            .iter()
            .enumerate()
            .map(|(index, path)| {
                let layer =
                    if index == 0 { open_image(path) } else { open_layer(path, size_bytes) };
                layer.map(Arc::new)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { layers, size_bytes })
    }

    /// Size of the disk.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }
}

fn open_image(path: &Path) -> Result<Layer, Error> {
    let name = path.display();
    let file = File::open(path).map_err(Error::io(format!("open image {name}")))?;
    let bytes = file.metadata().map_err(Error::io(format!("read image {name}")))?.len();
    Ok(Layer::raw(Stored(file), bytes))
}

fn open_layer(path: &Path, size_bytes: u64) -> Result<Layer, Error> {
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
    Layer::from_runs(Stored(file), size_bytes, table.data_offset(), &runs)
        .map_err(|error| Error::Damaged(format!("{name}: {error}")))
}

/// A file that is only read.
struct Stored(File);

impl Blocks for Stored {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
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
    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file =
            File::options().read(true).write(true).create(true).truncate(true).open(&self.path)?;
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
}

impl HostDisk {
    /// A disk over `lower` whose private top lives in `directory` and holds at most `limit` bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the layers do not make a disk of that size.
    pub fn new(lower: &Lower, directory: &Path, limit: Option<u64>) -> Result<Self, Error> {
        let top = TopFile {
            path: directory.join("disk.top"),
            size_bytes: lower.size_bytes,
            file: OnceLock::new(),
        };
        let limit = limit.unwrap_or(lower.size_bytes);
        LayeredDisk::new(lower.size_bytes, lower.layers.clone(), top, limit)
            .map(|disk| Self { disk })
            .map_err(|error| Error::Damaged(format!("disk: {error}")))
    }

    /// What happened so far.
    #[must_use]
    pub fn metrics(&self) -> DiskMetrics {
        let stats = self.disk.stats();
        DiskMetrics {
            top_bytes: self.disk.top_bytes(),
            reads: stats.reads,
            writes: stats.writes,
            flushes: stats.flushes,
        }
    }

    /// Writes the private top to `target` as a layer file.
    ///
    /// # Errors
    ///
    /// [`Error::Io`]; nothing is left under the name then.
    pub fn save(&self, target: &Path) -> Result<Written, Error> {
        let runs: Vec<Run> =
            self.disk.top_runs().map(|run| Run { first: run.first, count: run.blocks }).collect();
        let table = Table { total_bytes: self.disk.size_bytes(), runs };
        let mut writer = BodyWriter::create(target, Kind::Layer)?;
        table.write(&mut writer)?;
        let mut buffer = vec![0; usize::try_from(COPY_BYTES).unwrap_or(0)];
        for run in &table.runs {
            let (mut at, end) = (run.first * UNIT_BYTES, (run.first + run.count) * UNIT_BYTES);
            while at < end {
                let length = usize::try_from(COPY_BYTES.min(end - at)).unwrap_or(0);
                self.disk
                    .top()
                    .read_at(at, &mut buffer[..length])
                    .and_then(|()| writer.write_all(&buffer[..length]))
                    .map_err(Error::io(format!("write {}", target.display())))?;
                at += length as u64;
            }
        }
        writer.commit()
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
        let lower = Lower::open(std::slice::from_ref(&image), 8 * 4096).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        disk.write_at(4096, &[2; 4096]).unwrap();
        let layer = folder.join("disk.layer");

        disk.save(&layer).unwrap();

        let lower = Lower::open(&[image, layer], 8 * 4096).unwrap();
        let mut next = HostDisk::new(&lower, &folder.join("next"), None).unwrap();
        let mut bytes = [0; 3];
        next.read_at(4095, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 2]);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_disk_that_is_only_read_makes_no_file() {
        let folder = folder("silent");
        let image = folder.join("image");
        std::fs::write(&image, vec![1; 4096]).unwrap();
        let lower = Lower::open(std::slice::from_ref(&image), 4096).unwrap();
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
        let lower = Lower::open(std::slice::from_ref(&image), 4096).unwrap();
        let mut disk = HostDisk::new(&lower, &folder, None).unwrap();
        disk.write_at(0, &[3; 4096]).unwrap();
        let path = folder.join("disk.layer");
        disk.save(&path).unwrap();
        let mut stored = std::fs::read(&path).unwrap();
        let last = stored.len() - 1;
        stored[last] ^= 1;
        std::fs::write(&path, stored).unwrap();

        let error = Lower::open(&[image, path], 4096).unwrap_err();

        assert_eq!(error.code(), forkd_proto::control::ErrorCode::Damaged);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
