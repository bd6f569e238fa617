//! What VMM processes are started with.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;
use crate::limits::{
    CMDLINE_MAX, DISK_MAX_BYTES, JAIL_FOLDERS_MAX, JAIL_USERS_MAX, MEMORY_ALIGN_BYTES,
    MEMORY_FILES_MAX, MEMORY_MAX_BYTES, MEMORY_MIN_BYTES, VCPUS_MAX,
};
use crate::parse::{self, check_path};

/// What `forkd-vmm machine` boots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    /// Existing, empty; for this machine's files.
    pub directory: PathBuf,
    /// bzImage or vmlinux.
    pub kernel: PathBuf,
    /// Unpacked by the kernel before anything else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initramfs: Option<PathBuf>,
    /// After the VMM's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cmdline: Option<String>,
    /// 1 to [`VCPUS_MAX`].
    pub vcpus: u8,
    /// Multiple of [`MEMORY_ALIGN_BYTES`].
    pub memory_bytes: u64,
    /// What its guest sees of the processor.
    #[serde(default)]
    pub cpu: Cpu,
    /// The one disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskConfig>,
    /// The one network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<TapConfig>,
    /// Whether to wait for the agent.
    #[serde(default = "yes")]
    pub agent: bool,
    /// What is left to it of the host.  Default: what whoever starts it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jail: Option<JailConfig>,
}

impl MachineConfig {
    /// Reads and checks a configuration file.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`] naming the member that is missing, unknown, of the wrong type or out of
    /// range.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidRequest> {
        let config: Self = parse::members(parse::object(json)?)?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), InvalidRequest> {
        check_path("directory", &self.directory)?;
        check_path("kernel", &self.kernel)?;
        self.initramfs.as_ref().map_or(Ok(()), |path| check_path("initramfs", path))?;
        if self.cmdline.as_ref().is_some_and(|text| text.len() > CMDLINE_MAX) {
            return Err(InvalidRequest::field("cmdline", format!("over {CMDLINE_MAX} bytes")));
        }
        if !(1..=VCPUS_MAX).contains(&self.vcpus) {
            return Err(InvalidRequest::field("vcpus", format!("not in 1 to {VCPUS_MAX}")));
        }
        let fits = (MEMORY_MIN_BYTES..=MEMORY_MAX_BYTES).contains(&self.memory_bytes);
        if !fits || !self.memory_bytes.is_multiple_of(MEMORY_ALIGN_BYTES) {
            return Err(InvalidRequest::field(
                "memory_bytes",
                "not a multiple of 2 MiB from 128 MiB to 1 TiB",
            ));
        }
        self.jail.as_ref().map_or(Ok(()), JailConfig::check)?;
        self.disk.as_ref().map_or(Ok(()), DiskConfig::check)
    }
}

/// Which features of the processor a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cpu {
    /// All that this host has and a snapshot can hold.
    #[default]
    Host,
    /// Of those, what many hosts of the same vendor have.
    Portable,
}

/// What is left to a process of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JailConfig {
    /// User, and group, of a machine; user of a zygote, whose children each get their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// For a zygote that root starts: the users of it, its children and those derived from it, as
    /// runs: the first, and how many.  There are no other users in its jail.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<(u32, u32)>,
    /// For a zygote: where its children's cgroups are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroups: Option<CgroupsConfig>,
    /// Group of all that is jailed, which may pass through both kinds of folders; none with
    /// `rootless`.
    #[serde(default)]
    pub group: u32,
    /// Whether it is the jail that a user without privileges can have: all that is in it stays
    /// that user.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rootless: bool,
    /// What it sees of the host's files, under the same paths.
    pub folders: Vec<PathBuf>,
    /// What it sees besides, for reading only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub read_only: Vec<PathBuf>,
}

/// Where the children of a zygote have their cgroups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CgroupsConfig {
    /// The cgroup2 folder below which they are.
    pub path: PathBuf,
    /// Group of users that may have processes born in them; none with `rootless`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<u32>,
    /// The cgroup2 folder, below `path`, that the zygote itself enters; none with `rootless`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<PathBuf>,
}

impl CgroupsConfig {
    fn check(&self, rootless: bool) -> Result<(), InvalidRequest> {
        if rootless != self.group.is_none() || rootless != self.own.is_none() {
            let problem = "cgroups of root's zygotes have a group and one of their own, no others";
            return Err(InvalidRequest::field("jail", problem));
        }
        let paths = std::iter::once(&self.path).chain(&self.own);
        paths.into_iter().try_for_each(|path| check_path("jail", path))
    }
}

impl JailConfig {
    /// As of a zygote, which needs users for its children if root starts it.
    fn check_of_zygote(&self) -> Result<(), InvalidRequest> {
        self.check()?;
        if self.rootless && self.users.is_empty() {
            return Ok(());
        }
        let sound = |&(first, count): &(u32, u32)| {
            first > 0 && count > 0 && first.checked_add(count - 1).is_some_and(|end| end < u32::MAX)
        };
        let among =
            |uid| self.users.iter().any(|(first, count)| (*first..first + count).contains(&uid));
        let few = self.users.len() <= JAIL_USERS_MAX && self.users.iter().all(sound);
        if self.rootless || !few || !self.uid.is_some_and(among) {
            let problem = "a zygote that root starts is one of the users that it is told";
            return Err(InvalidRequest::field("jail", problem));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), InvalidRequest> {
        if self.rootless && (self.group != 0 || self.uid.is_some()) {
            return Err(InvalidRequest::field("jail", "who is not root becomes no other user"));
        }
        if !self.rootless && self.group == 0 || self.uid == Some(0) {
            return Err(InvalidRequest::field("jail", "root is not what a jail is for"));
        }
        if let Some(cgroups) = &self.cgroups {
            cgroups.check(self.rootless)?;
        }
        let count = self.folders.len().saturating_add(self.read_only.len());
        if self.folders.is_empty() || count > JAIL_FOLDERS_MAX {
            return Err(InvalidRequest::field(
                "jail",
                format!("not 1 to {JAIL_FOLDERS_MAX} folders"),
            ));
        }
        let mut paths = self.folders.iter().chain(&self.read_only);
        paths.try_for_each(|path| check_path("jail", path))
    }
}

/// A disk: immutable layers, and how large the private one above them may grow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// Lowest first: a raw image, then layer files.
    pub layers: Vec<PathBuf>,
    /// As the guest sees it.
    pub size_bytes: u64,
    /// Most bytes that the private layer may hold; default: no limit but the disk's size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_limit_bytes: Option<u64>,
    /// Existing; where the file of the private layer goes.  Default: the machine's folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_directory: Option<PathBuf>,
    /// Bytes of the file system of that folder that a write to the private layer leaves free.
    #[serde(default)]
    pub top_reserve_bytes: u64,
}

impl DiskConfig {
    pub(super) fn check(&self) -> Result<(), InvalidRequest> {
        if self.layers.is_empty() {
            return Err(InvalidRequest::field("disk", "has no layers"));
        }
        let fits = (1..=DISK_MAX_BYTES).contains(&self.size_bytes);
        if !fits || !self.size_bytes.is_multiple_of(4096) {
            let problem = "size_bytes is no multiple of 4096 up to 16 TiB";
            return Err(InvalidRequest::field("disk", problem));
        }
        let paths = self.layers.iter().chain(&self.top_directory);
        paths.into_iter().try_for_each(|path| check_path("disk", path))
    }
}

/// The host's end of a network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TapConfig {
    /// Name of an existing tap.
    pub tap: String,
    /// `02:…`
    pub mac: String,
}

/// What `forkd-vmm zygote` holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ZygoteConfig {
    /// Where `zygote.sock` goes.
    pub directory: PathBuf,
    /// The state file.
    pub state: PathBuf,
    /// Memory files, base first.
    pub memory: Vec<PathBuf>,
    /// The disk as it was when the snapshot was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskConfig>,
    /// As of a machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jail: Option<JailConfig>,
}

impl ZygoteConfig {
    /// Reads and checks a configuration file.
    ///
    /// # Errors
    ///
    /// As [`MachineConfig::parse`].
    pub fn parse(json: &[u8]) -> Result<Self, InvalidRequest> {
        let config: Self = parse::members(parse::object(json)?)?;
        check_path("directory", &config.directory)?;
        check_path("state", &config.state)?;
        if config.memory.is_empty() || config.memory.len() > MEMORY_FILES_MAX {
            return Err(InvalidRequest::field("memory", format!("not 1 to {MEMORY_FILES_MAX}")));
        }
        config.memory.iter().try_for_each(|path| check_path("memory", path))?;
        config.jail.as_ref().map_or(Ok(()), JailConfig::check_of_zygote)?;
        config.disk.as_ref().map_or(Ok(()), DiskConfig::check)?;
        Ok(config)
    }
}

fn yes() -> bool {
    true
}
