//! Writing one file: whole under its name, or in place where the name cannot be given away.

use std::fs::{self, File, Metadata};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use forkd_proto::guest::ErrorCode;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::{
    AtFlags, CWD, StatxAttributes, StatxFlags, fsetxattr, getxattr, listxattr, statx,
};

use super::owner::{Owner, make_all};
use super::{DIRECTORY_MODE, FILE_MODE};
use crate::failure::{Outcome, failure, invalid, refused_path};

/// Most links that lead from one to the next: the kernel's `MAXSYMLINKS`.
const LINKS_MAX: usize = 40;

/// Bytes that are held back before a file is changed in place: up to here it changes by one write,
/// and not at all if the client goes away first.
const HELD_MAX: usize = 1 << 20;

/// Bytes of a hole that are written at once where there can be none.
const HELD_ZEROS: u64 = 64 << 10;

/// How long a pipe or a device may take to make room, in milliseconds: less than a host waits.
const ROOM_TIMEOUT_MS: u16 = 30_000;

/// Largest attribute that is kept of a file that is replaced: the kernel's `XATTR_SIZE_MAX`.
const ATTRIBUTE_MAX: usize = 64 << 10;

/// An attribute that the kernel, too, takes from a file that is written to.
const CAPABILITY: &[u8] = b"security.capability";

/// Tells the temporary files of concurrent writes apart.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// A file to write.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Its name; a link is written through.
    pub path: &'a Path,
    /// Permission bits; those of the file that is replaced if none are given.
    pub mode: Option<u32>,
    /// Whether to make the directories above it.
    pub make_parents: bool,
    /// Who gets what is made new.
    pub owner: Option<Owner>,
}

/// A file that is being written.
#[derive(Debug)]
pub enum Writing {
    /// Beside its place.
    Aside(Draft),
    /// Where it is.
    InPlace(InPlace),
}

impl Writing {
    /// Begins to write.  A mount point, a device, a pipe, and a file in a folder that takes no new
    /// ones, such as those of `/proc`, are written in place; every other file aside.
    ///
    /// # Errors
    ///
    /// The file cannot be written, as far as that shows before the first byte.
    pub fn begin(place: &Place<'_>) -> Outcome<Self> {
        let target = follow(place.path).map_err(|error| refused_path(place.path, &error))?;
        let existing = fs::metadata(&target).ok();
        if existing.as_ref().is_some_and(Metadata::is_dir) {
            let words = format!("{}: a directory", target.display());
            return Err(failure(ErrorCode::IsADirectory, words));
        }
        let Some(folder) = target.parent().filter(|_| target.file_name().is_some()) else {
            return Err(invalid("path", "names no file"));
        };
        if place.make_parents {
            make_all(folder, DIRECTORY_MODE, place.owner)
                .map_err(|error| refused_path(folder, &error))?;
        }
        if let Some(found) = existing.as_ref().filter(|found| keeps_its_name(&target, found)) {
            return InPlace::begin(target, found).map(Self::InPlace);
        }
        match (Draft::begin(&target, existing.as_ref(), place), &existing) {
            (Ok(draft), _) => Ok(Self::Aside(draft)),
            (Err(error), Some(found)) if takes_no_files(&error) => {
                InPlace::begin(target, found).map(Self::InPlace)
            }
            (Err(error), _) => Err(refused_path(&target, &error)),
        }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    ///
    /// The disk is full, or whatever else the kernel says.
    pub fn write(&mut self, bytes: &[u8]) -> Outcome<()> {
        match self {
            Self::Aside(Draft { file, target, .. }) => {
                file.write_all(bytes).map_err(|error| refused_path(target, &error))
            }
            Self::InPlace(file) => {
                file.write(bytes).map_err(|error| refused_path(&file.path, &error))
            }
        }
    }

    /// Leaves a hole of so many bytes.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn skip(&mut self, count: u64) -> Outcome<()> {
        match self {
            Self::Aside(draft) => {
                draft.skip(count).map_err(|error| refused_path(&draft.target, &error))
            }
            Self::InPlace(file) => {
                file.fill(count).map_err(|error| refused_path(&file.path, &error))
            }
        }
    }

    /// Has the file under its name.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn finish(self) -> Outcome<()> {
        match self {
            Self::Aside(draft) => draft.publish(),
            Self::InPlace(mut file) => {
                file.flush().map_err(|error| refused_path(&file.path, &error))
            }
        }
    }

    /// Has the file under its name, last changed so many seconds after the epoch.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn finish_at(self, mtime: u64) -> Outcome<()> {
        if let Self::Aside(draft) = &self
            && let Some(mtime) = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(mtime))
        {
            let set = draft.file.set_modified(mtime);
            set.map_err(|error| refused_path(&draft.target, &error))?;
        }
        self.finish()
    }
}

/// Where a path leads when its last part is a link, also one that leads to nothing yet.
fn follow(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..=LINKS_MAX {
        let Ok(next) = fs::read_link(&path) else { return Ok(path) };
        path = path.parent().map_or_else(|| next.clone(), |folder| folder.join(&next));
    }
    Err(nix::errno::Errno::ELOOP.into())
}

/// Whether a new file must not take the name of this one.
fn keeps_its_name(path: &Path, found: &Metadata) -> bool {
    let is_mount = || {
        statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
            .is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
    };
    !found.is_file() || is_mount()
}

/// Whether a folder refuses a new file in a way that does not mean an existing one is refused, too.
fn takes_no_files(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied
            | io::ErrorKind::NotFound
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::Unsupported
    )
}

/// A file that is being written beside its place; gone unless it is published.
#[derive(Debug)]
pub struct Draft {
    file: File,
    path: PathBuf,
    target: PathBuf,
    mode: u32,
    /// Owner and group of the file that it replaces.
    kept: Option<(u32, u32)>,
    published: bool,
}

impl Draft {
    fn begin(target: &Path, existing: Option<&Metadata>, place: &Place<'_>) -> io::Result<Self> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let folder = target.parent().unwrap_or(Path::new("/"));
        let number = WRITES.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".{}.{number}.forkd-part", short(&name)));
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path)?;
        let replaces_owner = place.owner.is_some_and(Owner::is_exact);
        let kept = existing.filter(|_| !replaces_owner).map(|found| (found.uid(), found.gid()));
        let mode = place.mode.unwrap_or(existing.map_or(FILE_MODE, |it| it.mode() & 0o7777));
        // From here on the file is removed with the draft.
        let draft = Self { file, path, target: target.to_owned(), mode, kept, published: false };
        if let (None, Some(owner)) = (kept, place.owner) {
            owner.take(&draft.file, folder)?;
        }
        Ok(draft)
    }

    fn skip(&mut self, count: u64) -> io::Result<()> {
        if count == 0 {
            return Ok(());
        }
        let beyond = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let at = self.file.seek(SeekFrom::Current(i64::try_from(count).map_err(beyond)?))?;
        self.file.set_len(at)
    }

    fn publish(mut self) -> Outcome<()> {
        let finish = || -> io::Result<()> {
            if let Some((uid, gid)) = self.kept {
                fchown(&self.file, Some(uid), Some(gid))?;
                keep_attributes(&self.target, &self.file);
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

/// Gives a new file the extended attributes of the one that it replaces, as far as its file system
/// takes them.
fn keep_attributes(from: &Path, to: &File) {
    let mut names = vec![0; ATTRIBUTE_MAX];
    let Ok(length) = listxattr(from, names.as_mut_slice()) else { return };
    let names = names.get(..length).unwrap_or_default();
    let mut value = Vec::new();
    for name in names.split(|byte| *byte == 0) {
        if name.is_empty() || name == CAPABILITY {
            continue;
        }
        value.resize(ATTRIBUTE_MAX, 0);
        let kept = getxattr(from, name, value.as_mut_slice()).and_then(|length| {
            let value = value.get(..length).unwrap_or_default();
            fsetxattr(to, name, value, rustix::fs::XattrFlags::empty())
        });
        if let Err(error) = kept {
            let name = String::from_utf8_lossy(name);
            crate::log::line(&format!("{}: {name} is not kept: {error}", from.display()));
        }
    }
}

/// A file that is written where it is.  It keeps its owner and its mode.
#[derive(Debug)]
pub struct InPlace {
    file: File,
    path: PathBuf,
    held: Vec<u8>,
    /// Whether the old contents are still there, and have to go.
    stale: bool,
}

impl InPlace {
    fn begin(path: PathBuf, found: &Metadata) -> Outcome<Self> {
        if found.file_type().is_socket() {
            return Err(invalid("path", format!("{}: a socket", path.display())));
        }
        // Opening a pipe would wait for a reader, and some devices for the other side.
        let flags = nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY;
        match File::options().write(true).custom_flags(flags).open(&path) {
            Ok(file) => {
                let stale = found.is_file() && found.len() > 0;
                Ok(Self { file, path, held: Vec::new(), stale })
            }
            Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => {
                let words = if found.file_type().is_fifo() {
                    "nobody reads this pipe"
                } else {
                    "there is no such device"
                };
                Err(invalid("path", format!("{}: {words}", path.display())))
            }
            Err(error) => Err(refused_path(&path, &error)),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.held.extend_from_slice(bytes);
        if self.held.len() > HELD_MAX { self.flush() } else { Ok(()) }
    }

    fn fill(&mut self, mut count: u64) -> io::Result<()> {
        while count > 0 {
            let now = count.min(HELD_ZEROS);
            self.write(&vec![0; usize::try_from(now).unwrap_or_default()])?;
            count -= now;
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.stale) {
            self.file.set_len(0)?;
        }
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_slice();
        while !rest.is_empty() {
            match self.file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for_room()?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn wait_for_room(&self) -> io::Result<()> {
        let mut watched = [PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
        match poll(&mut watched, PollTimeout::from(ROOM_TIMEOUT_MS)) {
            Ok(0) => Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Enough of a name to recognise it by, with room for a suffix within 255 bytes.
fn short(name: &str) -> String {
    name.chars().take(50).collect()
}
