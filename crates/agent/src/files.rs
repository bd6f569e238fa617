//! Files: streamed, and so larger than memory; written whole or not at all.
//!
//! These run in threads of their own, which may wait for disks and clients.  A connection that
//! breaks ends its thread.

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_proto::Kind;
use forkd_proto::guest::{
    BytesReply, Entries, Entry, EntryKind, ErrorBody, ErrorCode, Event, MakeDir, Move, Nothing,
    ReadFile, Remove, Request, WriteFile,
};
use forkd_proto::limits::{ENTRIES_MAX, FRAME_PAYLOAD_MAX};
use serde::Serialize;

use crate::failure::{Outcome, failure, invalid, refused_path};
use crate::stream::Stream;

/// Bytes of a file in one frame.
const CHUNK: usize = 256 << 10;

const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// Tells the temporary files of concurrent writes apart.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// How an operation on files ends: with a client that has gone, or with an answer.
type Served<T> = io::Result<Outcome<T>>;

/// Carries out one operation and answers it.
///
/// # Errors
///
/// The client has gone.
pub fn serve(request: &Request, stream: &mut Stream) -> io::Result<()> {
    match request {
        Request::ReadFile(read) => read_file(read, stream)?.answer(stream),
        Request::WriteFile(write) => write_file(write, stream)?.answer(stream),
        Request::Stat(only) => describe(Path::new(&only.path)).answer(stream),
        Request::ListDir(only) => list_dir(Path::new(&only.path)).answer(stream),
        Request::MakeDir(make) => make_dir(make).answer(stream),
        Request::Move(moved) => move_path(moved).answer(stream),
        Request::Remove(remove) => remove_path(remove).answer(stream),
        _ => Ok(()),
    }
}

trait Answer {
    fn answer(self, stream: &mut Stream) -> io::Result<()>;
}

impl<T: Serialize> Answer for Outcome<T> {
    fn answer(self, stream: &mut Stream) -> io::Result<()> {
        let json = match &self {
            Ok(reply) => serde_json::to_vec(reply)?,
            Err(body) => return stream.wait_send(Kind::Error, &serde_json::to_vec(body)?),
        };
        if json.len() > usize::try_from(FRAME_PAYLOAD_MAX).unwrap_or(usize::MAX) {
            let body = failure(ErrorCode::TooLarge, "the answer does not fit one frame");
            return stream.wait_send(Kind::Error, &serde_json::to_vec(&body)?);
        }
        stream.wait_send(Kind::Reply, &json)
    }
}

fn read_file(request: &ReadFile, stream: &mut Stream) -> Served<BytesReply> {
    let path = Path::new(&request.path);
    let (mut file, metadata) = match open_for_reading(path, request.offset) {
        Ok(opened) => opened,
        Err(body) => return Ok(Err(body)),
    };
    let event = Event::File { size_bytes: metadata.len(), mode: metadata.mode() & 0o7777 };
    stream.wait_send(Kind::Event, &serde_json::to_vec(&event)?)?;
    let mut left = request.length.unwrap_or(u64::MAX);
    let mut bytes = 0;
    let mut chunk = vec![0; CHUNK];
    while left > 0 {
        let wanted = usize::try_from(left).map_or(CHUNK, |left| left.min(CHUNK));
        let buffer = chunk.get_mut(..wanted).unwrap_or_default();
        match file.read(buffer) {
            Ok(0) => break,
            Ok(count) => {
                stream.wait_send(Kind::Data, chunk.get(..count).unwrap_or_default())?;
                bytes += u64::try_from(count).unwrap_or_default();
                left -= u64::try_from(count).unwrap_or_default();
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(Err(refused_path(path, &error))),
        }
    }
    Ok(Ok(BytesReply { bytes }))
}

fn open_for_reading(path: &Path, offset: u64) -> Outcome<(File, Metadata)> {
    // A FIFO would make opening wait for somebody to write.
    let options = || File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
    let mut file = options().map_err(|error| refused_path(path, &error))?;
    let metadata = file.metadata().map_err(|error| refused_path(path, &error))?;
    if metadata.is_dir() {
        return Err(failure(ErrorCode::IsADirectory, format!("{}: a directory", path.display())));
    }
    if !metadata.is_file() {
        return Err(invalid("path", format!("{}: not a regular file", path.display())));
    }
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(|error| refused_path(path, &error))?;
    }
    Ok((file, metadata))
}

fn write_file(request: &WriteFile, stream: &mut Stream) -> Served<BytesReply> {
    let mut draft = match Draft::begin(request) {
        Ok(draft) => draft,
        Err(body) => return Ok(Err(body)),
    };
    let mut scratch = vec![0; CHUNK];
    let mut bytes = 0;
    loop {
        // The draft removes itself if the client goes away in the middle.
        let Some((kind, payload)) = stream.wait_frame(&mut scratch)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        match kind {
            Kind::Data => {
                if let Err(error) = draft.file.write_all(&payload) {
                    // What the client has sent beyond this is dropped by whoever reads the next
                    // frame.
                    return Ok(Err(refused_path(&draft.target, &error)));
                }
                bytes += u64::try_from(payload.len()).unwrap_or_default();
            }
            Kind::DataEof => break,
            _ => return Err(io::Error::other("not a frame of a file")),
        }
    }
    Ok(draft.publish().map(|()| BytesReply { bytes }))
}

/// A file that is being written beside its place; gone unless it is published.
struct Draft {
    file: File,
    path: PathBuf,
    target: PathBuf,
    mode: u32,
    owner: Option<(u32, u32)>,
    published: bool,
}

impl Draft {
    fn begin(request: &WriteFile) -> Outcome<Self> {
        // A link is written through, as by anybody else; what it points at may not exist yet.
        let asked = Path::new(&request.path);
        let target = fs::canonicalize(asked).unwrap_or_else(|_| asked.to_owned());
        let existing = fs::metadata(&target).ok();
        if existing.as_ref().is_some_and(Metadata::is_dir) {
            return Err(failure(ErrorCode::IsADirectory, format!("{}", target.display())));
        }
        let (Some(folder), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(invalid("path", "names no file"));
        };
        if request.make_parents {
            make_all(folder, DIRECTORY_MODE).map_err(|error| refused_path(folder, &error))?;
        }
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".{}.{number}.forkd-part", short(&name.to_string_lossy())));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|error| refused_path(&target, &error))?;
        let owner = existing.as_ref().map(|found| (found.uid(), found.gid()));
        let kept = existing.map_or(FILE_MODE, |found| found.mode() & 0o7777);
        let mode = request.mode.unwrap_or(kept);
        Ok(Self { file, path, target, mode, owner, published: false })
    }

    fn publish(mut self) -> Outcome<()> {
        let finish = || -> io::Result<()> {
            if let Some((uid, gid)) = self.owner {
                fchown(&self.file, Some(uid), Some(gid))?;
            }
            self.file.set_permissions(fs::Permissions::from_mode(self.mode))?;
            fs::rename(&self.path, &self.target)
        };
        finish().map_err(|error| refused_path(&self.target, &error))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published
            && let Err(error) = fs::remove_file(&self.path)
        {
            crate::log::line(&format!("{}: {error}", self.path.display()));
        }
    }
}

/// Enough of a name to recognise it by, with room for a suffix within 255 bytes.
fn short(name: &str) -> String {
    name.chars().take(50).collect()
}

fn list_dir(path: &Path) -> Outcome<Entries> {
    let no_list = |error: io::Error| refused_path(path, &error);
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(no_list)? {
        names.push(entry.map_err(no_list)?.file_name());
        if names.len() > ENTRIES_MAX {
            return Err(failure(ErrorCode::TooLarge, format!("over {ENTRIES_MAX} entries")));
        }
    }
    names.sort();
    let mut entries = Vec::with_capacity(names.len());
    for name in names {
        match describe(&path.join(name)) {
            Ok(entry) => entries.push(entry),
            // Removed since its name was read.
            Err(body) if body.code == ErrorCode::NotFound => {}
            Err(body) => return Err(body),
        }
    }
    Ok(Entries { entries })
}

fn describe(path: &Path) -> Outcome<Entry> {
    let found = fs::symlink_metadata(path).map_err(|error| refused_path(path, &error))?;
    let kind = match found.file_type() {
        kind if kind.is_file() => EntryKind::File,
        kind if kind.is_dir() => EntryKind::Directory,
        kind if kind.is_symlink() => EntryKind::Symlink,
        _ => EntryKind::Other,
    };
    let target = fs::read_link(path).ok().map(|target| target.to_string_lossy().into_owned());
    let name = path.file_name().map_or_else(|| "/".into(), |name| name.to_string_lossy());
    Ok(Entry {
        name: name.into_owned(),
        kind,
        size_bytes: found.len(),
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        modified_at_ns: found
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(found.mtime_nsec()),
        target,
    })
}

fn make_dir(request: &MakeDir) -> Outcome<Nothing> {
    let path = Path::new(&request.path);
    let mode = request.mode.unwrap_or(DIRECTORY_MODE);
    let result = if request.parents {
        make_all(path, mode)
    } else {
        DirBuilder::new().mode(mode).create(path)
    };
    result.map(|()| Nothing {}).map_err(|error| refused_path(path, &error))
}

fn make_all(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)
}

fn move_path(request: &Move) -> Outcome<Nothing> {
    let source = Path::new(&request.source);
    fs::rename(source, &request.target)
        .map(|()| Nothing {})
        .map_err(|error| refused_path(source, &error))
}

fn remove_path(request: &Remove) -> Outcome<Nothing> {
    let path = Path::new(&request.path);
    let remove = || -> io::Result<()> {
        if !fs::symlink_metadata(path)?.is_dir() {
            fs::remove_file(path)
        } else if request.recursive {
            fs::remove_dir_all(path)
        } else {
            fs::remove_dir(path)
        }
    };
    remove()
        .map(|()| Nothing {})
        .map_err(|error: io::Error| -> ErrorBody { refused_path(path, &error) })
}
