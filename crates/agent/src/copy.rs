//! Copies a folder of the image onto a file system in memory, as `cp -a` would.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, lchown, symlink};
use std::path::Path;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, mknod, utimensat};
use nix::sys::time::TimeSpec;

/// Gives the folder `to`, which exists, the owner, the mode and the contents of `from`, but for
/// what is called `without` at its top.
///
/// Sockets are left out: nobody listens on them.  Extended attributes are not copied.
///
/// # Errors
///
/// Something cannot be copied; the error names it.
pub fn tree(from: &Path, to: &Path, without: &str) -> io::Result<()> {
    let found = fs::metadata(from)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_name() != without {
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    }
    dress(to, &found)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    copy_one(from, to).map_err(|error| {
        // Only what failed itself is named, not each folder that it is in.
        if error.get_ref().is_some() {
            return error;
        }
        io::Error::new(error.kind(), format!("{}: {error}", to.display()))
    })
}

fn copy_one(from: &Path, to: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(from)?;
    let kind = found.file_type();
    if kind.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from)? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
    } else if kind.is_symlink() {
        symlink(fs::read_link(from)?, to)?;
    } else if kind.is_file() {
        fs::copy(from, to)?;
    } else if kind.is_socket() {
        return Ok(());
    } else {
        let kind = SFlag::from_bits_truncate(found.mode() & SFlag::S_IFMT.bits());
        mknod(to, kind, Mode::empty(), found.rdev())?;
    }
    dress(to, &found)
}

/// Gives `path` the owner, the mode and the times that `like` has.
fn dress(path: &Path, like: &Metadata) -> io::Result<()> {
    lchown(path, Some(like.uid()), Some(like.gid()))?;
    if !like.is_symlink() {
        // After the owner, since a change of that one takes set-user-id bits away.
        fs::set_permissions(path, fs::Permissions::from_mode(like.mode() & 0o7777))?;
    }
    let (read, written) = (
        TimeSpec::new(like.atime(), like.atime_nsec()),
        TimeSpec::new(like.mtime(), like.mtime_nsec()),
    );
    Ok(utimensat(AT_FDCWD, path, &read, &written, UtimensatFlags::NoFollowSymlink)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use nix::unistd::mkfifo;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("forkd-copy-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn a_copy_has_the_modes_the_times_the_links_and_the_contents() {
        let (from, to) = (folder("from"), folder("to"));
        fs::create_dir_all(from.join("app/deep")).unwrap();
        fs::write(from.join("app/deep/keep"), "kept").unwrap();
        fs::File::options().mode(0o600).create(true).append(true).open(from.join("key")).unwrap();
        symlink("/nowhere", from.join("link")).unwrap();
        mkfifo(&from.join("fifo"), Mode::S_IRUSR).unwrap();
        drop(UnixListener::bind(from.join("socket")).unwrap());
        fs::create_dir_all(from.join("forkd")).unwrap();
        if nix::unistd::geteuid().is_root() {
            lchown(from.join("app"), Some(33), Some(34)).unwrap();
            lchown(from.join("link"), Some(33), Some(34)).unwrap();
        }
        fs::set_permissions(from.join("app"), fs::Permissions::from_mode(0o3777)).unwrap();
        fs::set_permissions(&from, fs::Permissions::from_mode(0o711)).unwrap();

        tree(&from, &to, "forkd").unwrap();

        let look = |path: PathBuf| {
            let found = fs::symlink_metadata(&path).unwrap();
            (found.mode(), found.uid(), found.gid(), found.mtime(), found.mtime_nsec())
        };
        for name in ["", "app", "app/deep", "app/deep/keep", "key", "link", "fifo"] {
            assert_eq!(look(to.join(name)), look(from.join(name)), "{name}");
        }
        assert_eq!(fs::read_to_string(to.join("app/deep/keep")).unwrap(), "kept");
        assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("/nowhere"));
        let names = fs::read_dir(&to).unwrap().count();
        assert_eq!(names, 4, "neither the socket nor what is left out");
        fs::remove_dir_all(from).unwrap();
        fs::remove_dir_all(to).unwrap();
    }

    #[test]
    fn what_cannot_be_copied_is_named_once() {
        let (from, to) = (folder("fails-from"), folder("fails-to"));
        fs::create_dir_all(from.join("app")).unwrap();
        fs::write(from.join("app/keep"), "").unwrap();
        fs::create_dir_all(to.join("app/keep")).unwrap();

        let error = tree(&from, &to, "forkd").unwrap_err().to_string();

        let name = to.join("app/keep").display().to_string();
        assert!(error.starts_with(&format!("{name}: ")), "{error}");
        assert_eq!(error.matches("app").count(), 1, "{error}");
        fs::remove_dir_all(from).unwrap();
        fs::remove_dir_all(to).unwrap();
    }
}
