//! What `forkd-vmm compare` is told, and what it says.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;
use crate::parse::{self, check_path};

/// Two disks that have their lowest layers in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompareConfig {
    /// What both have, lowest first: a raw image, then layer files.
    pub layers: Vec<PathBuf>,
    /// Size of both disks.
    pub size_bytes: u64,
    /// The layer file that the first has above them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<PathBuf>,
    /// The layer file that the second has above them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<PathBuf>,
    /// Most files of one disk.
    pub entries_max: usize,
    /// Most changes to name; the others are counted.
    pub changes_max: usize,
    /// The user that looks at them, in a jail; without, it is nobody, in the host's namespaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Whether it looks at them in the jail of a user without privileges, as the user it is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rootless: bool,
}

impl CompareConfig {
    /// Reads and checks a configuration file.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`], naming the member at fault.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidRequest> {
        let config: Self = parse::members(parse::object(json)?)?;
        if config.layers.is_empty() {
            return Err(InvalidRequest::field("layers", "there are none"));
        }
        for (name, path) in config
            .layers
            .iter()
            .map(|path| ("layers", path))
            .chain(config.before.iter().map(|path| ("before", path)))
            .chain(config.after.iter().map(|path| ("after", path)))
        {
            check_path(name, path)?;
        }
        if config.uid == Some(0) {
            return Err(InvalidRequest::field("uid", "root"));
        }
        if config.rootless && config.uid.is_some() {
            return Err(InvalidRequest::field("rootless", "who is not root becomes no other user"));
        }
        Ok(config)
    }
}

/// What it prints, as one line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum CompareEvent {
    /// It has compared.
    Compared {
        /// In the order of folders.
        changes: Vec<FileChange>,
        /// How many others there are.
        more: u64,
    },
}

/// One file that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// From the root; what is not UTF-8 is replaced.
    pub path: String,
    /// `added`, `changed` or `removed`.
    pub change: &'static str,
    /// One letter, as of `find`.
    pub kind: &'static str,
    /// Length of its contents; as the kind, of the second disk if that has it.
    pub size_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_are_unknown_missing_or_wrong_are_named() {
        let config = r#""size_bytes":4096,"entries_max":1,"changes_max":1"#;
        let field = |members: &str| {
            let json = format!("{{{members},{config}}}");
            CompareConfig::parse(json.as_bytes()).err().and_then(|error| error.field)
        };

        assert_eq!(field(r#""layers":["/a"]"#), None);
        assert_eq!(field(r#""layers":[]"#).as_deref(), Some("layers"));
        assert_eq!(field(r#""layers":["/a","b"]"#).as_deref(), Some("layers"));
        assert_eq!(field(r#""layers":["/a"],"before":"b""#).as_deref(), Some("before"));
        assert_eq!(field(r#""layers":["/a"],"after":"b""#).as_deref(), Some("after"));
        assert_eq!(field(r#""layers":["/a"],"between":"/b""#).as_deref(), Some("between"));
    }
}
