//! Who this guest is: clock, entropy, names, network.
//!
//! `/etc/hostname`, `/etc/machine-id`, `/etc/hosts`, `/etc/resolv.conf` and the kernel's boot id
//! are, from boot on, bind mounts of files in memory that this module keeps open.  So a fork
//! changes them without touching the disk, looking up a path, or a moment in which one is missing.
//! They are mounted before the image's init starts: a program that has read one keeps it open, or
//! what it said, and would not see a mount that comes later.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forkd_proto::guest::{ErrorBody, ErrorCode, Network, PostFork};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::mount::{MsFlags, mount};
use nix::unistd::sethostname;

use crate::clock;
use crate::entropy::Pool;
use crate::failure::{Outcome, failure};
use crate::netlink::Interface;
use crate::{log, systemd};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const MACHINE_ID: &str = "/etc/machine-id";
/// The same id for D-Bus, in images where it is no link to the other.
const DBUS_ID: &str = "/var/lib/dbus/machine-id";
const HOSTNAME: &str = "/etc/hostname";
const HOSTS: &str = "/etc/hosts";
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// What is mounted.
const FILES: [&str; 5] = [HOSTNAME, HOSTS, MACHINE_ID, BOOT_ID, RESOLV_CONF];
/// What each of the files has room for: a page.
const TEXT_BYTES: i64 = 4096;
/// Largest `/etc/hosts` in which the guest's name is looked for; to a larger one it is added.
const HOSTS_MAX: u64 = 16 << 20;

/// How much of a file with an id is read: more than an id has.
const HELD_BYTES_MAX: usize = 64;

/// What makes this guest somebody.
#[derive(Debug)]
pub struct Identity {
    pool: Pool,
    hostname: File,
    hosts: File,
    /// The name that `hosts` was last given.
    name: String,
    machine_id: File,
    boot_id: File,
    resolv_conf: File,
    interface: Option<Interface>,
    /// No program ran but the runtime before the snapshot, and the agent has been asked for nothing
    /// since by which one could have been started.
    dormant: bool,
    /// The network that this guest gets when it is first used.
    put_off: Option<Network>,
}

impl Identity {
    /// Opens the files that [`mount_files`] has put over the image's.
    ///
    /// # Errors
    ///
    /// Without them no fork could get an identity of its own.
    pub fn prepare(folder: &Path) -> io::Result<Self> {
        let ours = |target: &str| {
            File::options().read(true).write(true).open(file_of(folder, Path::new(target)))
        };
        Ok(Self {
            pool: Pool::open()?,
            hostname: ours(HOSTNAME)?,
            hosts: ours(HOSTS)?,
            name: String::new(),
            machine_id: ours(MACHINE_ID)?,
            boot_id: ours(BOOT_ID)?,
            resolv_conf: ours(RESOLV_CONF)?,
            interface: Interface::prepare()
                .inspect_err(|error| log::line(&format!("no network: {error}")))
                .ok(),
            dormant: false,
            put_off: None,
        })
    }

    /// Takes the host name that the image has, or `forkd`.
    ///
    /// # Errors
    ///
    /// The kernel refused.
    pub fn adopt_hostname(&mut self) -> io::Result<()> {
        let image = fs::read_to_string(HOSTNAME).unwrap_or_default();
        let name = match image.trim() {
            "" => "forkd",
            name => name,
        };
        sethostname(name)?;
        replace(&self.hostname, &format!("{name}\n"))?;
        replace(&self.hosts, &hosts(name))?;
        name.clone_into(&mut self.name);
        Ok(())
    }

    /// Becomes the sandbox that `request` describes, as far as the kernel is concerned.  Returns
    /// whether it has the IPv6 address that it was given, or will.
    ///
    /// In a dormant guest whose runtime and hooks are `idle` nobody can look at the network until
    /// the agent is asked for something: one that has had none yet gets it then, by
    /// [`rouse`](Self::rouse).
    ///
    /// # Errors
    ///
    /// `reseed_failed` or `network_failed`, or `io` for clock and names.
    pub fn become_sandbox(&mut self, request: &PostFork, idle: bool) -> Outcome<bool> {
        clock::set_realtime_ns(request.realtime_ns)
            .map_err(said("cannot set the clock", ErrorCode::Io))?;
        self.pool
            .reseed(&request.seed)
            .map_err(said("cannot reseed the kernel", ErrorCode::ReseedFailed))?;
        self.set_names(request).map_err(said("cannot set an identity", ErrorCode::Io))?;
        self.put_off = None;
        let Some(network) = &request.network else { return Ok(false) };
        if let Some(interface) = &self.interface
            && self.dormant
            && idle
            && interface.has_no_address()
        {
            self.put_off = Some(network.clone());
            return Ok(network.address_v6.is_some() && interface.can_ipv6());
        }
        self.set_network(network).map_err(no_network)
    }

    /// Somebody uses the guest: it is not dormant any more, and gets the network that was put off.
    ///
    /// # Errors
    ///
    /// `network_failed`; whoever asks next tries again.
    pub fn rouse(&mut self) -> Outcome<()> {
        self.dormant = false;
        let Some(network) = self.put_off.take() else { return Ok(()) };
        let connected = self.set_network(&network);
        if connected.is_err() {
            self.put_off = Some(network);
        }
        connected.map(drop).map_err(no_network)
    }

    /// Whether nothing can have happened in the guest since the snapshot.
    pub fn is_dormant(&self) -> bool {
        self.dormant
    }

    /// Does before the snapshot what forks are then spared.  The guest is `dormant` if no program
    /// runs but the runtime.
    pub fn prepare_for_forks(&mut self, dormant: bool) {
        self.dormant = dormant;
        if let Some(interface) = &mut self.interface
            && let Err(error) = interface.note_addresses()
        {
            log::line(&format!("which addresses there are is not known: {error}"));
        }
    }

    fn set_names(&mut self, request: &PostFork) -> io::Result<()> {
        self.set_hostname(&request.hostname)?;
        if systemd::runs() {
            systemd::rename_journals(&held(&self.machine_id)?, &request.machine_id);
        }
        replace(&self.machine_id, &format!("{}\n", request.machine_id))?;
        replace(&self.boot_id, &format!("{}\n", request.boot_id))
    }

    fn set_hostname(&mut self, name: &str) -> io::Result<()> {
        sethostname(name)?;
        replace(&self.hostname, &format!("{name}\n"))?;
        rename_in_hosts(&self.hosts, &self.name, name)?;
        name.clone_into(&mut self.name);
        Ok(())
    }

    fn set_network(&mut self, network: &Network) -> io::Result<bool> {
        let ipv6 = self.interface.as_mut().ok_or(io::ErrorKind::NotFound)?.configure(network)?;
        if !network.dns.is_empty() {
            let lines = network.dns.iter().map(|server| format!("nameserver {server}\n"));
            replace(&self.resolv_conf, &lines.collect::<String>())?;
        }
        Ok(ipv6)
    }
}

fn no_network(error: io::Error) -> ErrorBody {
    said("cannot set the network up", ErrorCode::NetworkFailed)(error)
}

fn said(what: &'static str, code: ErrorCode) -> impl FnOnce(io::Error) -> ErrorBody {
    move |error| failure(code, format!("{what}: {error}"))
}

fn hosts(name: &str) -> String {
    let lines = [
        format!("127.0.0.1\tlocalhost {name}\n"),
        "::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned(),
        "ff02::1\tip6-allnodes\n".to_owned(),
    ];
    lines.concat()
}

/// Gives `/etc/hosts` the guest's new name, and keeps whatever else was written there.
fn rename_in_hosts(file: &File, old: &str, new: &str) -> io::Result<()> {
    let ours = hosts(old);
    // One byte more than ours shows that there is more.
    let mut text = vec![0; ours.len() + 1];
    let length = file.read_at(&mut text, 0)?;
    if text.get(..length) == Some(ours.as_bytes()) {
        return replace(file, &hosts(new));
    }
    let size = file.metadata()?.len();
    if size > HOSTS_MAX {
        return file.write_all_at(format!("\n127.0.0.1\t{new}\n").as_bytes(), size);
    }
    text.resize(usize::try_from(size).map_err(io::Error::other)?, 0);
    file.read_exact_at(&mut text, 0)?;
    replace(file, &renamed(&String::from_utf8_lossy(&text), old, new))
}

/// The text of `/etc/hosts` in which `new` stands wherever `old` stood, at least once.
fn renamed(text: &str, old: &str, new: &str) -> String {
    let mut found = false;
    let mut rename = |line: &str| -> String {
        let (entry, comment) = line.split_at(line.find('#').unwrap_or(line.len()));
        if !entry.split_whitespace().skip(1).any(|word| word == old) {
            return line.to_owned();
        }
        found = true;
        let words = entry.split_inclusive(char::is_whitespace).map(|part| {
            let word = part.trim_end();
            if word == old { part.replacen(old, new, 1) } else { part.to_owned() }
        });
        words.chain([comment.to_owned()]).collect()
    };
    let mut lines: String = text.split_inclusive('\n').map(&mut rename).collect();
    if !found {
        if !lines.is_empty() && !lines.ends_with('\n') {
            lines.push('\n');
        }
        lines.extend(["127.0.0.1\t", new, "\n"]);
    }
    lines
}

/// Makes the files of [`Identity`] in `folder`, and mounts them over the image's.
///
/// # Errors
///
/// One cannot be made.  An image over whose file none can be mounted is poorer, and the console
/// says so.
pub fn mount_files(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for target in FILES.map(Path::new) {
        let ours = file_of(folder, target);
        let mut text = fs::read(target).unwrap_or_default();
        if target == Path::new(MACHINE_ID) && text.trim_ascii().is_empty() {
            text = fs::read("/proc/sys/kernel/random/uuid")?;
            text.retain(|byte| *byte != b'-');
        }
        bind(&ours, target, &text)?;
    }
    let dbus = Path::new(DBUS_ID);
    if fs::symlink_metadata(dbus).is_ok_and(|found| found.is_file()) {
        let ours = file_of(folder, Path::new(MACHINE_ID));
        mount(Some(&ours), dbus, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    }
    Ok(())
}

/// Which file in `folder` is mounted over `target`.
fn file_of(folder: &Path, target: &Path) -> PathBuf {
    folder.join(target.file_name().unwrap_or_default())
}

/// Makes the file `ours` with `text` in it, and mounts it over `target`.
fn bind(ours: &Path, target: &Path, text: &[u8]) -> io::Result<()> {
    let mut file = File::create(ours)?;
    file.write_all(text)?;
    if let Err(error) = allocate(&file) {
        log::line(&format!("{}: each fork allocates its page: {error}", target.display()));
    }
    if !target.exists()
        && let Err(error) = make_target(target)
    {
        log::line(&format!("{} is not kept: {error}", target.display()));
        return Ok(());
    }
    Ok(mount(Some(ours), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?)
}

/// Has the page for a file's text allocated before the snapshot, though it may be empty until a
/// fork fills it.
fn allocate(file: &File) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, TEXT_BYTES)?)
}

/// Something to mount over, in an image that lacks the file or has a link that leads nowhere.
fn make_target(target: &Path) -> io::Result<()> {
    if target.is_symlink() {
        fs::remove_file(target)?;
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder)?;
    }
    File::create(target).map(drop)
}

/// What one of the files holds, without the end of its line.
fn held(file: &File) -> io::Result<String> {
    let mut text = [0; HELD_BYTES_MAX];
    let count = file.read_at(&mut text, 0)?;
    let text = String::from_utf8_lossy(text.get(..count).unwrap_or_default());
    Ok(text.trim().to_owned())
}

fn replace(file: &File, text: &str) -> io::Result<()> {
    let bytes = text.as_bytes();
    let length = u64::try_from(bytes.len()).map_err(io::Error::other)?;
    file.write_all_at(bytes, 0)?;
    if file.metadata()?.len() == length { Ok(()) } else { file.set_len(length) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn an_empty_file_has_its_page_before_it_is_written_to() {
        let path = format!("/dev/shm/forkd-allocate-{}", std::process::id());
        let file = File::create(&path).unwrap();

        allocate(&file).unwrap();

        let found = file.metadata().unwrap();
        fs::remove_file(path).unwrap();
        assert_eq!((found.len(), found.blocks()), (0, 8));
    }

    #[test]
    fn a_network_that_cannot_be_put_on_fails_whatever_is_asked_until_it_can() {
        let null = || File::options().write(true).open("/dev/null").unwrap();
        let network = Network {
            mac: "02:00:00:00:00:01".to_owned(),
            address: "192.0.2.2/30".to_owned(),
            ..Network::default()
        };
        let mut identity = Identity {
            pool: Pool::open().unwrap(),
            hostname: null(),
            hosts: null(),
            name: String::new(),
            machine_id: null(),
            boot_id: null(),
            resolv_conf: null(),
            interface: Some(Interface::unknown()),
            dormant: true,
            put_off: Some(network),
        };

        for _ in 0..2 {
            let refused = identity.rouse().unwrap_err();

            assert_eq!(refused.code, ErrorCode::NetworkFailed);
        }

        identity.put_off = None;
        identity.rouse().unwrap();
        assert!(!identity.dormant);
    }

    #[test]
    fn a_new_name_keeps_what_others_wrote_to_hosts() {
        let path = std::env::temp_dir().join(format!("forkd-hosts-{}", std::process::id()));
        for (written, expected) in [
            (hosts("old"), hosts("new")),
            (hosts("old") + "10.0.0.1 db old.db\n", hosts("new") + "10.0.0.1 db old.db\n"),
            ("127.0.0.1 localhost".to_owned(), "127.0.0.1 localhost\n127.0.0.1\tnew\n".to_owned()),
            ("1.2.3.4\told old  x# old\n".to_owned(), "1.2.3.4\tnew new  x# old\n".to_owned()),
            ("# old\nold a\n".to_owned(), "# old\nold a\n127.0.0.1\tnew\n".to_owned()),
            (String::new(), "127.0.0.1\tnew\n".to_owned()),
        ] {
            fs::write(&path, &written).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();

            rename_in_hosts(&file, "old", "new").unwrap();

            assert_eq!(fs::read_to_string(&path).unwrap(), expected, "{written}");
        }
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_shorter_text_leaves_nothing_of_the_longer() {
        let path = std::env::temp_dir().join(format!("forkd-replace-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        replace(&file, "a long name\n").unwrap();
        replace(&file, "short\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "short\n");
        fs::remove_file(path).unwrap();
    }
}
