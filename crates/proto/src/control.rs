//! What the daemon says to VMM processes; see `protocol/control/PROTOCOL.md`.
//!
//! Configurations and requests are refused when a member is unknown or out of range; the `parse`
//! functions name it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;
use crate::guest::{Network, Nothing};
use crate::limits::{CHILDREN_MAX, FILES_MAX, MEMORY_FILES_MAX, TIMEOUT_MAX_S};
use crate::parse::{self, check_path};

mod config;
mod reply;

pub use config::*;
pub use reply::*;

/// How long one child may take from its clone to its agent's answer, unless the request says
/// otherwise.
pub const FORK_DEADLINE_DEFAULT_S: f64 = 60.0;

/// What a machine is asked.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum MachineRequest {
    /// How is it?
    Status,
    /// Stop the vCPUs and devices.
    Pause,
    /// Let them run.
    Resume,
    /// Write the paused machine out.
    Save(Save),
    /// Fork a seed.
    Branch(Branch),
    /// Go back to the fork point.
    Reset(Reset),
    /// Take another identity, without a stop.
    Identify(Identify),
    /// Count what happened so far.
    Metrics,
    /// End now, without asking the guest.
    Stop,
}

impl MachineRequest {
    /// Reads the payload of a REQUEST frame.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`], naming the member at fault.
    pub fn parse(payload: &[u8]) -> Result<Self, InvalidRequest> {
        let mut members = parse::object(payload)?;
        let op = parse::take_tag(&mut members, "op")?;
        match op.as_str() {
            "save" => {
                let save: Save = parse::members(members)?;
                check_path("directory", &save.directory)?;
                return Ok(Self::Save(save));
            }
            "branch" => {
                let branch: Branch = parse::members(members)?;
                check_path("directory", &branch.directory)?;
                branch.cgroup.as_ref().map_or(Ok(()), |path| check_path("cgroup", path))?;
                return Ok(Self::Branch(branch));
            }
            "reset" => {
                let reset: Reset = parse::members(members)?;
                check_deadline(reset.deadline_s)?;
                return Ok(Self::Reset(reset));
            }
            "identify" => {
                let identify: Identify = parse::members(members)?;
                check_deadline(identify.deadline_s)?;
                return Ok(Self::Identify(identify));
            }
            _ => {}
        }
        let request = match op.as_str() {
            "status" => Self::Status,
            "pause" => Self::Pause,
            "resume" => Self::Resume,
            "metrics" => Self::Metrics,
            "stop" => Self::Stop,
            _ => return Err(InvalidRequest::field("op", "unknown operation")),
        };
        parse::members(members).map(|Nothing {}| request)
    }
}

/// `save`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Save {
    /// Existing, empty; gets `state`, `memory` and `disk.layer`.
    pub directory: PathBuf,
    /// Write `disk.layer` alone: what the disk has above so many of its lowest layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_above: Option<usize>,
}

/// `branch`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Branch {
    /// Existing, empty; where the seed's `zygote.sock` goes.
    pub directory: PathBuf,
    /// Folder of the cgroup2 that the seed is born in; default: the machine's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
}

/// `reset`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reset {
    /// See [`PostFork`](crate::guest::PostFork), and so for the next two.
    pub hostname: String,
    /// 32 lower-case hex digits.
    pub machine_id: String,
    /// UUID.
    pub boot_id: String,
    /// The guest's end of its network interface; the tap stays the one it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ChildNetwork>,
    /// What the guest may use of its memory; default: all that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_memory_bytes: Option<u64>,
    /// From the request to the agent's answer.
    #[serde(default = "fork_deadline_default_s")]
    pub deadline_s: f64,
}

/// `identify`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identify {
    /// The sandbox's id, which the guest is told.
    pub id: String,
    /// See [`PostFork`](crate::guest::PostFork), and so for the next two.
    pub hostname: String,
    /// 32 lower-case hex digits.
    pub machine_id: String,
    /// UUID.
    pub boot_id: String,
    /// The guest's end of its network interface; the tap stays the one it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ChildNetwork>,
    /// What the guest may use of its memory; default: all that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_memory_bytes: Option<u64>,
    /// From the request to the agent's answer.
    #[serde(default = "fork_deadline_default_s")]
    pub deadline_s: f64,
}

/// `save` of a zygote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveLink {
    /// Existing, empty; gets `state`, `memory` and `disk.layer`.
    pub directory: PathBuf,
    /// The parent's memory files, base first; none for a snapshot that needs no parent.
    #[serde(default)]
    pub memory: Vec<PathBuf>,
    /// How many of the lowest layers of the disk the parent has.
    #[serde(default)]
    pub disk_layers: usize,
}

impl SaveLink {
    fn check(&self) -> Result<(), InvalidRequest> {
        check_path("directory", &self.directory)?;
        if self.memory.len() > MEMORY_FILES_MAX {
            return Err(InvalidRequest::field("memory", format!("over {MEMORY_FILES_MAX} files")));
        }
        self.memory.iter().try_for_each(|path| check_path("memory", path))
    }
}

/// `derive`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Derive {
    /// Existing; where the new zygote's `zygote.sock` goes.
    pub directory: PathBuf,
    /// The delta's state file.
    pub state: PathBuf,
    /// The delta's memory file.
    pub memory: PathBuf,
    /// The disk as it was when the delta was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskConfig>,
    /// Who it is, and who its children are; none for the users of the zygote that it is forked of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub users: Option<DeriveUsers>,
}

/// The users of a zygote that was derived.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeriveUsers {
    /// The name under which their user namespace was handed over.
    pub name: PathBuf,
    /// The user that it becomes there.
    pub uid: u32,
}

impl Derive {
    fn check(&self) -> Result<(), InvalidRequest> {
        check_path("directory", &self.directory)?;
        check_path("state", &self.state)?;
        check_path("memory", &self.memory)?;
        if self.users.as_ref().is_some_and(|users| users.uid == 0) {
            return Err(InvalidRequest::field("users", "root is nobody's"));
        }
        self.disk.as_ref().map_or(Ok(()), DiskConfig::check)
    }
}

/// What a zygote is asked.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ZygoteRequest {
    /// Make children.
    Fork(Fork),
    /// Write out what it holds.
    Save(SaveLink),
    /// Fork another zygote, with a delta over what this one holds.
    Derive(Derive),
    /// Take files that came with this request, for later ones of the same connection.
    Files(Files),
    /// How is it?
    Status,
    /// End; the children live on.
    Stop,
    /// Serve nobody any more, and end when nobody needs what it holds: a seed with its last child,
    /// others at once.
    Retire,
}

impl ZygoteRequest {
    /// Reads the payload of a REQUEST frame.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`], naming the member at fault.
    pub fn parse(payload: &[u8]) -> Result<Self, InvalidRequest> {
        let mut members = parse::object(payload)?;
        let op = parse::take_tag(&mut members, "op")?;
        match op.as_str() {
            "fork" => {
                let fork: Fork = parse::members(members)?;
                fork.check()?;
                Ok(Self::Fork(fork))
            }
            "save" => {
                let save: SaveLink = parse::members(members)?;
                save.check()?;
                Ok(Self::Save(save))
            }
            "derive" => {
                let derive: Derive = parse::members(members)?;
                derive.check()?;
                Ok(Self::Derive(derive))
            }
            "files" => {
                let files: Files = parse::members(members)?;
                files.check()?;
                Ok(Self::Files(files))
            }
            "status" => parse::members(members).map(|Nothing {}| Self::Status),
            "stop" => parse::members(members).map(|Nothing {}| Self::Stop),
            "retire" => parse::members(members).map(|Nothing {}| Self::Retire),
            _ => Err(InvalidRequest::field("op", "unknown operation")),
        }
    }
}

/// `fork`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fork {
    /// 1 to [`CHILDREN_MAX`].
    pub children: Vec<Child>,
    /// Of a seed: name of the user namespace, handed over, in which children become their users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub users: Option<PathBuf>,
    /// For each child, from its clone to its agent's answer.
    #[serde(default = "fork_deadline_default_s")]
    pub deadline_s: f64,
}

impl Fork {
    fn check(&self) -> Result<(), InvalidRequest> {
        if self.children.is_empty() || self.children.len() > CHILDREN_MAX {
            return Err(InvalidRequest::field("children", format!("not 1 to {CHILDREN_MAX}")));
        }
        check_deadline(self.deadline_s)?;
        self.children.iter().try_for_each(|child| {
            let paths =
                [Some(&child.directory), child.cgroup.as_ref(), child.top_directory.as_ref()];
            paths.into_iter().flatten().try_for_each(|path| check_path("children", path))
        })
    }
}

/// `files`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// What each is: its path, or the name of a tap.
    pub names: Vec<PathBuf>,
}

impl Files {
    fn check(&self) -> Result<(), InvalidRequest> {
        if self.names.is_empty() || self.names.len() > FILES_MAX {
            return Err(InvalidRequest::field("names", format!("not 1 to {FILES_MAX}")));
        }
        Ok(())
    }
}

/// One child of a `fork`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Child {
    /// The sandbox's id.
    pub id: String,
    /// Existing, empty; for this machine's files.
    pub directory: PathBuf,
    /// See [`PostFork`](crate::guest::PostFork), and so for the next two.
    pub hostname: String,
    /// 32 lower-case hex digits.
    pub machine_id: String,
    /// UUID.
    pub boot_id: String,
    /// Its user, and group; default: those of whoever forks it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Folder of the cgroup2 to be born in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Its network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ChildNetwork>,
    /// What the guest may use of its memory; default: all that it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_memory_bytes: Option<u64>,
    /// As of a disk, as are the next two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_limit_bytes: Option<u64>,
    /// Default: `directory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_directory: Option<PathBuf>,
    /// Default: 0.
    #[serde(default)]
    pub top_reserve_bytes: u64,
}

/// Both ends of a child's network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChildNetwork {
    /// Name of an existing tap.
    pub tap: String,
    /// `02:…`
    pub mac: String,
    /// Address and prefix length.
    pub address: String,
    /// Default route.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// IPv6 address and prefix length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_v6: Option<String>,
    /// Default route of IPv6.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_v6: Option<String>,
    /// Name servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dns: Vec<String>,
}

impl ChildNetwork {
    /// What the agent in the child is told of it.
    #[must_use]
    pub fn guest(&self) -> Network {
        Network {
            mac: self.mac.clone(),
            address: self.address.clone(),
            gateway: self.gateway.clone(),
            address_v6: self.address_v6.clone(),
            gateway_v6: self.gateway_v6.clone(),
            dns: self.dns.clone(),
        }
    }
}

fn fork_deadline_default_s() -> f64 {
    FORK_DEADLINE_DEFAULT_S
}

fn check_deadline(deadline_s: f64) -> Result<(), InvalidRequest> {
    if deadline_s > 0.0 && deadline_s <= TIMEOUT_MAX_S {
        Ok(())
    } else {
        Err(InvalidRequest::field("deadline_s", "out of range"))
    }
}

#[cfg(test)]
mod tests;
