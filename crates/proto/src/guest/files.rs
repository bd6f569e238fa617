//! What a host asks of a guest's files.

use serde::{Deserialize, Serialize};

use crate::Text;

/// `read_file`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadFile {
    /// Absolute.
    pub path: Text,
    /// First byte wanted.
    #[serde(default)]
    pub offset: u64,
    /// Most bytes wanted; default: to the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
}

/// `write_file`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteFile {
    /// Absolute.
    pub path: Text,
    /// Permission bits; default 0644, or those of the file that is replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Make the directories above it.
    #[serde(default)]
    pub make_parents: bool,
    /// Who gets what is made new: name or `uid[:gid]`; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// `write_archive`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteArchive {
    /// Absolute; a directory, which is made if it is missing.
    pub path: Text,
    /// Who gets what is made new: name or `uid[:gid]`; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Give everything the owner that the archive says.
    #[serde(default)]
    pub keep_owner: bool,
}

/// `stat`, `list_dir` and `read_archive`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathOnly {
    /// Absolute.
    pub path: Text,
}

/// `make_dir`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MakeDir {
    /// Absolute.
    pub path: Text,
    /// Make the directories above it, and do not mind if it exists.
    #[serde(default)]
    pub parents: bool,
    /// Permission bits; default 0755.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Who gets what is made: name or `uid[:gid]`; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// `move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// Absolute.
    pub source: Text,
    /// Absolute; a file there is replaced.
    pub target: Text,
}

/// `remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remove {
    /// Absolute.
    pub path: Text,
    /// Remove what a directory holds, too.
    #[serde(default)]
    pub recursive: bool,
}
