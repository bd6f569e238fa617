//! What the daemon says to VMM processes; see `protocol/control/PROTOCOL.md`.
//!
//! Configurations and requests are refused when a member is unknown or out of range; the `parse`
//! functions name it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;
use crate::guest::{Network, Nothing};
use crate::limits::{
    CHILDREN_MAX, CMDLINE_MAX, MEMORY_ALIGN_BYTES, MEMORY_FILES_MAX, MEMORY_MAX_BYTES,
    MEMORY_MIN_BYTES, TIMEOUT_MAX_S, VCPUS_MAX,
};
use crate::parse::{self, check_path};

/// How long one child may take from its clone to its agent's answer, unless the request says
/// otherwise.
pub const FORK_DEADLINE_DEFAULT_S: f64 = 60.0;

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
    /// The one disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskConfig>,
    /// The one network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<TapConfig>,
    /// Whether to wait for the agent.
    #[serde(default = "yes")]
    pub agent: bool,
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
        self.disk.as_ref().map_or(Ok(()), DiskConfig::check)
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
}

impl DiskConfig {
    fn check(&self) -> Result<(), InvalidRequest> {
        if self.layers.is_empty() {
            return Err(InvalidRequest::field("disk", "has no layers"));
        }
        if self.size_bytes == 0 || !self.size_bytes.is_multiple_of(4096) {
            return Err(InvalidRequest::field("disk", "size_bytes is no multiple of 4096"));
        }
        self.layers.iter().try_for_each(|path| check_path("disk", path))
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
        config.disk.as_ref().map_or(Ok(()), DiskConfig::check)?;
        Ok(config)
    }
}

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
}

impl Derive {
    fn check(&self) -> Result<(), InvalidRequest> {
        check_path("directory", &self.directory)?;
        check_path("state", &self.state)?;
        check_path("memory", &self.memory)?;
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
            check_path("children", &child.directory)?;
            child.cgroup.as_ref().map_or(Ok(()), |path| check_path("children", path))
        })
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
    /// Folder of the cgroup2 to be born in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
    /// Its network interface.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<ChildNetwork>,
    /// Most bytes that its private disk layer may hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_limit_bytes: Option<u64>,
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
            dns: self.dns.clone(),
        }
    }
}

/// Whether a machine's vCPUs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MachineState {
    /// They do.
    Running,
    /// They do not.
    Paused,
}

/// Answer of a machine to `status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineStatus {
    /// Whether it runs.
    pub state: MachineState,
    /// The VMM's process id.
    pub pid: u32,
    /// As configured.
    pub vcpus: u8,
    /// As configured.
    pub memory_bytes: u64,
    /// Since this machine was booted or forked.
    pub uptime_s: f64,
    /// Forks between the boot and this machine.
    pub generation: u64,
}

/// Answer to `pause` and `resume`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PauseReply {
    /// How long the machine stood still; in the answer to `resume`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
}

/// Answer to `save`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveReply {
    /// What was written.
    pub files: Vec<SavedFile>,
    /// How long it took.
    pub duration_ms: f64,
}

/// One file that `save` wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedFile {
    /// Within the directory.
    pub name: String,
    /// Size of the whole file.
    pub bytes: u64,
    /// BLAKE3 of its body, in hex.
    pub digest: String,
}

/// Answer to `branch`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BranchReply {
    /// The seed's process id.
    pub pid: u32,
    /// From the first vCPU that stopped to the last one that ran again; 0 if the machine was
    /// paused already.
    pub pause_ms: f64,
}

/// Answer to `derive`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeriveReply {
    /// The new zygote's process id.
    pub pid: u32,
}

/// Answer to `reset`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ResetReply {
    /// From the request to the agent's answer.
    pub ms: f64,
}

/// Answer to `metrics`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metrics {
    /// VM exits handled in user space.
    pub exits: u64,
    /// Accesses that devices refused, by device.
    pub rejected: BTreeMap<String, u64>,
    /// The disk, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskMetrics>,
}

/// The disk's part of [`Metrics`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskMetrics {
    /// Bytes held by the private layer.
    pub top_bytes: u64,
    /// Requests of each kind.
    pub reads: u64,
    /// See `reads`.
    pub writes: u64,
    /// See `reads`.
    pub flushes: u64,
}

/// Answer of a zygote to `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ZygoteStatus {
    /// The zygote's process id.
    pub pid: u32,
    /// Children alive.
    pub children: u64,
    /// Of the snapshot.
    pub memory_bytes: u64,
    /// Of the snapshot.
    pub vcpus: u8,
    /// Of the image, how much is in memory.
    pub resident_bytes: u64,
}

/// Answer to `fork`, after one event for each child.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ForkReply {
    /// Children whose agent has answered.
    pub ready: u64,
    /// Children of which nothing remains.
    pub failed: u64,
    /// From request to answer.
    pub wall_ms: f64,
}

/// Payload of an EVENT frame, and the first line on standard output (the first two).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The control socket is open.
    Listening {
        /// Process id.
        pid: u32,
    },
    /// Before `Listening`: the process could not start.  During `fork`: this child failed.
    Failed {
        /// The child; absent before `Listening`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<String>,
        /// How far the child had come; absent before `Listening`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<String>,
        /// What clients match on.
        code: ErrorCode,
        /// For a person.
        message: String,
    },
    /// A child's agent has answered.
    Ready {
        /// The child.
        id: String,
        /// Its VMM's process id.
        pid: u32,
        /// Where the time went.
        ms: ForkMs,
    },
    /// A child that was ready has ended.
    ChildExited {
        /// The child.
        id: String,
        /// Its VMM's process id.
        pid: u32,
        /// Its wait status.
        status: i32,
    },
    /// The machine has ended.
    Exited {
        /// Why.
        reason: ExitReason,
        /// More of why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        message: Option<String>,
    },
}

/// Times of one fork, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ForkMs {
    /// Until the child process ran.
    pub clone: f64,
    /// Then, until the VM was built.
    pub build: f64,
    /// Then, until its vCPUs ran.
    pub resume: f64,
    /// Then, until its agent answered.
    pub agent: f64,
    /// All of it.
    pub total: f64,
}

/// Why a machine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The guest powered off.
    Shutdown,
    /// The guest reset itself.
    Reset,
    /// It was told to.
    Stopped,
    /// Something broke.
    Error,
}

/// Payload of an ERROR frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What clients match on.
    pub code: ErrorCode,
    /// For a person.
    pub message: String,
    /// The member of the request at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
}

impl From<InvalidRequest> for ErrorBody {
    fn from(error: InvalidRequest) -> Self {
        Self { code: ErrorCode::InvalidRequest, message: error.message, field: error.field }
    }
}

/// Why an operation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(missing_docs, reason = "PROTOCOL.md says what each means")]
pub enum ErrorCode {
    Protocol,
    InvalidRequest,
    State,
    Io,
    Kvm,
    NotOurs,
    TooNew,
    Damaged,
    CpuMismatch,
    Guest,
    /// A code of a later version.
    #[serde(other)]
    Unknown,
}

fn yes() -> bool {
    true
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
mod tests {
    use super::*;

    fn machine() -> MachineConfig {
        MachineConfig {
            directory: "/run/m".into(),
            kernel: "/k".into(),
            initramfs: None,
            cmdline: None,
            vcpus: 1,
            memory_bytes: MEMORY_MIN_BYTES,
            disk: None,
            network: None,
            agent: true,
        }
    }

    fn refused(change: impl FnOnce(&mut MachineConfig)) -> Option<String> {
        let mut config = machine();
        change(&mut config);
        let json = serde_json::to_vec(&config).unwrap();
        MachineConfig::parse(&json).err().and_then(|error| error.field)
    }

    #[test]
    fn a_machine_within_its_limits_is_accepted() {
        assert_eq!(refused(|_| ()), None);
        assert_eq!(refused(|m| m.vcpus = VCPUS_MAX), None);
        assert_eq!(refused(|m| m.memory_bytes = MEMORY_MAX_BYTES), None);
    }

    #[test]
    fn a_machine_one_past_a_limit_is_refused_by_name() {
        assert_eq!(refused(|m| m.vcpus = 0).as_deref(), Some("vcpus"));
        assert_eq!(refused(|m| m.vcpus = VCPUS_MAX + 1).as_deref(), Some("vcpus"));
        for bytes in [
            MEMORY_MIN_BYTES - MEMORY_ALIGN_BYTES,
            MEMORY_MIN_BYTES + 4096,
            MEMORY_MAX_BYTES + MEMORY_ALIGN_BYTES,
        ] {
            assert_eq!(refused(|m| m.memory_bytes = bytes).as_deref(), Some("memory_bytes"));
        }
        let long = "x".repeat(CMDLINE_MAX + 1);
        assert_eq!(refused(|m| m.cmdline = Some(long)).as_deref(), Some("cmdline"));
        assert_eq!(refused(|m| m.kernel = "k".into()).as_deref(), Some("kernel"));
    }

    #[test]
    fn waiting_for_the_agent_is_the_default() {
        let json = br#"{"directory":"/d","kernel":"/k","vcpus":1,"memory_bytes":134217728}"#;
        assert!(MachineConfig::parse(json).unwrap().agent);
    }

    #[test]
    fn a_fork_of_none_or_too_many_is_refused() {
        let child = Child {
            id: "a".to_owned(),
            directory: "/d".into(),
            hostname: "h".to_owned(),
            machine_id: "0".repeat(32),
            boot_id: "b".to_owned(),
            cgroup: None,
            network: None,
            top_limit_bytes: None,
        };
        let fork = |count| Fork { children: vec![child.clone(); count], deadline_s: 1.0 };
        assert!(fork(0).check().is_err());
        assert!(fork(CHILDREN_MAX).check().is_ok());
        assert!(fork(CHILDREN_MAX + 1).check().is_err());
    }

    #[test]
    fn a_link_above_one_file_too_many_is_refused() {
        let save = |files| SaveLink {
            directory: "/d".into(),
            memory: vec!["/m".into(); files],
            disk_layers: 1,
        };

        assert!(save(0).check().is_ok());
        assert!(save(MEMORY_FILES_MAX).check().is_ok());
        assert!(save(MEMORY_FILES_MAX + 1).check().is_err());
    }

    #[test]
    fn branch_save_derive_and_reset_take_absolute_paths_and_known_members_only() {
        let machine =
            |text: &str| MachineRequest::parse(text.as_bytes()).err().and_then(|e| e.field);
        let zygote = |text: &str| ZygoteRequest::parse(text.as_bytes()).err().and_then(|e| e.field);

        assert_eq!(machine(r#"{"op":"branch","directory":"/d"}"#), None);
        assert_eq!(machine(r#"{"op":"branch","directory":"d"}"#).as_deref(), Some("directory"));
        let reset = r#"{"op":"reset","hostname":"h","machine_id":"m","boot_id":"b""#;
        assert_eq!(machine(&format!("{reset}}}")), None);
        let field = machine(&format!("{reset},\"deadline_s\":0}}"));
        assert_eq!(field.as_deref(), Some("deadline_s"));
        assert_eq!(zygote(r#"{"op":"save","directory":"/d"}"#), None);
        let field = zygote(r#"{"op":"derive","directory":"/d","state":"/s","memory":"m"}"#);
        assert_eq!(field.as_deref(), Some("memory"));
    }

    #[test]
    fn requests_without_members_refuse_members() {
        let error = MachineRequest::parse(br#"{"op": "stop", "gently": true}"#).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("gently"));
        let error = ZygoteRequest::parse(br#"{"op": "stop", "gently": true}"#).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("gently"));
    }
}
