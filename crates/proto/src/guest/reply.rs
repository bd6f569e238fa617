//! What the agent answers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::InvalidRequest;

/// Payload of an EVENT frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The agent serves; sent once, to the host's port.
    Booted {
        /// Version of the agent.
        version: String,
    },
    /// Something in the guest's kernel listens for a new generation id; sent once, by `post_fork`.
    AnnounceGeneration,
    /// The process of an `exec` runs.
    Started {
        /// As the guest numbers it.
        pid: u32,
    },
    /// The program of a `connect` has accepted the connection.
    Connected,
    /// The tree of a `read_archive` is open, and its archive follows.
    Archive,
    /// The file of a `read_file` is open, and its bytes follow.
    File {
        /// Its size now; what follows may differ if somebody writes to it.
        size_bytes: u64,
        /// Permission bits.
        mode: u32,
    },
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
    NotFound,
    PermissionDenied,
    Exists,
    NotADirectory,
    IsADirectory,
    NotEmpty,
    NoSpace,
    TooLarge,
    ExecFailed,
    Refused,
    NoRuntime,
    RuntimeFailed,
    RuntimeBroken,
    Busy,
    WarmUpFailed,
    WarmUpTimeout,
    ReseedFailed,
    HookFailed,
    NetworkFailed,
    Io,
    /// A code of a later version.
    #[serde(other)]
    Unknown,
}

/// State of the warm runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RuntimeState {
    /// There is none.
    None,
    /// It was started and has not answered yet.
    Starting,
    /// It takes requests.
    Ready,
    /// It died, or was killed because it could not be interrupted.
    Failed,
}

/// Answer to `ping`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pong {
    /// Version of the agent.
    pub version: String,
    /// The agent's process id.
    pub pid: u32,
    /// Since the guest booted.
    pub uptime_s: f64,
    /// State of the runtime.
    pub runtime: RuntimeState,
}

/// Answer to `exec`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExecReply {
    /// Null if a signal ended it.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether that was because of `timeout_s`.
    pub timed_out: bool,
    /// From start to end.
    pub duration_s: f64,
    /// Whether somebody still had an output open when this was sent: what comes there is dropped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

/// Answer to `eval`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalReply {
    /// Whether the last statement was an expression with a value other than None.
    pub has_value: bool,
    /// Its `repr`, perhaps cut.
    #[serde(default)]
    pub repr: Option<String>,
    /// Its value, if JSON can say it.
    #[serde(default)]
    pub value: Value,
    /// Whether `value` holds it (null may be the value).
    #[serde(default)]
    pub value_is_json: bool,
    /// The exception that ended the code.
    #[serde(default)]
    pub error: Option<EvalError>,
    /// Whether that was the interruption after `timeout_s`.
    #[serde(default)]
    pub timed_out: bool,
    /// What the code showed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<EvalForms>,
    /// How many results were too many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub more_results: Option<u64>,
}

/// One thing that evaluated code showed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvalForms {
    /// Whether it is the value of the last expression.
    #[serde(default)]
    pub is_main: bool,
    /// Its forms, by MIME type.
    pub data: BTreeMap<String, String>,
    /// Forms that were too large, with their size in bytes.
    #[serde(default)]
    pub omitted: BTreeMap<String, u64>,
}

/// A Python exception, as data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvalError {
    /// Name of its class.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its text.
    pub message: String,
    /// As Python prints it, without our own frames.
    pub traceback: String,
}

/// Answer to `read_file` and `write_file`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BytesReply {
    /// Bytes sent or received.
    pub bytes: u64,
}

/// Answer to `read_archive` and `write_archive`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArchiveReply {
    /// Members that were sent or made.
    pub entries: u64,
    /// Bytes in files among them.
    pub bytes: u64,
    /// What was left out.
    pub skipped: Vec<SkippedEntry>,
    /// How many more were.
    pub more_skipped: u64,
}

/// What was left out of an archive, or of the tree that was made of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedEntry {
    /// Where, below the root.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// What a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, a pipe or a socket.
    Other,
}

/// One path, described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Last part of the path; what is not UTF-8 in it is replaced.
    pub name: String,
    /// Its bytes in base64, if it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_b64: Option<String>,
    /// What it is; links are not followed.
    pub kind: EntryKind,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of its contents, in nanoseconds since the epoch.
    pub modified_at_ns: i64,
    /// Where a symbolic link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Its bytes in base64, if it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_b64: Option<String>,
}

/// Answer to `list_dir`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entries {
    /// By name.
    pub entries: Vec<Entry>,
}

/// Answer to `warm`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WarmReply {
    /// From request to readiness.
    pub duration_s: f64,
}

/// Answer to `quiesce`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuiesceReply {
    /// The kernel's `MemAvailable`.
    pub available_bytes: u64,
}

/// Whether an image's hook ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hook {
    /// The image has none.
    None,
    /// It ran and succeeded.
    Ran,
}

/// Answer to `post_fork`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostForkReply {
    /// The guest's clock when it answered.
    pub realtime_ns: i64,
    /// Each random number generator that was reseeded.
    pub reseeded: Vec<String>,
    /// Whether the image's hook ran.
    pub hook: Hook,
    /// Whether the guest has the IPv6 address that it was given, or will.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ipv6: bool,
    /// Whether the agent asks by an event that the generation id be announced, if it has to be.
    /// One of before did not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub generation_on_request: bool,
}

/// Answer to `watched`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WatchedReply {
    /// The longest time between two looks at the clock, a millisecond apart at best.
    pub longest_s: f64,
    /// From the first look to the last.
    pub watched_s: f64,
}

/// Answer to `set_time`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeReply {
    /// The guest's clock after setting.
    pub realtime_ns: i64,
}
