//! What a guest without an init of its own expects to find mounted and set.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};

use crate::cgroup::MOUNTED_AT;
use crate::log;

struct Mount {
    source: &'static str,
    target: &'static str,
    kind: &'static str,
    flags: MsFlags,
    options: &'static str,
    /// Options besides, which an older kernel may not know: the first that it does are taken.
    wishes: &'static [&'static str],
}

const fn plain(
    source: &'static str,
    target: &'static str,
    kind: &'static str,
    options: &'static str,
) -> Mount {
    let flags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
    Mount { source, target, kind, flags, options, wishes: &[] }
}

/// `/tmp` stays on the disk: it is private to each sandbox there, and does not count as memory.
const MOUNTS: [Mount; 7] = [
    plain("proc", "/proc", "proc", ""),
    plain("sysfs", "/sys", "sysfs", ""),
    Mount {
        source: "devtmpfs",
        target: "/dev",
        kind: "devtmpfs",
        flags: MsFlags::MS_NOSUID,
        options: "mode=0755",
        wishes: &[],
    },
    Mount {
        source: "devpts",
        target: "/dev/pts",
        kind: "devpts",
        flags: MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        options: "gid=5,mode=0620,ptmxmode=0666",
        wishes: &[],
    },
    plain("tmpfs", "/dev/shm", "tmpfs", "mode=1777"),
    plain("tmpfs", "/run", "tmpfs", "mode=0755"),
    Mount { wishes: &CGROUP_WISHES, ..plain("cgroup2", MOUNTED_AT, "cgroup2", "") },
];

/// Going from one cgroup to another, as the agent does for each process, would else wait for every
/// processor.  The other two are what systemd asks for, and finds if it is the image's init.
const CGROUP_WISHES: [&str; 2] =
    ["favordynmods,nsdelegate,memory_recursiveprot", "nsdelegate,memory_recursiveprot"];

/// Links that programs expect in `/dev`.
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];

/// Settings that keep an idle guest idle, and its memory shared: whatever wakes up on a timer
/// writes to memory, and what is written to is no longer shared with the siblings.  A huge page is
/// the worst of them, since the first byte that a process wants costs two mebibytes of zeroes.
const QUIET: [(&str, &str); 5] = [
    ("/proc/sys/kernel/watchdog", "0"),
    ("/proc/sys/kernel/hung_task_timeout_secs", "0"),
    ("/proc/sys/vm/stat_interval", "3600"),
    ("/proc/sys/vm/compaction_proactiveness", "0"),
    ("/sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
];

/// Limits of the whole guest, as systemd and distributions set them.  The kernel's own follow from
/// the memory, and a guest has little of it: none of these takes any by itself.
const ROOM: [(&str, &str); 9] = [
    ("/proc/sys/fs/file-max", "9223372036854775807"),
    ("/proc/sys/fs/inotify/max_user_instances", "8192"),
    ("/proc/sys/fs/inotify/max_user_watches", "1048576"),
    ("/proc/sys/fs/fanotify/max_user_marks", "1048576"),
    ("/proc/sys/kernel/keys/maxkeys", "2000"),
    ("/proc/sys/kernel/pid_max", "4194304"),
    ("/proc/sys/net/ipv4/ping_group_range", "0 2147483647"),
    ("/proc/sys/net/unix/max_dgram_qlen", "512"),
    ("/proc/sys/vm/max_map_count", "1048576"),
];

/// Mounts the kernel's own file systems below `root`; what is mounted already stays.
///
/// # Errors
///
/// `/proc`, `/sys` or `/dev` cannot be had.  Without the others a guest is poorer, and the console
/// says so.
pub fn kernel(root: &Path) -> io::Result<()> {
    for one in MOUNTS.iter().take(3) {
        mount_one(root, one)?;
    }
    Ok(())
}

/// Mounts everything, sets the links and the settings.
///
/// # Errors
///
/// As [`kernel`].
pub fn all() -> io::Result<()> {
    kernel(Path::new("/"))?;
    for one in MOUNTS.iter().skip(3) {
        if let Err(error) = mount_one(Path::new("/"), one) {
            log::line(&format!("{}: {error}", one.target));
        }
    }
    for (target, link) in LINKS {
        if let Err(error) = symlink(target, link)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            log::line(&format!("{link}: {error}"));
        }
    }
    for (name, value) in QUIET.into_iter().chain(ROOM) {
        // A kernel built without one of these has nothing to set.
        if let Err(error) = fs::write(name, value)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::line(&format!("{name}: {error}"));
        }
    }
    Ok(())
}

fn mount_one(root: &Path, one: &Mount) -> io::Result<()> {
    let target = root.join(one.target.trim_start_matches('/'));
    if is_mounted(&target) {
        return Ok(());
    }
    fs::create_dir_all(&target)?;
    let mount_with =
        |options: &str| mount(Some(one.source), &target, Some(one.kind), one.flags, Some(options));
    let wished = one.wishes.iter().map(|wishes| mount_with(wishes)).find(Result::is_ok);
    let mounted = wished.unwrap_or_else(|| mount_with(one.options));
    match mounted {
        // A devtmpfs that the kernel has mounted itself.
        Ok(()) | Err(Errno::EBUSY) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Whether something is mounted at `target`, as `/proc` tells; nothing is, before `/proc` is.
pub fn is_mounted(target: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounted_in(&table, target)
}

fn mounted_in(table: &str, target: &Path) -> bool {
    table.lines().filter_map(|line| line.split(' ').nth(1)).any(|at| Path::new(at) == target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_whole_path() {
        let table = "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n";
        assert!(mounted_in(table, Path::new("/proc")));
        assert!(mounted_in(table, Path::new("/dev/shm")));
        assert!(!mounted_in(table, Path::new("/dev")));
    }
}
