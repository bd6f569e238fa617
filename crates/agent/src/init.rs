//! `/init` of the initramfs: from a bare kernel to the image's root.
//!
//! | on the command line  | meaning                                           | default      |
//! |----------------------|---------------------------------------------------|--------------|
//! | `forkd.root=`        | block device of the root, or `none`: stay in here | `/dev/vda`   |
//! | `forkd.rootfstype=`  | its file system                                   | `ext4`       |
//! | `forkd.rootflags=`   | mount options, among them `ro`, `rw`, `noatime`   | `rw,noatime` |
//! | `forkd.init=image`   | process 1 is the image's own `/sbin/init`         | the agent is |
//!
//! A root of type ext4 is by default also mounted with `discard`: what is deleted is given back to
//! the host, and no longer counts for the limit on the disk.
//!
//! `/etc/forkd/modules` in the initramfs names the kernel modules to load, one path per line, in
//! their order.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::chroot;

use crate::{boot, copy, identity, log, modprobe, mounts, systemd};

const MODULES: &str = "/etc/forkd/modules";
const NEW_ROOT: &str = "/newroot";

/// Where the agent lives once the initramfs is gone: in memory, whatever the image's disk is.
const AGENT: &str = "/run/forkd/bin/agent";

/// What the agent is called when the kernel asks for a module; see [`modprobe`].
const MODPROBE: &str = "/run/forkd/bin/modprobe";

/// How long the root's device may take to appear.
const ROOT_DEADLINE: Duration = Duration::from_secs(10);

/// Options of the file system for the agent alone; tmpfs(5).
const AGENT_MOUNT: &str = "mode=0755,huge=always";

/// Boots; comes back only if it cannot.
pub fn run() -> ExitCode {
    let Err(error) = boot();
    log::line(&format!("cannot boot: {error}"));
    // The end of process 1 is a kernel panic, which tells the host that the machine is over.
    ExitCode::FAILURE
}

fn boot() -> io::Result<std::convert::Infallible> {
    mounts::kernel(Path::new("/"))?;
    load_modules()?;
    let options = Options::parse(&fs::read_to_string("/proc/cmdline")?);
    if let Some(root) = &options.root {
        enter(root, &options)?;
    }
    let agent = install_agent()?;
    // All of it is there before any program of the image runs, which may look once and never again.
    mounts::all()?;
    identity::mount_files(Path::new(boot::FOLDER))?;
    modprobe::prepare(MODPROBE);
    if options.image_init {
        systemd::prepare();
        Command::new(&agent).arg("agent").spawn()?;
        return Err(Command::new("/sbin/init").env_clear().exec());
    }
    // A single heap, whichever thread allocates: a second one would be more pages to dirty after a
    // fork.
    let tunables = "glibc.malloc.arena_max=1";
    Err(Command::new(&agent).arg("agent").env_clear().env("GLIBC_TUNABLES", tunables).exec())
}

#[derive(Debug, PartialEq, Eq)]
struct Options {
    root: Option<PathBuf>,
    kind: String,
    flags: String,
    image_init: bool,
}

impl Options {
    fn parse(cmdline: &str) -> Self {
        let mut options = Self {
            root: Some(PathBuf::from("/dev/vda")),
            kind: "ext4".to_owned(),
            flags: String::new(),
            image_init: false,
        };
        for word in cmdline.split_ascii_whitespace() {
            match word.split_once('=') {
                Some(("forkd.root", "none")) => options.root = None,
                Some(("forkd.root", device)) => options.root = Some(PathBuf::from(device)),
                Some(("forkd.rootfstype", kind)) => kind.clone_into(&mut options.kind),
                Some(("forkd.rootflags", flags)) => flags.clone_into(&mut options.flags),
                Some(("forkd.init", who)) => options.image_init = who == "image",
                _ => {}
            }
        }
        if options.flags.is_empty() {
            let discard = if options.kind == "ext4" { ",discard" } else { "" };
            options.flags = format!("rw,noatime{discard}");
        }
        options
    }

    /// Flags of the mount itself, and what is left for the file system.
    fn mount_flags(&self) -> (MsFlags, String) {
        let mut flags = MsFlags::empty();
        let mut rest = Vec::new();
        for word in self.flags.split(',') {
            match word {
                "rw" | "" => {}
                "ro" => flags |= MsFlags::MS_RDONLY,
                "noatime" => flags |= MsFlags::MS_NOATIME,
                "nodiratime" => flags |= MsFlags::MS_NODIRATIME,
                "relatime" => flags |= MsFlags::MS_RELATIME,
                other => rest.push(other),
            }
        }
        (flags, rest.join(","))
    }
}

fn load_modules() -> io::Result<()> {
    let list = match fs::read_to_string(MODULES) {
        Ok(list) => list,
        // A kernel that has everything built in.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for path in
        list.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        modprobe::insert(Path::new(path), "").map_err(|error| {
            io::Error::new(error.kind(), format!("cannot load {path}: {error}"))
        })?;
    }
    Ok(())
}

/// Waits until the device is there: every change in `/dev` is an event.
fn wait_for(device: &Path) -> io::Result<()> {
    let ready = || fs::metadata(device).is_ok_and(|found| found.file_type().is_block_device());
    let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    watch.add_watch("/dev", AddWatchFlags::IN_CREATE)?;
    let deadline = Instant::now() + ROOT_DEADLINE;
    while !ready() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let limit = ROOT_DEADLINE.as_secs();
            let text = format!("{} has not appeared within {limit} s", device.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(std::os::fd::AsFd::as_fd(&watch), PollFlags::POLLIN)];
        if poll(&mut fds, timeout)? > 0 {
            // What was created is of no interest, only whether it is what we wait for.
            drop(watch.read_events());
        }
    }
    Ok(())
}

/// Mounts the root and makes it `/`, leaving nothing of the initramfs in memory.
fn enter(device: &Path, options: &Options) -> io::Result<()> {
    wait_for(device)?;
    fs::create_dir_all(NEW_ROOT)?;
    let (flags, data) = options.mount_flags();
    mount(Some(device), NEW_ROOT, Some(options.kind.as_str()), flags, Some(data.as_str()))
        .map_err(|errno| {
            let error = io::Error::from(errno);
            io::Error::new(error.kind(), format!("cannot mount {}: {error}", device.display()))
        })?;
    for one in ["proc", "sys", "dev"] {
        let (from, to) = (Path::new("/").join(one), Path::new(NEW_ROOT).join(one));
        fs::create_dir_all(&to)?;
        move_mount(&from, &to)?;
    }
    let agent = fs::read("/init")?;
    let old_root = fs::metadata("/")?.dev();
    remove_all(Path::new("/"), old_root);
    std::env::set_current_dir(NEW_ROOT)?;
    move_mount(Path::new("."), Path::new("/"))?;
    chroot(".")?;
    std::env::set_current_dir("/")?;
    place_agent(&agent)
}

fn move_mount(from: &Path, to: &Path) -> io::Result<()> {
    Ok(mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>)?)
}

/// Removes what is in `folder` on device `device`; what cannot be removed only costs memory.
fn remove_all(folder: &Path, device: u64) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        if found.dev() != device {
            continue;
        }
        if found.is_dir() {
            remove_all(&path, device);
            // Not empty where something is mounted below.
            drop(fs::remove_dir(&path));
        } else {
            drop(fs::remove_file(&path));
        }
    }
}

/// The agent's place in memory, filled if it is not yet.
fn install_agent() -> io::Result<PathBuf> {
    if !Path::new(AGENT).exists() {
        place_agent(&fs::read("/init")?)?;
    }
    Ok(PathBuf::from(AGENT))
}

fn place_agent(agent: &[u8]) -> io::Result<()> {
    keep_run(Path::new("/run"))?;
    let bin = Path::new("/run/forkd/bin");
    fs::create_dir_all(bin)?;
    // A fork then maps all of the agent's code at once, and not page by page.  A kernel without
    // huge pages refuses the word; the code is where everything else is then.
    if let Err(error) = mount_tmpfs(bin, AGENT_MOUNT) {
        log::line(&format!("{}: {error}", bin.display()));
    }
    fs::write(AGENT, agent)?;
    fs::set_permissions(AGENT, fs::Permissions::from_mode(0o755))?;
    symlink("agent", MODPROBE)
}

/// Makes `run` a file system in memory that holds what the image has there.  Images keep folders in
/// it that their servers need, with owners and modes of their own.
///
/// # Errors
///
/// Also that it does not fit into half of the guest's memory.
fn keep_run(run: &Path) -> io::Result<()> {
    fs::create_dir_all(run)?;
    if mounts::is_mounted(run) {
        return Ok(());
    }
    let images = File::open(run)?;
    mount_tmpfs(run, "mode=0755")?;
    // What is below the mount can still be reached by what was opened before.
    let images = PathBuf::from(format!("/proc/self/fd/{}", images.as_raw_fd()));
    copy::tree(&images, run, "forkd").map_err(|error| {
        let text = format!("cannot keep what the image has in /run: {error}");
        io::Error::new(error.kind(), text)
    })
}

fn mount_tmpfs(target: &Path, options: &str) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    Ok(mount(Some("tmpfs"), target, Some("tmpfs"), flags, Some(options))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_word_the_root_is_the_first_disk() {
        let options = Options::parse("console=ttyS0 quiet");
        assert_eq!(options.root.as_deref(), Some(Path::new("/dev/vda")));
        let (flags, data) = options.mount_flags();
        assert_eq!((flags, data.as_str()), (MsFlags::MS_NOATIME, "discard"));
        assert!(!options.image_init);
    }

    #[test]
    fn a_file_system_that_may_not_know_the_word_is_mounted_without_discard() {
        let options = Options::parse("forkd.rootfstype=squashfs");
        assert_eq!(options.mount_flags(), (MsFlags::MS_NOATIME, String::new()));
    }

    #[test]
    fn the_command_line_decides() {
        let line =
            "forkd.root=/dev/vdb forkd.rootfstype=xfs forkd.rootflags=ro,nouuid forkd.init=image";
        let options = Options::parse(line);
        assert_eq!(options.root.as_deref(), Some(Path::new("/dev/vdb")));
        assert_eq!(options.kind, "xfs");
        assert_eq!(options.mount_flags(), (MsFlags::MS_RDONLY, "nouuid".to_owned()));
        assert!(options.image_init);
    }

    #[test]
    fn a_guest_without_a_disk_stays_in_its_initramfs() {
        assert_eq!(Options::parse("forkd.root=none\n").root, None);
    }
}
