//! Why the VMM refused or failed, with the code that travels to the daemon.

use std::fmt;
use std::io;

use forkd_proto::control::{ErrorBody, ErrorCode};

/// Everything that can go wrong, each with what was being done.
#[derive(Debug)]
pub enum Error {
    /// A member of a configuration or request is out of range; names it.
    Invalid {
        /// The member.
        field: &'static str,
        /// What is wrong with it, and what is allowed.
        problem: String,
    },
    /// A configuration or request that the protocol refuses; names the member, if it is one.
    Request {
        /// The member.
        field: Option<String>,
        /// What is wrong.
        problem: String,
    },
    /// The machine is not in a state that allows this.
    State(&'static str),
    /// A vCPU did not stop; the machine runs.
    Stuck,
    /// The kernel refused a system call or file operation.
    Io {
        /// What was attempted.
        what: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// KVM refused.
    Kvm {
        /// The ioctl.
        what: &'static str,
        /// KVM's answer.
        source: kvm_ioctls::Error,
    },
    /// Guest memory could not be accessed where the VMM needs it.
    GuestMemory(String),
    /// The host has not so much memory available.
    Capacity {
        /// What is needed.
        needed_bytes: u64,
        /// What is available.
        available_bytes: u64,
    },
    /// The named file is not one of ours.
    NotOurs(String),
    /// The named file is of a later version.
    TooNew(String),
    /// The named file is of an earlier version, which is no longer read.
    TooOld(String),
    /// The named file is damaged; says how.
    Damaged(String),
    /// This CPU lacks something that the guest has seen.
    CpuMismatch(String),
    /// The agent in the guest refused, or never answered.
    Guest(String),
    /// The guest was reset before its agent had answered; says how.
    GuestReset(String),
}

impl Error {
    /// The code of the control protocol.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Invalid { .. } | Self::Request { .. } => ErrorCode::InvalidRequest,
            Self::State(_) | Self::Stuck => ErrorCode::State,
            Self::Io { .. } => ErrorCode::Io,
            Self::Kvm { .. } | Self::GuestMemory(_) => ErrorCode::Kvm,
            Self::Capacity { .. } => ErrorCode::Capacity,
            Self::NotOurs(_) => ErrorCode::NotOurs,
            Self::TooNew(_) => ErrorCode::TooNew,
            Self::TooOld(_) => ErrorCode::TooOld,
            Self::Damaged(_) => ErrorCode::Damaged,
            Self::CpuMismatch(_) => ErrorCode::CpuMismatch,
            Self::Guest(_) | Self::GuestReset(_) => ErrorCode::Guest,
        }
    }

    /// The payload of an ERROR frame.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        let field = match self {
            Self::Invalid { field, .. } => Some((*field).to_owned()),
            Self::Request { field, .. } => field.clone(),
            _ => None,
        };
        ErrorBody { code: self.code(), message: self.to_string(), field }
    }

    /// For `map_err`: the kernel's refusal of `what`.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// For `map_err`: KVM's refusal of `what`.
    pub fn kvm(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |source| Self::Kvm { what, source }
    }

    /// For `map_err` on accesses to guest memory.
    pub fn guest_memory(source: impl fmt::Display) -> Self {
        Self::GuestMemory(source.to_string())
    }

    /// The error that the last system call left behind.
    pub fn last_os(what: impl Into<String>) -> Self {
        Self::Io { what: what.into(), source: io::Error::last_os_error() }
    }
}

impl From<forkd_proto::error::InvalidRequest> for Error {
    fn from(error: forkd_proto::error::InvalidRequest) -> Self {
        Self::Request { field: error.field, problem: error.message }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Invalid { field, problem } => write!(f, "{field}: {problem}"),
            Self::Request { field: Some(field), problem } => write!(f, "{field}: {problem}"),
            Self::Request { field: None, problem } => f.write_str(problem),
            Self::State(problem) => f.write_str(problem),
            Self::Stuck => f.write_str("a vCPU did not stop in time, so the machine runs on"),
            Self::Io { what, source } => write!(f, "{what}: {source}"),
            Self::Kvm { what, source } => write!(f, "{what}: {source}"),
            Self::GuestMemory(problem) => write!(f, "guest memory: {problem}"),
            Self::Capacity { needed_bytes, available_bytes } => write!(
                f,
                "the snapshot needs {} MiB of memory for its image, and the host has {} MiB \
                 available",
                needed_bytes >> 20,
                available_bytes >> 20
            ),
            Self::NotOurs(file) => write!(f, "{file} is not a file of forkd's"),
            Self::TooNew(file) => write!(f, "{file} was written by a later version of forkd"),
            Self::TooOld(file) => write!(
                f,
                "{file} was written by an earlier version of forkd, which this one does not read; \
                 bake the snapshot again"
            ),
            Self::Damaged(how) => f.write_str(how),
            Self::CpuMismatch(what) => {
                write!(f, "this CPU lacks what the snapshot's guest has seen: {what}")
            }
            Self::Guest(problem) | Self::GuestReset(problem) => write!(f, "guest: {problem}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            Self::Kvm { source, .. } => Some(source),
            _ => None,
        }
    }
}
