//! What VMM processes answer, and say by themselves.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;

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
    /// How long the machine was paused; in the answer to `resume`.
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
    /// What the guest has seen of the processor, if its state was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<CpuSeen>,
}

/// What a guest has seen of a processor, or would be shown of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuSeen {
    /// What it calls itself.
    pub model: String,
    /// Its features, sorted, each of which another host must have.
    pub features: Vec<String>,
    /// Whether that is no more than [`super::Cpu::Portable`] has.
    pub portable: bool,
    /// Bits of a physical address.
    pub physical_bits: u32,
    /// Frequency of the TSC, in kHz; 0 if it is not known.
    pub tsc_khz: u32,
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
    /// Whether the seed takes `users` with a fork.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub users: bool,
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

/// Answer to `identify`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct IdentifyReply {
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
    /// Bytes held by the private layer and by those that were frozen, as often as they are there.
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
    /// What it loaded into memory: the image, and pages of deltas over it.
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
        /// How often the child was forked; absent before `Listening`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attempts: Option<u32>,
    },
    /// A child's agent has answered.
    Ready {
        /// The child.
        id: String,
        /// Its VMM's process id.
        pid: u32,
        /// Where the time of the last attempt went.
        ms: ForkMs,
        /// How often it was forked.
        #[serde(default = "once")]
        attempts: u32,
        /// Whether its guest has the IPv6 address that it was given, or will.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        ipv6: bool,
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

fn once() -> u32 {
    1
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
    Capacity,
    NotOurs,
    TooNew,
    TooOld,
    Damaged,
    CpuMismatch,
    Guest,
    /// A code of a later version.
    #[serde(other)]
    Unknown,
}
