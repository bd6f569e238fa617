//! What is left of the host to a process that reads what a guest may have written.
//!
//! A zygote goes to jail before it reads the first byte of its snapshot, a machine before it boots.
//! They open what they were told of, leave the host's files, network, IPC and name behind
//! ([`namespaces`], [`landlock`]), and give up every right that they will not need ([`rights`]).
//! Forks are born in there; each child of a zygote gives up the rest and becomes a user of its own.
//! What comes from outside later comes as descriptors ([`crate::sys::handed`]).  The right to have
//! children become others is one over a user namespace and nothing else ([`users`]).  In jail or
//! not, each thread may make only the system calls that it needs ([`filter`]).
//!
//! Nothing here is optional: what the kernel refuses is an error that names it.

#[cfg(feature = "captive")]
mod captive;
pub mod cell;
mod denied;
pub mod filter;
mod landlock;
pub mod namespaces;
pub mod rights;
pub mod rootless;
mod trees;
pub mod users;

use std::path::Path;

#[cfg(feature = "captive")]
use forkd_proto::control::Child;
use forkd_proto::control::{DiskConfig, JailConfig, MachineConfig, ZygoteConfig};

use crate::error::Error;
use crate::jail::namespaces::Seen;
use crate::sys::handed::{self, Keep};
use crate::sys::{descriptors, meminfo, pagemap, process};

/// KVM, which seeds open anew.
const KVM: &str = descriptors::KVM;
/// How much memory the host has left.
/// Where the root of who sees no folder is put together.
const PROC: &str = "/proc";

/// Jails a zygote, if it is to be jailed, that has not read anything of its snapshot.
///
/// What root started is a user of its own from then on, in a user namespace with its children's
/// users and no others: its rights are over these alone.
///
/// # Errors
///
/// [`Error::Io`] naming a file of the configuration, or what the kernel refused.
pub fn enter_as_zygote(config: &ZygoteConfig) -> Result<(), Error> {
    let Some(jail) = &config.jail else { return Ok(()) };
    go_inside(jail)?;
    let layers = config.disk.iter().flat_map(|disk| &disk.layers);
    let read = std::iter::once(&config.state).chain(&config.memory).chain(layers);
    read.map(std::path::PathBuf::as_path).try_for_each(|path| open(path, Keep::Lent))?;
    open_common()?;
    let cgroups = jail.cgroups.as_ref();
    let held = cgroups.map(|cgroups| cgroups.path.as_path());
    let folders = seen(jail);
    let Some(uid) = jail.uid else {
        return rootless::enter(&folders, &config.directory, held).map(drop);
    };
    if let Some(own) = cgroups.and_then(|cgroups| cgroups.own.as_deref()) {
        process::enter_cgroup(own)?;
    }
    let namespace = users::make_for_zygote(&jail.users)?;
    namespaces::enter(&folders, &config.directory, held)?;
    rights::share(jail.group, cgroups.and_then(|cgroups| cgroups.group))?;
    users::enter_as_zygote(&namespace, uid)?;
    namespaces::wall_in(&folders, held).map(drop)
}

/// Jails a process that will boot a machine, if it is to be jailed, and makes it the user that it
/// is to be.
///
/// # Errors
///
/// As [`enter_as_zygote`].
pub fn enter_as_machine(config: &MachineConfig) -> Result<(), Error> {
    let Some(jail) = &config.jail else { return Ok(()) };
    go_inside(jail)?;
    open_common()?;
    let layers = config.disk.iter().flat_map(|disk: &DiskConfig| &disk.layers);
    let read = std::iter::once(&config.kernel).chain(&config.initramfs).chain(layers);
    read.map(std::path::PathBuf::as_path).try_for_each(|path| open(path, Keep::Lent))?;
    if let Some(network) = &config.network {
        let file = descriptors::open_tap(&network.tap)?;
        handed::put(Path::new(&network.tap), Keep::Lent, file);
    }
    let folders = seen(jail);
    if jail.rootless {
        rootless::enter(&folders, &config.directory, None)?;
    } else {
        move_in(&folders, &config.directory, jail.group)?;
    }
    become_own(jail.uid)
}

/// Jails a process that has open what it will read, in a root without anything, as the user `uid`.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn enter_as_reader(uid: u32) -> Result<(), Error> {
    namespaces::enter(&[], Path::new(PROC), None)?;
    namespaces::chroot()?;
    rights::become_inmate(uid)?;
    namespaces::wall_in(&[], None).map(drop)
}

/// Jails a process of a user without privileges as [`enter_as_reader`] does one of root's.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn enter_as_rootless_reader() -> Result<(), Error> {
    rootless::enter(&[], Path::new(PROC), None).map(drop)
}

/// Jails a process that does nothing in there, as a machine would be, to see whether it can be.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn try_out(folder: &Path, ids: &[&str]) -> Result<serde_json::Value, Error> {
    let [uid, group] = ids else { return try_out_rootless(folder) };
    let number = |text: &str| {
        let problem = format!("{text:?} is no user or group");
        text.parse::<u32>().map_err(|_| Error::Invalid { field: "jail", problem })
    };
    let (uid, group) = (number(uid)?, number(group)?);
    move_in(&[Seen { path: folder, writable: true }], folder, group)?;
    become_own(Some(uid))?;
    Ok(serde_json::json!({"event": "jailed"}))
}

/// As [`try_out`], for a user without privileges; says whether signals stay in that jail.
fn try_out_rootless(folder: &Path) -> Result<serde_json::Value, Error> {
    rootless::go_inside()?;
    let keeps_signals = rootless::enter(&[Seen { path: folder, writable: true }], folder, None)?;
    become_own(None)?;
    Ok(serde_json::json!({"event": "jailed", "keeps_signals": keeps_signals}))
}

/// Makes a fork that is a machine the user that it is to be, without any rights.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn become_own(uid: Option<u32>) -> Result<(), Error> {
    if let Some(uid) = uid {
        rights::become_user(uid)?;
    }
    show_ourselves()
}

/// Opens what `/proc` shows of this process, which it cannot once it is nobody's.
///
/// To be called in each fork that lives: what it inherited is of the process that it was forked of.
///
/// # Errors
///
/// [`Error::Io`] naming what the kernel refused.
pub fn show_ourselves() -> Result<(), Error> {
    if !rights::is_hidden() {
        return Ok(());
    }
    let pagemap = Path::new(pagemap::OWN);
    let file = rights::open_own(pagemap)?;
    handed::put(pagemap, Keep::Always, file);
    Ok(())
}

/// Nothing, but in a program for tests: a captive in the place of a child that is not honest.
///
/// # Errors
///
/// [`Error::State`] if there was one, and what a captive says.
#[cfg(feature = "captive")]
pub fn try_to_leave(child: &Child) -> Result<(), Error> {
    if child.hostname == captive::HONEST {
        return Ok(());
    }
    captive::run(&child.directory, &child.hostname, &[])?;
    Err(Error::State("a captive ran in the place of the child"))
}

/// The same, in the place of the zygote or seed that is to fork the child; it has forked `own`.
///
/// # Errors
///
/// As [`try_to_leave`].
#[cfg(feature = "captive")]
pub fn try_to_leave_above(child: &Child, own: &[i32]) -> Result<(), Error> {
    let Some(others) = child.hostname.strip_prefix(captive::ABOVE) else { return Ok(()) };
    captive::run(&child.directory, others, own)?;
    Err(Error::State("a captive ran in the place of its zygote"))
}

fn go_inside(jail: &JailConfig) -> Result<(), Error> {
    if jail.rootless { rootless::go_inside() } else { Ok(()) }
}

fn open(path: &Path, keep: Keep) -> Result<(), Error> {
    handed::open_and_keep(path, keep).map_err(Error::io(format!("open {}", path.display())))
}

/// Opens what every jailed process needs of the host.
fn open_common() -> Result<(), Error> {
    meminfo::keep_open().map_err(Error::io("open what says how much memory there is"))?;
    let kvm = descriptors::open_kvm()?;
    handed::put(Path::new(KVM), Keep::Always, kvm);
    Ok(())
}

fn seen(jail: &JailConfig) -> Vec<Seen<'_>> {
    let written = jail.folders.iter().map(|path| Seen { path, writable: true });
    let read = jail.read_only.iter().map(|path| Seen { path, writable: false });
    written.chain(read).collect()
}

/// Leaves the host for `folders`, without a way to rights, as root still.
fn move_in(folders: &[Seen], spare: &Path, group: u32) -> Result<(), Error> {
    namespaces::enter(folders, spare, None)?;
    namespaces::chroot()?;
    rights::give_up(group)?;
    namespaces::wall_in(folders, None).map(drop)
}
