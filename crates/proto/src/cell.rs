//! What `forkd-vmm cell` is told: what is left of the host to a program that is not the VMM.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::InvalidRequest;
use crate::parse::{self, check_path};

/// Most paths of one kind in a cell.
pub const CELL_PATHS_MAX: usize = 128;

/// A program's cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellConfig {
    /// What it reads of the host's files, each at its own path.  Those that are missing are left
    /// out, and links at the root stay links.
    pub read: Vec<PathBuf>,
    /// Folders in which it also writes, likewise; these exist.
    pub write: Vec<PathBuf>,
    /// Whether it has the host's network; otherwise it has none.
    pub network: bool,
    /// The user that it is, if `uid_count` is 1.  Otherwise it is root of a user namespace, and
    /// root there is this user.
    pub uid: u32,
    /// How many users and groups its user namespace has, from `uid` on.
    pub uid_count: u32,
    /// The cgroup that it is started in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
}

impl CellConfig {
    /// Reads and checks a configuration.
    ///
    /// # Errors
    ///
    /// [`InvalidRequest`], naming the member at fault.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidRequest> {
        let config: Self = parse::members(parse::object(json)?)?;
        for (name, paths) in [("read", &config.read), ("write", &config.write)] {
            if paths.len() > CELL_PATHS_MAX {
                return Err(InvalidRequest::field(name, "there are too many"));
            }
            paths.iter().try_for_each(|path| check_path(name, path))?;
        }
        config.cgroup.iter().try_for_each(|path| check_path("cgroup", path))?;
        let last = config.uid.checked_add(config.uid_count);
        if config.uid == 0 || config.uid_count == 0 || last.is_none() {
            return Err(InvalidRequest::field("uid", "these are nobody's numbers"));
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_that_are_unknown_missing_or_wrong_are_named() {
        let field =
            |json: &str| CellConfig::parse(json.as_bytes()).err().and_then(|error| error.field);
        let with = |members: &str| {
            format!(r#"{{"read":[],"write":[],"network":false,"uid":7,"uid_count":1{members}}}"#)
        };

        assert_eq!(field(&with("")), None);
        assert_eq!(field(&with(r#","more":1"#)).as_deref(), Some("more"));
        assert_eq!(field(&with(r#","cgroup":"here""#)).as_deref(), Some("cgroup"));
        let root = with("").replace(r#""uid":7"#, r#""uid":0"#);
        assert_eq!(field(&root).as_deref(), Some("uid"));
        let past = with("").replace(r#""uid_count":1"#, r#""uid_count":4294967295"#);
        assert_eq!(field(&past).as_deref(), Some("uid"));
        let paths = vec![r#""/a""#; CELL_PATHS_MAX + 1].join(",");
        let many = with("").replace(r#""read":[]"#, &format!(r#""read":[{paths}]"#));
        assert_eq!(field(&many).as_deref(), Some("read"));
    }
}
