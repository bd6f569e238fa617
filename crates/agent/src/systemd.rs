//! What a guest needs whose process 1 is systemd, so that a fork can change who it is.
//!
//! `journald` reads the ids of machine and boot once.  In a fork it would go on under the ids of
//! its parent, where no `journalctl` of the fork looks.  So a fork restarts it, after the folder of
//! its journals got the new id for a name: what the parent has logged stays to be seen.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use forkd_proto::Text;

use crate::log;

const UNITS: &str = "/run/systemd/system";

/// Units that are not to start.  This one takes the mount of `/etc/machine-id` away, to write into
/// the file below what is its parent's id in every fork.
const MASKED: [&str; 1] = ["systemd-machine-id-commit.service"];

/// A fork of a fork restarts it again, which is no sign of a crash.
const JOURNAL_LIMIT: &str = "[Unit]\nStartLimitIntervalSec=0\n";

/// Where `journald` keeps what, in memory and on the disk.
const JOURNALS: [&str; 2] = ["/run/log/journal", "/var/log/journal"];

/// Nothing happens where it does not run.
const RESTART_JOURNAL: [&str; 3] = ["systemctl", "try-restart", "systemd-journald.service"];

/// Prepares for the image's init, if that is systemd.
pub fn prepare() {
    let init = fs::canonicalize("/sbin/init").unwrap_or_default();
    if init.file_name().is_some_and(|name| name == "systemd")
        && let Err(error) = write_units(Path::new(UNITS))
    {
        log::line(&format!("{UNITS}: {error}"));
    }
}

fn write_units(folder: &Path) -> io::Result<()> {
    let limits = folder.join("systemd-journald.service.d");
    fs::create_dir_all(&limits)?;
    fs::write(limits.join("forkd.conf"), JOURNAL_LIMIT)?;
    for unit in MASKED {
        symlink("/dev/null", folder.join(unit))?;
    }
    Ok(())
}

/// Whether it is process 1.
pub fn runs() -> bool {
    // The first question is answered without a look into a directory, which each fork would pay
    // for.
    std::process::id() != 1 && Path::new(UNITS).exists()
}

/// Has the journals of a machine found under its new id.
pub fn rename_journals(old_id: &str, new_id: &str) {
    if old_id.is_empty() {
        return;
    }
    for folder in JOURNALS.map(Path::new) {
        if let Err(error) = fs::rename(folder.join(old_id), folder.join(new_id))
            && error.kind() != io::ErrorKind::NotFound
        {
            log::line(&format!("{}: {error}", folder.display()));
        }
    }
}

/// What a fork runs.
pub fn restart_journal() -> Vec<Text> {
    RESTART_JOURNAL.map(Into::into).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_that_would_undo_our_mount_is_masked_before_systemd_starts() {
        let folder = std::env::temp_dir().join(format!("forkd-units-{}", std::process::id()));

        write_units(&folder).unwrap();

        let masked = fs::read_link(folder.join("systemd-machine-id-commit.service")).unwrap();
        assert_eq!(masked, Path::new("/dev/null"));
        let limits = fs::read_to_string(folder.join("systemd-journald.service.d/forkd.conf"));
        assert_eq!(limits.unwrap(), JOURNAL_LIMIT);
        fs::remove_dir_all(folder).unwrap();
    }
}
