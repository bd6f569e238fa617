//! Users and groups of the image, from its own `/etc/passwd` and `/etc/group`.
//!
//! A static program cannot use NSS, and an image that needs it for `USER` does not exist in
//! practice.

use std::fs;
use std::io;
use std::path::Path;

use crate::failure::{Outcome, invalid, refused};

/// Whom a process runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Login name, if the image has one for this number.
    pub name: Option<String>,
    /// Number of the user.
    pub uid: u32,
    /// Number of the group.
    pub gid: u32,
    /// Numbers of the other groups the user is in.
    pub groups: Vec<u32>,
    /// Home directory.
    pub home: String,
}

/// Whether `user` is the one that the agent itself runs as, so that nothing need be changed.
pub fn is_root(user: &str) -> bool {
    matches!(user, "" | "root" | "0" | "0:0" | "root:root")
}

/// Finds `user`, a name or a number, with or without `:` and a group.
///
/// # Errors
///
/// `invalid_request` naming `user` if the image has no such user or group.
pub fn find(user: &str, etc: &Path) -> Outcome<User> {
    let passwd = read(&etc.join("passwd"))?;
    let group = read(&etc.join("group"))?;
    lookup(user, &passwd, &group)
        .ok_or_else(|| invalid("user", format!("the image has no user {user:?}")))
}

/// A file that a very small image may lack.
fn read(path: &Path) -> Outcome<String> {
    match fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(refused(&path.display().to_string(), &error)),
    }
}

fn lookup(user: &str, passwd: &str, group: &str) -> Option<User> {
    let (user, wanted_group) = match user.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (user, None),
    };
    let account = passwd.lines().map(fields).find(|account| {
        account.first().is_some_and(|name| *name == user)
            || (is_number(user) && account.get(2).is_some_and(|uid| *uid == user))
    });
    let uid = match &account {
        Some(account) => account.get(2)?.parse().ok()?,
        None => user.parse().ok()?,
    };
    let name = account.as_ref().and_then(|account| account.first()).map(ToString::to_string);
    let gid = match (wanted_group, &account) {
        (Some(wanted), _) => find_group(wanted, group)?,
        (None, Some(account)) => account.get(3)?.parse().ok()?,
        (None, None) => 0,
    };
    let home = account.as_ref().and_then(|account| account.get(5)).filter(|home| !home.is_empty());
    let home = home.map_or_else(|| "/".to_owned(), ToString::to_string);
    let groups = name.as_ref().map_or_else(Vec::new, |name| groups_of(name, group));
    Some(User { name, uid, gid, groups, home })
}

fn find_group(wanted: &str, group: &str) -> Option<u32> {
    let line = group.lines().map(fields).find(|line| line.first().is_some_and(|g| *g == wanted));
    line.and_then(|line| line.get(2)?.parse().ok()).or_else(|| wanted.parse().ok())
}

fn groups_of(name: &str, group: &str) -> Vec<u32> {
    let lists = |members: &&str| members.split(',').any(|member| member == name);
    let lines = group.lines().map(fields).filter(|line| line.get(3).is_some_and(lists));
    lines.filter_map(|line| line.get(2)?.parse().ok()).collect()
}

fn fields(line: &str) -> Vec<&str> {
    line.split(':').collect()
}

fn is_number(text: &str) -> bool {
    text.parse::<u32>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/home/app:/bin/sh\n";
    const GROUP: &str = "root:x:0:\napp:x:1000:\naudio:x:29:app,other\nvideo:x:44:other\n";

    fn found(user: &str) -> Option<(u32, u32, Vec<u32>, String)> {
        lookup(user, PASSWD, GROUP).map(|user| (user.uid, user.gid, user.groups, user.home))
    }

    #[test]
    fn a_name_brings_its_groups_and_home() {
        assert_eq!(found("app"), Some((1000, 1000, vec![29], "/home/app".to_owned())));
    }

    #[test]
    fn a_number_that_has_a_name_is_that_user() {
        assert_eq!(found("1000"), found("app"));
    }

    #[test]
    fn a_number_without_a_name_is_enough() {
        assert_eq!(found("4711"), Some((4711, 0, vec![], "/".to_owned())));
        assert_eq!(found("4711:4712"), Some((4711, 4712, vec![], "/".to_owned())));
    }

    #[test]
    fn a_group_may_be_chosen_by_name_or_number() {
        assert_eq!(found("app:video").map(|user| user.1), Some(44));
        assert_eq!(found("app:7").map(|user| user.1), Some(7));
    }

    #[test]
    fn whom_the_image_does_not_know_is_refused() {
        assert_eq!(found("nobody"), None);
        assert_eq!(found("app:wheel"), None);
        assert_eq!(found(""), None);
        assert_eq!(found("-1"), None);
        assert_eq!(found("4294967296"), None);
    }
}
