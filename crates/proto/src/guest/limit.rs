//! Limits that a guest keeps itself.

use serde::{Deserialize, Serialize};

/// How full the root file system may become.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskLimit {
    /// What it may allocate beyond what it has in use now.
    pub free_bytes: u64,
    /// What it may have in use in all.
    pub used_bytes: u64,
}

/// `limit`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// What the guest may use of its memory from now on; default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}
