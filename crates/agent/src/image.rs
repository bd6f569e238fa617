//! What the image says about the processes that run in it.

use std::fs;
use std::io;
use std::path::Path;

use forkd_proto::Text;
use forkd_proto::guest::{Configure, Env};
use serde::Deserialize;

use crate::log;

/// Where an image keeps its defaults, as whoever built it wrote them.
pub const IMAGE_FILE: &str = "/etc/forkd/image.json";

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What holds for every process unless its request says otherwise.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defaults {
    /// Over our own defaults.
    pub env: Env,
    /// Working directory.
    pub cwd: Text,
    /// Name or `uid[:gid]`; empty for root.
    pub user: String,
    /// Run in the runtime after each fork.
    pub post_fork: Option<String>,
    /// Run after each fork; empty for none.
    pub post_fork_command: Vec<Text>,
}

/// What a process starts with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Surroundings {
    /// All of its environment, but for what depends on the user.
    pub env: Env,
    /// Working directory.
    pub cwd: Text,
    /// Name or `uid[:gid]`; empty for root.
    pub user: String,
}

impl Defaults {
    /// What the image's own file says; an image without one has no wishes.
    pub fn load(file: &Path) -> Self {
        let parsed = match fs::read(file) {
            Ok(json) => serde_json::from_slice(&json).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error),
        };
        parsed.unwrap_or_else(|error| {
            log::line(&format!("{} is not used: {error}", file.display()));
            Self::default()
        })
    }

    /// Changes what `configure` mentions, and nothing else.
    pub fn configure(&mut self, request: Configure) {
        let Configure { env, cwd, user, post_fork, post_fork_command } = request;
        self.env = env.unwrap_or_else(|| std::mem::take(&mut self.env));
        self.cwd = cwd.unwrap_or_else(|| std::mem::take(&mut self.cwd));
        self.user = user.unwrap_or_else(|| std::mem::take(&mut self.user));
        self.post_fork = post_fork.filter(|code| !code.is_empty()).or(self.post_fork.take());
        self.post_fork_command =
            post_fork_command.unwrap_or_else(|| std::mem::take(&mut self.post_fork_command));
    }

    /// What a process starts with that wishes for these.
    pub fn surroundings(&self, env: &Env, cwd: Option<&Text>, user: Option<&str>) -> Surroundings {
        let ours = [("PATH", PATH), ("LANG", "C.UTF-8")];
        let mut all: Env =
            ours.iter().map(|(name, value)| ((*name).to_owned(), Text::from(*value))).collect();
        all.extend(self.env.clone());
        all.extend(env.clone());
        let cwd = match cwd.unwrap_or(&self.cwd) {
            cwd if cwd.is_empty() => "/".into(),
            cwd => cwd.clone(),
        };
        Surroundings { env: all, cwd, user: user.unwrap_or(&self.user).to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(pairs: &[(&str, &str)]) -> Env {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), Text::from(*value))).collect()
    }

    #[test]
    fn the_request_goes_over_the_image_and_the_image_over_us() {
        let image = Defaults { env: env(&[("LANG", "de"), ("A", "image")]), ..Defaults::default() };
        let all = image.surroundings(&env(&[("A", "request")]), None, None).env;
        assert_eq!(all, env(&[("PATH", PATH), ("LANG", "de"), ("A", "request")]));
    }

    #[test]
    fn where_nobody_has_a_wish_it_is_root_in_the_root() {
        let all = Defaults::default().surroundings(&Env::new(), None, None);
        assert_eq!((all.cwd, all.user.as_str()), ("/".into(), ""));
    }

    #[test]
    fn configuring_one_thing_keeps_the_others() {
        let mut image = Defaults { cwd: "/srv".into(), ..Defaults::default() };
        image.configure(Configure { user: Some("app".to_owned()), ..Configure::default() });
        assert_eq!((image.cwd, image.user.as_str()), ("/srv".into(), "app"));
    }
}
