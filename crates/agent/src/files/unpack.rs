//! An archive as a tree: each member whole or not at all, and one that fails stops no other.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use forkd_proto::Kind as Frame;
use forkd_proto::guest::{ArchiveReply, ErrorBody, ErrorCode, WriteArchive};

use super::archive::{BLOCK, Block, EXTENSION_MAX, Kind, Member, Overrides, padding};
use super::owner::{Owner, make_all, make_one};
use super::skipped::Skipped;
use super::write::{Place, Writing};
use super::{CHUNK, DIRECTORY_MODE, Served};
use crate::failure::{Outcome, invalid, refused_path};
use crate::stream::Stream;

/// Longest line of a map of holes: a number and its end.
const LINE_MAX: usize = 21;

/// Most pieces of a file with holes that are read.
const SEGMENTS_MAX: u64 = 1_000_000;

/// Why the unpacking cannot go on.
enum Broken {
    /// The client has gone.
    Gone(io::Error),
    /// It sends what is no archive, or there is no room.
    Refused(ErrorBody),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Gone(error)
    }
}

/// Makes a tree of an archive that the client sends.
///
/// # Errors
///
/// The client has gone.
pub fn write_archive(
    request: &WriteArchive,
    user: &str,
    stream: &mut Stream,
) -> Served<ArchiveReply> {
    let root = Path::new(&request.path);
    let is_new = !root.exists();
    let owner = Owner::find(request.user.as_deref(), user).and_then(|owner| {
        make_all(root, DIRECTORY_MODE, owner).map_err(|error| refused_path(root, &error))?;
        Ok(owner)
    });
    let owner = match owner {
        Ok(owner) => owner,
        Err(body) => return Ok(Err(body)),
    };
    let mut unpacking = Unpacking {
        source: Source { stream, scratch: vec![0; CHUNK], held: Vec::new(), at: 0, over: false },
        root,
        is_new,
        owner,
        keep_owner: request.keep_owner,
        reply: ArchiveReply::default(),
        skipped: Skipped::default(),
    };
    match unpacking.run() {
        Ok(()) => {
            let Unpacking { reply, skipped, .. } = unpacking;
            let Skipped { entries, more, .. } = skipped;
            Ok(Ok(ArchiveReply { skipped: entries, more_skipped: more, ..reply }))
        }
        Err(Broken::Refused(body)) => Ok(Err(body)),
        Err(Broken::Gone(error)) => Err(error),
    }
}

/// The bytes that the client sends.
struct Source<'a> {
    stream: &'a mut Stream,
    scratch: Vec<u8>,
    held: Vec<u8>,
    at: usize,
    over: bool,
}

impl Source<'_> {
    /// The next bytes, at most so many; none at the end.
    fn some(&mut self, most: u64) -> io::Result<&[u8]> {
        while self.at == self.held.len() && !self.over {
            let Some((kind, payload)) = self.stream.wait_frame(&mut self.scratch)? else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            match kind {
                Frame::Data => (self.held, self.at) = (payload, 0),
                Frame::DataEof => self.over = true,
                _ => return Err(io::Error::other("not a frame of an archive")),
            }
        }
        let rest = self.held.get(self.at..).unwrap_or_default();
        let count = usize::try_from(most).map_or(rest.len(), |most| most.min(rest.len()));
        self.at += count;
        Ok(rest.get(..count).unwrap_or_default())
    }

    fn exact(&mut self, buffer: &mut [u8]) -> Result<(), Broken> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let bytes = self.some(u64::try_from(rest.len()).unwrap_or_default())?;
            if bytes.is_empty() {
                return Err(malformed("it ends in the middle"));
            }
            rest.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            filled += bytes.len();
        }
        Ok(())
    }

    fn skip(&mut self, mut left: u64) -> Result<(), Broken> {
        while left > 0 {
            let count = self.some(left)?.len();
            if count == 0 {
                return Err(malformed("it ends in the middle"));
            }
            left -= u64::try_from(count).unwrap_or(left);
        }
        Ok(())
    }

    /// Takes what the client sends behind the end, so that the next operation starts clean.
    fn drain(&mut self) -> io::Result<()> {
        while !self.some(u64::MAX)?.is_empty() {}
        Ok(())
    }
}

struct Unpacking<'a> {
    source: Source<'a>,
    root: &'a Path,
    /// Whether the root was not there before, and so is to be as the archive says.
    is_new: bool,
    owner: Option<Owner>,
    keep_owner: bool,
    reply: ArchiveReply,
    skipped: Skipped,
}

impl Unpacking<'_> {
    fn run(&mut self) -> Result<(), Broken> {
        let mut overrides = Overrides::default();
        loop {
            let mut block = [0; BLOCK];
            self.source.exact(&mut block)?;
            match Block::parse(&block).map_err(malformed)? {
                Block::End => return Ok(self.source.drain()?),
                Block::Extension(kind, length) => {
                    if length > EXTENSION_MAX {
                        return Err(malformed("an extended header is too long"));
                    }
                    let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
                    self.source.exact(&mut bytes)?;
                    self.source.skip(u64::try_from(padding(length)).unwrap_or_default())?;
                    overrides.add(kind, &bytes).map_err(malformed)?;
                }
                Block::Member(mut member) => {
                    overrides.apply(&mut member).map_err(malformed)?;
                    self.add(&member)?;
                }
            }
        }
    }

    fn add(&mut self, member: &Member) -> Result<(), Broken> {
        let mut left = member.stored;
        let made = match self.place(&member.path) {
            Ok(path) => self.make(member, &path, &mut left)?,
            Err(body) => Err(body),
        };
        self.source.skip(left)?;
        self.source.skip(u64::try_from(padding(member.stored)).unwrap_or_default())?;
        match made {
            Ok(()) => self.reply.entries += 1,
            Err(body) if body.code == ErrorCode::NoSpace => return Err(Broken::Refused(body)),
            Err(body) => self.skipped.add(&member.path, &body.message),
        }
        Ok(())
    }

    /// Where a member goes: always below the root.
    fn place(&self, path: &Path) -> Outcome<PathBuf> {
        let mut place = self.root.to_owned();
        for part in path.components() {
            match part {
                Component::Normal(name) => place.push(name),
                Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
                Component::ParentDir => return Err(invalid("path", "leads out of the folder")),
            }
        }
        Ok(place)
    }

    fn owner_of(&self, member: &Member) -> Option<Owner> {
        let kept = || Owner::exactly(member.uid, member.gid);
        if self.keep_owner { Some(kept()) } else { self.owner }
    }

    /// Makes a member; `left` is what of its contents is still to be read.
    fn make(
        &mut self,
        member: &Member,
        path: &Path,
        left: &mut u64,
    ) -> Result<Outcome<()>, Broken> {
        let owner = self.owner_of(member);
        let made = match member.kind {
            Kind::File => return self.make_file(member, path, left),
            Kind::Directory => {
                let as_said = self.keep_owner || (self.is_new && path == self.root);
                make_folder(path, member.mode, owner, as_said)
            }
            Kind::Symlink => self.make_room(path).and_then(|()| {
                symlink(&member.target, path)?;
                owner.map_or(Ok(()), |owner| owner.take_path(path))
            }),
            Kind::HardLink => match self.place(&member.target) {
                Ok(target) => self.make_room(path).and_then(|()| fs::hard_link(target, path)),
                Err(body) => return Ok(Err(body)),
            },
            Kind::Other => Err(io::Error::other("a device or a pipe")),
        };
        Ok(made.map_err(|error| refused_path(path, &error)))
    }

    /// Has the folder of a link, and nothing but a folder at its place.
    fn make_room(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            make_all(folder, DIRECTORY_MODE, self.owner)?;
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn make_file(
        &mut self,
        member: &Member,
        path: &Path,
        left: &mut u64,
    ) -> Result<Outcome<()>, Broken> {
        let segments = match member.sparse {
            Some(_) => self.read_map(left)?,
            None => vec![(0, member.stored)],
        };
        let begun = Writing::begin(&Place {
            path,
            mode: Some(member.mode),
            make_parents: true,
            owner: self.owner_of(member),
        });
        let mut writing = match begun {
            Ok(writing) => writing,
            Err(body) => return Ok(Err(body)),
        };
        let mut at = 0;
        for (offset, length) in segments {
            if offset < at || length > *left {
                return Err(malformed("its map of holes is wrong"));
            }
            if let Err(body) = writing.skip(offset - at) {
                return Ok(Err(body));
            }
            let mut wanted = length;
            while wanted > 0 {
                let bytes = self.source.some(wanted)?;
                let count = u64::try_from(bytes.len()).unwrap_or_default();
                if count == 0 {
                    return Err(malformed("it ends in the middle"));
                }
                wanted -= count;
                *left -= count;
                if let Err(body) = writing.write(bytes) {
                    return Ok(Err(body));
                }
            }
            at = offset.saturating_add(length);
        }
        if let Err(body) = writing.skip(member.sparse.unwrap_or(at).saturating_sub(at)) {
            return Ok(Err(body));
        }
        self.reply.bytes += member.stored;
        Ok(writing.finish_at(member.mtime))
    }

    /// Reads the map of a file with holes, up to the end of its last block.
    fn read_map(&mut self, left: &mut u64) -> Result<Vec<(u64, u64)>, Broken> {
        let mut read = 0;
        let mut number = |source: &mut Source<'_>| -> Result<u64, Broken> {
            let mut line = Vec::new();
            loop {
                if read == *left || line.len() == LINE_MAX {
                    return Err(malformed("its map of holes is wrong"));
                }
                let mut byte = [0];
                source.exact(&mut byte)?;
                read += 1;
                match byte {
                    [b'\n'] => break,
                    [digit] => line.push(digit),
                }
            }
            let text = std::str::from_utf8(&line).ok().and_then(|text| text.parse().ok());
            text.ok_or_else(|| malformed("its map of holes is wrong"))
        };
        let count = number(&mut self.source)?;
        if count > SEGMENTS_MAX {
            return Err(malformed("its map of holes is too long"));
        }
        let mut segments = Vec::new();
        for _ in 0..count {
            segments.push((number(&mut self.source)?, number(&mut self.source)?));
        }
        let rest = u64::try_from(padding(read)).unwrap_or_default();
        if read + rest > *left {
            return Err(malformed("its map of holes is wrong"));
        }
        *left -= read + rest;
        self.source.skip(rest)?;
        Ok(segments)
    }
}

/// Makes a folder; one that exists stays as it is, unless it is to be as the archive says.
fn make_folder(path: &Path, mode: u32, owner: Option<Owner>, as_said: bool) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        make_all(folder, DIRECTORY_MODE, owner)?;
    }
    match make_one(path, mode, owner) {
        Ok(()) => {}
        Err(_) if path.is_dir() && !as_said => return Ok(()),
        Err(_) if path.is_dir() => owner.map_or(Ok(()), |owner| owner.take_path(path))?,
        Err(error) => return Err(error),
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

fn malformed(why: &'static str) -> Broken {
    Broken::Refused(invalid("archive", format!("the archive is not valid: {why}")))
}
