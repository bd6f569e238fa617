//! Files: streamed, and so larger than memory; written whole or not at all.
//!
//! These run in threads of their own, which may wait for disks and clients.  A connection that
//! breaks ends its thread.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use forkd_proto::Kind;
use forkd_proto::guest::{
    BytesReply, Entries, Entry, EntryKind, ErrorBody, ErrorCode, Event, MakeDir, Move, Nothing,
    ReadFile, Remove, Request, WriteFile,
};
use forkd_proto::limits::{ENTRIES_MAX, FRAME_PAYLOAD_MAX};
use forkd_proto::text::to_base64;
use serde::Serialize;

use crate::failure::{Outcome, failure, invalid, refused_path};
use crate::stream::Stream;

use owner::{Owner, make_all, make_one};
use write::{Place, Writing};

mod archive;
mod owner;
mod pack;
mod remove;
mod skipped;
mod unpack;
mod write;

/// Bytes of a file in one frame.
const CHUNK: usize = 256 << 10;

/// Most bytes of a file that says it is empty, such as those of `/proc`: some of them never end.
const UNSIZED_BYTES_MAX: u64 = 64 << 20;

const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// How an operation on files ends: with a client that has gone, or with an answer.
type Served<T> = io::Result<Outcome<T>>;

/// One operation on files.
#[derive(Debug)]
pub struct Job {
    /// What is asked.
    pub request: Request,
    /// The image's user.
    pub user: String,
}

/// Carries out one operation and answers it.
///
/// # Errors
///
/// The client has gone.
pub fn serve(Job { request, user }: &Job, stream: &mut Stream) -> io::Result<()> {
    match request {
        Request::ReadFile(read) => read_file(read, stream)?.answer(stream),
        Request::WriteFile(write) => write_file(write, user, stream)?.answer(stream),
        Request::ReadArchive(only) => {
            pack::read_archive(Path::new(&only.path), stream)?.answer(stream)
        }
        Request::WriteArchive(write) => unpack::write_archive(write, user, stream)?.answer(stream),
        Request::Stat(only) => describe(Path::new(&only.path)).answer(stream),
        Request::ListDir(only) => list_dir(Path::new(&only.path)).answer(stream),
        Request::MakeDir(make) => make_dir(make, user).answer(stream),
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
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let words =
                    "has no end, only more to come; read it with a command and a time limit";
                return Ok(Err(invalid("path", format!("{}: {words}", path.display()))));
            }
            Err(error) => return Ok(Err(refused_path(path, &error))),
        }
        if bytes > UNSIZED_BYTES_MAX && request.length.is_none() && is_unsized(&file) {
            let words = format!("has no size, and more than {UNSIZED_BYTES_MAX} bytes");
            let message = format!("{}: {words}; read it with a `length`", path.display());
            return Ok(Err(failure(ErrorCode::TooLarge, message)));
        }
    }
    Ok(Ok(BytesReply { bytes }))
}

fn is_unsized(file: &File) -> bool {
    file.metadata().is_ok_and(|found| found.len() == 0)
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
        let words = "not a regular file; a command can read it";
        return Err(invalid("path", format!("{}: {words}", path.display())));
    }
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(|error| refused_path(path, &error))?;
    }
    Ok((file, metadata))
}

fn write_file(request: &WriteFile, user: &str, stream: &mut Stream) -> Served<BytesReply> {
    let begun = Owner::find(request.user.as_deref(), user).and_then(|owner| {
        Writing::begin(&Place {
            path: Path::new(&request.path),
            mode: request.mode,
            make_parents: request.make_parents,
            owner,
        })
    });
    let mut writing = match begun {
        Ok(writing) => writing,
        Err(body) => return Ok(Err(body)),
    };
    let mut scratch = vec![0; CHUNK];
    let mut bytes = 0;
    loop {
        // What is written aside removes itself if the client goes away in the middle.
        let Some((kind, payload)) = stream.wait_frame(&mut scratch)? else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        match kind {
            Kind::Data => {
                if let Err(body) = writing.write(&payload) {
                    // What the client has sent beyond this is dropped by whoever reads the next
                    // frame.
                    return Ok(Err(body));
                }
                bytes += u64::try_from(payload.len()).unwrap_or_default();
            }
            Kind::DataEof => break,
            _ => return Err(io::Error::other("not a frame of a file")),
        }
    }
    Ok(writing.finish().map(|()| BytesReply { bytes }))
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
    let target = fs::read_link(path).ok();
    let name = path.file_name().unwrap_or(OsStr::new("/"));
    Ok(Entry {
        name: name.to_string_lossy().into_owned(),
        name_b64: unreadable(name),
        kind,
        size_bytes: found.len(),
        mode: found.mode() & 0o7777,
        uid: found.uid(),
        gid: found.gid(),
        modified_at_ns: found
            .mtime()
            .saturating_mul(1_000_000_000)
            .saturating_add(found.mtime_nsec()),
        target: target.as_ref().map(|target| target.to_string_lossy().into_owned()),
        target_b64: target.as_ref().and_then(|target| unreadable(target.as_os_str())),
    })
}

/// The bytes of a name that is not UTF-8.
fn unreadable(name: &OsStr) -> Option<String> {
    name.to_str().is_none().then(|| to_base64(name.as_bytes()))
}

fn make_dir(request: &MakeDir, user: &str) -> Outcome<Nothing> {
    let path = Path::new(&request.path);
    let mode = request.mode.unwrap_or(DIRECTORY_MODE);
    let owner = Owner::find(request.user.as_deref(), user)?;
    let make = if request.parents { make_all } else { make_one };
    make(path, mode, owner).map(|()| Nothing {}).map_err(|error| refused_path(path, &error))
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
            remove::tree(path)
        } else {
            fs::remove_dir(path)
        }
    };
    remove()
        .map(|()| Nothing {})
        .map_err(|error: io::Error| -> ErrorBody { refused_path(path, &error) })
}
