//! Which runtimes there are: those that the agent brings along, and the image's own.
//!
//! Both speak `protocol/runtime/CONTRACT.md`.  One of the agent's is a script for an interpreter
//! that the image has, or the agent itself; one of the image's is a program in [`FOLDER`] that is
//! called like the runtime.

use std::os::fd::RawFd;
use std::path::Path;

use forkd_proto::Text;
use forkd_proto::guest::ErrorCode;

use crate::failure::{Outcome, failure};

/// Where an image has runtimes of its own.
pub const FOLDER: &str = "/usr/lib/forkd/runtimes";

/// The name and text of a script.
type Script = (&'static str, &'static str);

/// A name, a program with arguments, and scripts: the first is the program's argument, the others
/// are its parts.
type Known = (&'static str, &'static [&'static str], &'static [Script]);

const PYTHON: &[Script] = &[
    ("runtime.py", include_str!("../../runtime/python.py")),
    ("_forkd_contexts.py", include_str!("../../runtime/_forkd_contexts.py")),
    ("_forkd_results.py", include_str!("../../runtime/_forkd_results.py")),
];
const NODE: &[Script] = &[("runtime.js", include_str!("../../runtime/node.js"))];

/// The agent's own.
const OURS: [Known; 3] = [
    ("python", &["python3"], PYTHON),
    ("node", &["node"], NODE),
    ("shell", &["/proc/self/exe", "shell"], &[]),
];

/// How a runtime is started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spec {
    /// What it is called.
    pub name: String,
    program: Vec<String>,
    /// Files that are put beside each other; its program gets the first as an argument.
    pub(super) scripts: &'static [Script],
}

impl Spec {
    /// Python, which snapshots had before there were others.
    pub fn python() -> Self {
        let [(name, program, scripts), ..] = OURS;
        Self::ours(name, program, scripts)
    }

    /// The runtime of this name.
    ///
    /// # Errors
    ///
    /// `not_found`: there is none.
    pub fn find(name: &str) -> Outcome<Self> {
        Self::find_in(name, Path::new(FOLDER))
    }

    fn find_in(name: &str, folder: &Path) -> Outcome<Self> {
        if let Some((name, program, scripts)) = OURS.into_iter().find(|(known, ..)| *known == name)
        {
            return Ok(Self::ours(name, program, scripts));
        }
        let program = folder.join(name);
        if program.is_file() {
            let program = vec![program.to_string_lossy().into_owned()];
            return Ok(Self { name: name.to_owned(), program, scripts: &[] });
        }
        let known = OURS.map(|(name, ..)| name).join(", ");
        let message = format!(
            "there is no runtime '{name}': forkd has {known}, and the image has no {}",
            program.display()
        );
        Err(failure(ErrorCode::NotFound, message))
    }

    fn ours(name: &str, program: &[&str], scripts: &'static [Script]) -> Self {
        let program = program.iter().map(|part| (*part).to_owned()).collect();
        Self { name: name.to_owned(), program, scripts }
    }

    /// Whether it is Python, whose answers are known to be as they should.
    pub fn is_python(&self) -> bool {
        self.name == "python"
    }

    /// What an error calls it.
    pub fn title(&self) -> String {
        if self.is_python() { "the runtime".into() } else { format!("the {} runtime", self.name) }
    }

    /// Its command line, when its script is in `folder` and its socket is `fd`.
    pub(super) fn args(&self, folder: &Path, fd: RawFd) -> Vec<Text> {
        let script = self.scripts.first().map(|(file, _)| folder.join(file).into_os_string());
        let mut args: Vec<Text> = self.program.iter().map(|part| part.as_str().into()).collect();
        args.extend(script.map(Into::into));
        args.push(fd.to_string().into());
        args
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_adds_runtimes_and_replaces_none() {
        let folder = std::env::temp_dir().join(format!("forkd-runtimes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["ruby", "python"] {
            std::fs::write(folder.join(name), "").unwrap();
        }

        let ruby = Spec::find_in("ruby", &folder).unwrap();
        assert_eq!(
            ruby.args(Path::new("/run"), 7),
            [folder.join("ruby").to_str().unwrap(), "7"].map(Text::from)
        );
        assert_eq!(Spec::find_in("python", &folder).unwrap(), Spec::python());
        let missing = Spec::find_in("nodejs", &folder).unwrap_err();
        assert!(
            missing.message.contains("'nodejs'")
                && missing.message.contains("forkd has python, node, shell")
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_script_goes_before_the_socket() {
        let args = Spec::python().args(Path::new("/run/forkd"), 5);
        assert_eq!(args, ["python3", "/run/forkd/runtime.py", "5"].map(Text::from));
    }
}
