//! What a host asks of the warm runtime; see `protocol/runtime/CONTRACT.md`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Env, check_args, check_env, check_surroundings, check_timeout};
use crate::Text;
use crate::error::InvalidRequest;
use crate::limits::{EVAL_CONTEXT_MAX, RUNTIME_NAME_MAX};

/// `eval`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Eval {
    /// Evaluated like a notebook cell, in the runtime's language.
    pub code: String,
    /// Refuse it if the warm runtime is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<String>,
    /// In a state of its own, which the first code there makes; default: that of the warm-up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context: Option<String>,
    /// Variables of the environment, as long as this code runs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Interrupt after so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
}

impl Eval {
    pub(super) fn check(&self) -> Result<(), InvalidRequest> {
        self.runtime.as_deref().map_or(Ok(()), check_name)?;
        self.context.as_deref().map_or(Ok(()), check_context)?;
        check_env(self.env.iter().map(|(name, value)| (name.as_str(), value.as_bytes())))?;
        check_timeout(self.timeout_s)
    }
}

/// `warm`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Warm {
    /// Start Python and run this in it; what `runtime` says shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<WarmPython>,
    /// Start this runtime and run its code in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runtime: Option<WarmRuntime>,
    /// What says that the guest is warm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<WarmReady>,
    /// Over the image's.
    #[serde(default, skip_serializing_if = "Env::is_empty")]
    pub env: Env,
    /// Working directory; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<Text>,
    /// Name or `uid[:gid]`; default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Give up after so long.
    pub timeout_s: f64,
}

impl Warm {
    pub(super) fn check(&self) -> Result<(), InvalidRequest> {
        if let Some(runtime) = &self.runtime {
            check_name(&runtime.name)?;
            if self.python.is_some() {
                return Err(InvalidRequest::field("runtime", "python is given as well"));
            }
        }
        if let Some(ready) = &self.ready {
            check_args("ready", &ready.command)?;
        }
        check_surroundings(&self.env, self.cwd.as_ref())?;
        check_timeout(Some(self.timeout_s))
    }
}

/// The Python part of `warm`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmPython {
    /// Run once, in the namespace that `eval` will see.
    pub code: String,
}

/// The runtime part of `warm`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmRuntime {
    /// Which one: one of the agent's own, or a program of the image's.
    pub name: String,
    /// Run once, with the state that `eval` will see.
    #[serde(default)]
    pub code: String,
}

/// The readiness part of `warm`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmReady {
    /// Repeated until it exits with 0.
    pub command: Vec<Text>,
}

/// A name is part of a path in the guest, so it can be nothing but a name.
fn check_name(name: &str) -> Result<(), InvalidRequest> {
    let known =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
    if name.len() > RUNTIME_NAME_MAX
        || !name.as_bytes().first().is_some_and(u8::is_ascii_lowercase)
        || !name.bytes().all(known)
    {
        let rule = format!(
            "not the name of a runtime: a small letter, then small letters, digits, '-', '_' and \
             '.', at most {RUNTIME_NAME_MAX} in all"
        );
        return Err(InvalidRequest::field("runtime", rule));
    }
    Ok(())
}

fn check_context(name: &str) -> Result<(), InvalidRequest> {
    let starts = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    if name.len() > EVAL_CONTEXT_MAX
        || !name.as_bytes().first().is_some_and(starts)
        || !name.bytes().all(|byte| starts(&byte) || b"-_.".contains(&byte))
    {
        let rule = format!(
            "not the name of a context: a small letter or digit, then small letters, digits, '-', \
             '_' and '.', at most {EVAL_CONTEXT_MAX} in all"
        );
        return Err(InvalidRequest::field("context", rule));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::Request;

    fn refused(json: &str) -> Option<String> {
        Request::parse(json.as_bytes()).err().and_then(|error| error.field)
    }

    #[test]
    fn the_name_of_a_runtime_is_no_path_and_has_a_longest() {
        let eval = |name: &str| format!(r#"{{"op":"eval","code":"","runtime":"{name}"}}"#);
        for name in ["node", "a", "java-17", "node.js", &"a".repeat(32)] {
            assert_eq!(refused(&eval(name)), None, "{name}");
        }
        for name in ["", "../x", "a/b", "Node", "7z", "a b", &"a".repeat(33)] {
            assert_eq!(refused(&eval(name)).as_deref(), Some("runtime"), "{name}");
        }
    }

    #[test]
    fn the_name_of_a_context_has_a_longest() {
        let eval = |name: &str| format!(r#"{{"op":"eval","code":"","context":"{name}"}}"#);
        for name in ["a", "7", "a.b-c_d", &"a".repeat(63)] {
            assert_eq!(refused(&eval(name)), None, "{name}");
        }
        for name in ["", "-a", "A", "a b", "é", &"a".repeat(64)] {
            assert_eq!(refused(&eval(name)).as_deref(), Some("context"), "{name}");
        }
    }

    #[test]
    fn a_warm_up_has_one_runtime() {
        let both = r#"{"op":"warm","python":{"code":""},"runtime":{"name":"node"},"timeout_s":1}"#;
        assert_eq!(refused(both).as_deref(), Some("runtime"));
    }
}
