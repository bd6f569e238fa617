//! Who owns what is made new.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown, lchown};
use std::path::Path;

use crate::failure::Outcome;
use crate::log;
use crate::users;

/// Where the image's users are.
const ETC: &str = "/etc";

/// A new file's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    uid: u32,
    gid: u32,
    /// Whether this is the owner of everything, also of what exists.
    exact: bool,
}

impl Owner {
    /// The user that a request asks for, else the image's `default`.  `None` is root, which owns
    /// what the agent makes anyway.
    ///
    /// # Errors
    ///
    /// `invalid_request` naming `user` if the request asks for a user that the image lacks.  An
    /// image that lacks its own default user gets files of root's.
    pub fn find(asked: Option<&str>, default: &str) -> Outcome<Option<Self>> {
        let user = asked.unwrap_or(default);
        if users::is_root(user) {
            return Ok(None);
        }
        match users::find(user, Path::new(ETC)) {
            Ok(user) => Ok(Some(Self { uid: user.uid, gid: user.gid, exact: false })),
            Err(body) if asked.is_some() => Err(body),
            Err(body) => {
                log::line(&format!("new files belong to root: {}", body.message));
                Ok(None)
            }
        }
    }

    /// The owner of a file that is copied with its owner.
    pub fn exactly(uid: u32, gid: u32) -> Self {
        Self { uid, gid, exact: true }
    }

    /// Whether a file that is replaced gets this owner, too.
    pub fn is_exact(self) -> bool {
        self.exact
    }

    /// Gives an open file that was made in `folder` to this owner.
    ///
    /// # Errors
    ///
    /// The kernel refused, for another reason than a file system without owners.
    pub fn take(self, made: impl AsFd, folder: &Path) -> io::Result<()> {
        forgiving(fchown(made, Some(self.uid), self.group_in(folder)?))
    }

    /// As [`take`](Self::take), for what is at `path`; a link itself, not what it points at.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take).
    pub fn take_path(self, path: &Path) -> io::Result<()> {
        let group = path.parent().map_or(Ok(Some(self.gid)), |folder| self.group_in(folder))?;
        forgiving(lchown(path, Some(self.uid), group))
    }

    /// The group to set: none in a folder that hands its own down.
    fn group_in(self, folder: &Path) -> io::Result<Option<u32>> {
        let inherits = !self.exact && fs::metadata(folder)?.mode() & nix::libc::S_ISGID != 0;
        Ok(if inherits { None } else { Some(self.gid) })
    }
}

/// Forgives file systems that know no owners.
fn forgiving(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Makes one directory, which must not exist.
///
/// # Errors
///
/// The kernel refused.
pub fn make_one(path: &Path, mode: u32, owner: Option<Owner>) -> io::Result<()> {
    DirBuilder::new().mode(mode).create(path)?;
    owner.map_or(Ok(()), |owner| owner.take_path(path))
}

/// Makes a directory and those above it that are missing.  The standard library does this by
/// recursion, for which the stack of a thread is too small.
///
/// # Errors
///
/// The kernel refused.
pub fn make_all(path: &Path, mode: u32, owner: Option<Owner>) -> io::Result<()> {
    let mut missing = Vec::new();
    for folder in path.ancestors() {
        match make_one(folder, mode, owner) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(folder),
            Err(_) if folder.is_dir() => break,
            Err(error) => return Err(error),
        }
    }
    for folder in missing.into_iter().rev() {
        match make_one(folder, mode, owner) {
            // Somebody else makes it at the same time.
            Err(_) if folder.is_dir() => {}
            other => other?,
        }
    }
    Ok(())
}
