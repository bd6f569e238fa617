//! A tree as an archive: links as links, holes as holes, and whatever cannot be read named.

use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use forkd_proto::Kind as Frame;
use forkd_proto::guest::{ArchiveReply, Event};
use nix::sys::statfs::{
    CGROUP2_SUPER_MAGIC, DEBUGFS_MAGIC, FsType, PROC_SUPER_MAGIC, SECURITYFS_MAGIC, SYSFS_MAGIC,
    TRACEFS_MAGIC, statfs,
};
use nix::unistd::{Whence, lseek64};

use super::archive::{END, Kind, Member, encode_map, padding};
use super::skipped::Skipped;
use super::{CHUNK, Served};
use crate::failure::refused_path;
use crate::stream::Stream;

/// Most pieces of a file with holes; the last one has the rest.
const SEGMENTS_MAX: usize = 4_096;

/// Most names of one directory.
const NAMES_MAX: usize = 1_000_000;

/// File systems in which no file is anybody's.
const KERNELS: [FsType; 6] = [
    PROC_SUPER_MAGIC,
    SYSFS_MAGIC,
    CGROUP2_SUPER_MAGIC,
    DEBUGFS_MAGIC,
    SECURITYFS_MAGIC,
    TRACEFS_MAGIC,
];

/// Record in the last member: what is not in the archive, as JSON.
const SKIPPED: &str = "FORKD.skipped";

/// Sends a file, or a directory with all that is in it.
///
/// # Errors
///
/// The client has gone.
pub fn read_archive(path: &Path, stream: &mut Stream) -> Served<ArchiveReply> {
    // What the client names is followed if it is a link; what is below is not.
    let found = match fs::metadata(path) {
        Ok(found) => found,
        Err(error) => return Ok(Err(refused_path(path, &error))),
    };
    let mut packing = Packing {
        stream,
        out: Vec::with_capacity(2 * CHUNK),
        device: found.dev(),
        reply: ArchiveReply::default(),
        skipped: Skipped::default(),
    };
    if !found.is_dir() {
        let name = PathBuf::from(path.file_name().unwrap_or_default());
        return match open(path) {
            Ok((file, found)) => {
                packing.begin()?;
                packing.add_file(&name, file, &found)?;
                packing.finish(None).map(Ok)
            }
            Err(error) => Ok(Err(refused_path(path, &error))),
        };
    }
    let names = match names_in(path) {
        Ok(names) => names,
        Err(error) => return Ok(Err(refused_path(path, &error))),
    };
    packing.begin()?;
    let root = member(Path::new("./"), Kind::Directory, &found);
    packing.add(&root)?;
    packing.walk(path, names)?;
    packing.finish(Some(root)).map(Ok)
}

/// An archive on its way.
struct Packing<'a> {
    stream: &'a mut Stream,
    /// What has yet to fill a frame.
    out: Vec<u8>,
    device: u64,
    reply: ArchiveReply,
    skipped: Skipped,
}

impl Packing<'_> {
    fn begin(&mut self) -> io::Result<()> {
        self.stream.wait_send(Frame::Event, &serde_json::to_vec(&Event::Archive)?)
    }

    /// Adds all that is below `top`, without recursion.
    fn walk(&mut self, top: &Path, names: Vec<OsString>) -> io::Result<()> {
        let mut above: Vec<(PathBuf, std::vec::IntoIter<OsString>)> = Vec::new();
        let (mut inside, mut names) = (PathBuf::new(), names.into_iter());
        loop {
            let Some(name) = names.next() else {
                let Some(outer) = above.pop() else { return Ok(()) };
                (inside, names) = outer;
                continue;
            };
            let relative = inside.join(name);
            match self.add_entry(top, &relative)? {
                Ok(None) => {}
                Ok(Some(inner)) => {
                    above.push((std::mem::replace(&mut inside, relative), names));
                    names = inner.into_iter();
                }
                Err(error) => self.skipped.add(&relative, &error.to_string()),
            }
        }
    }

    /// Adds one entry; returns what is in it if it is a directory.
    fn add_entry(
        &mut self,
        top: &Path,
        relative: &Path,
    ) -> io::Result<io::Result<Option<Vec<OsString>>>> {
        let path = top.join(relative);
        let found = match fs::symlink_metadata(&path) {
            Ok(found) => found,
            // Removed since its name was read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Ok(None)),
            Err(error) => return Ok(Err(error)),
        };
        let kind = found.file_type();
        if kind.is_symlink() {
            let target = match fs::read_link(&path) {
                Ok(target) => target,
                Err(error) => return Ok(Err(error)),
            };
            let link = Member { target, ..member(relative, Kind::Symlink, &found) };
            self.add(&link)?;
        } else if kind.is_dir() {
            if found.dev() != self.device
                && statfs(&path).is_ok_and(|it| KERNELS.contains(&it.filesystem_type()))
            {
                return Ok(Err(io::Error::other("a file system of the kernel's")));
            }
            let names = match names_in(&path) {
                Ok(names) => names,
                Err(error) => return Ok(Err(error)),
            };
            self.add(&member(relative, Kind::Directory, &found))?;
            return Ok(Ok(Some(names)));
        } else if kind.is_file() {
            match open(&path) {
                Ok((file, found)) => self.add_file(relative, file, &found)?,
                Err(error) => return Ok(Err(error)),
            }
        } else {
            return Ok(Err(io::Error::other("a device, a pipe or a socket")));
        }
        Ok(Ok(None))
    }

    fn add_file(&mut self, name: &Path, mut file: File, found: &Metadata) -> io::Result<()> {
        let mut announced = member(name, Kind::File, found);
        let segments = segments(&file, found);
        let mut map = Vec::new();
        if let Some(segments) = &segments {
            map = encode_map(segments);
            announced.sparse = Some(found.len());
        }
        let whole = [(0, found.len())];
        let segments = segments.as_deref().unwrap_or(&whole);
        let length: u64 = segments.iter().map(|(_, length)| length).sum();
        announced.stored = length.saturating_add(u64::try_from(map.len()).unwrap_or_default());
        self.add(&announced)?;
        self.put(&map)?;
        for (offset, length) in segments {
            if let Err(error) = self.add_part(&mut file, *offset, *length)? {
                self.skipped.add(name, &format!("not read to its end: {error}"));
            }
        }
        self.put(&END[..padding(length)])
    }

    /// Sends a part of a file: exactly so many bytes, since they have been announced.
    fn add_part(
        &mut self,
        file: &mut File,
        offset: u64,
        length: u64,
    ) -> io::Result<io::Result<()>> {
        let mut result = file.seek(SeekFrom::Start(offset)).map(drop);
        let mut left = length;
        let mut chunk = vec![0; CHUNK];
        while left > 0 {
            let wanted = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
            let buffer = chunk.get_mut(..wanted).unwrap_or_default();
            let count = match result.is_ok().then(|| file.read(buffer)) {
                Some(Ok(0)) => {
                    result = Err(io::Error::other("it became shorter"));
                    continue;
                }
                Some(Ok(count)) => count,
                Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => continue,
                Some(Err(error)) => {
                    result = Err(error);
                    continue;
                }
                None => {
                    buffer.fill(0);
                    wanted
                }
            };
            self.put(chunk.get(..count).unwrap_or_default())?;
            left -= u64::try_from(count).unwrap_or(left);
        }
        self.reply.bytes = self.reply.bytes.saturating_add(length);
        Ok(result)
    }

    fn add(&mut self, member: &Member) -> io::Result<()> {
        self.reply.entries += 1;
        self.put(&member.encode())
    }

    /// Sends bytes, in frames of some size.
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.extend_from_slice(bytes);
        if self.out.len() < CHUNK {
            return Ok(());
        }
        let full = std::mem::replace(&mut self.out, Vec::with_capacity(2 * CHUNK));
        self.stream.wait_send(Frame::Data, &full)
    }

    /// Sends the end, and before it once more the root: with what is not in the archive.
    fn finish(mut self, root: Option<Member>) -> io::Result<ArchiveReply> {
        self.reply.skipped = std::mem::take(&mut self.skipped.entries);
        self.reply.more_skipped = self.skipped.more;
        if let Some(mut root) = root {
            let skipped = serde_json::json!({
                "skipped": self.reply.skipped,
                "more_skipped": self.reply.more_skipped,
            });
            root.records.push((SKIPPED.to_owned(), skipped.to_string().into_bytes()));
            self.put(&root.encode())?;
        }
        self.put(&END)?;
        let rest = std::mem::take(&mut self.out);
        self.stream.wait_send(Frame::Data, &rest)?;
        Ok(self.reply)
    }
}

fn member(path: &Path, kind: Kind, found: &Metadata) -> Member {
    Member {
        path: path.to_owned(),
        kind,
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        mtime: u64::try_from(found.mtime()).unwrap_or_default(),
        target: PathBuf::new(),
        stored: 0,
        sparse: None,
        records: Vec::new(),
    }
}

/// Opens a regular file; what it is may have changed since its name was read.
fn open(path: &Path) -> io::Result<(File, Metadata)> {
    let file = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
    let found = file.metadata()?;
    if found.is_file() { Ok((file, found)) } else { Err(io::Error::other("not a regular file")) }
}

fn names_in(path: &Path) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        if names.len() == NAMES_MAX {
            return Err(io::Error::other(format!("over {NAMES_MAX} entries")));
        }
        names.push(entry?.file_name());
    }
    names.sort();
    Ok(names)
}

/// Where the data of a file with holes is; `None` if it has none, or the file system does not say.
fn segments(file: &File, found: &Metadata) -> Option<Vec<(u64, u64)>> {
    let size = found.len();
    if found.blocks().saturating_mul(512) >= size {
        return None;
    }
    let seek = |offset: u64, whence| {
        let offset = i64::try_from(offset).ok()?;
        match lseek64(file, offset, whence) {
            Ok(at) => u64::try_from(at).ok(),
            // No more data.
            Err(nix::errno::Errno::ENXIO) => Some(size),
            Err(_) => None,
        }
    };
    let mut found = Vec::new();
    let mut at = seek(0, Whence::SeekData)?;
    while at < size {
        let end = if found.len() + 1 == SEGMENTS_MAX { size } else { seek(at, Whence::SeekHole)? };
        let end = end.min(size);
        if end <= at {
            break;
        }
        found.push((at, end - at));
        at = seek(end, Whence::SeekData)?;
    }
    // The end of the file, if that is a hole.
    if found.last().is_none_or(|(offset, length)| offset + length < size) {
        found.push((size, 0));
    }
    Some(found)
}
