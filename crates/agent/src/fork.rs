//! `post_fork`: a forked guest becomes somebody of its own, or the fork fails.
//!
//! The order is the protocol's.  What only needs the kernel is done at once; then the runtime
//! reseeds itself and runs its part of the hook; then the image's commands run one after the other.
//! The first failure ends it.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkd_proto::Text;
use forkd_proto::guest::{ErrorBody, ErrorCode, Hook, PostFork as Request, PostForkReply};
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::json;

use crate::child::{Ended, Process};
use crate::clock;
use crate::failure::{Outcome, failure, recoded};
use crate::image::{Defaults, Surroundings};
use crate::spawn::Launcher;
use crate::systemd;
use crate::warm::{logged, quote};

/// How long the image's hook may take, all of it together, as long as whoever asked waits: the
/// longest deadline that a fork may have.  Its own ends it sooner, and knows how slow its host is.
pub const HOOK_TIMEOUT: Duration = Duration::from_hours(1);

/// Run after each fork if the image has it.
const HOOK_FILE: &str = "/etc/forkd/post-fork";

/// A fork on its way.
#[derive(Debug)]
pub struct PostFork {
    done: KernelPart,
    hook: Hook,
    commands: VecDeque<Command>,
    running: Option<(Process, Command)>,
    deadline: Instant,
    output: PathBuf,
}

/// A program that is part of a fork.
#[derive(Debug)]
struct Command {
    args: Vec<Text>,
    surroundings: Surroundings,
    /// The image wants it, and not the agent.
    hook: bool,
}

impl Command {
    fn name(&self) -> Cow<'_, str> {
        self.args.first().map_or("".into(), |name| name.to_string_lossy())
    }
}

/// What was done of a fork that only needs the kernel.
#[derive(Debug, Default)]
pub struct KernelPart {
    /// Under which names the kernel has been reseeded.
    pub reseeded: Vec<String>,
    /// Whether the guest has the IPv6 address that it was given, or will.
    pub ipv6: bool,
}

/// What the runtime says about its part.
#[derive(Debug, Deserialize)]
struct RuntimePart {
    #[serde(default)]
    reseeded: Vec<String>,
    #[serde(default = "no_hook")]
    hook: Hook,
}

fn no_hook() -> Hook {
    Hook::None
}

impl PostFork {
    /// A fork of which nothing is done, where systemd may run; hooks write to a file in `folder`.
    pub fn new(defaults: &Defaults, folder: &Path, systemd: bool, now: Instant) -> Self {
        let mut commands = VecDeque::new();
        let as_root =
            defaults.surroundings(&forkd_proto::guest::Env::new(), Some(&"/".into()), Some(""));
        if systemd {
            let (args, surroundings) = (systemd::restart_journal(), as_root.clone());
            commands.push_back(Command { args, surroundings, hook: false });
        }
        if has_hook() {
            let args = vec![HOOK_FILE.into()];
            commands.push_back(Command { args, surroundings: as_root, hook: true });
        }
        if !defaults.post_fork_command.is_empty() {
            let args = defaults.post_fork_command.clone();
            let as_image = defaults.surroundings(&forkd_proto::guest::Env::new(), None, None);
            commands.push_back(Command { args, surroundings: as_image, hook: true });
        }
        Self {
            done: KernelPart::default(),
            hook: Hook::None,
            commands,
            running: None,
            deadline: now + HOOK_TIMEOUT,
            output: folder.join("hook.log"),
        }
    }

    /// Whether any commands will run.
    pub fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// What only needs the kernel is done.
    pub fn on_kernel(&mut self, done: KernelPart) {
        self.done = done;
    }

    /// The runtime's request.
    pub fn runtime_request(request: &Request, code: Option<&str>) -> Vec<u8> {
        json!({"op": "post_fork", "seed": request.seed.to_hex(), "code": code})
            .to_string()
            .into_bytes()
    }

    /// The runtime has answered.
    ///
    /// # Errors
    ///
    /// `reseed_failed`: it has not said what it reseeded.
    pub fn on_runtime(&mut self, payload: &[u8]) -> Outcome<()> {
        let part: RuntimePart = serde_json::from_slice(payload)
            .map_err(|error| failure(ErrorCode::ReseedFailed, format!("the runtime: {error}")))?;
        self.done.reseeded.extend(part.reseeded);
        self.hook = part.hook;
        Ok(())
    }

    /// Starts the next command; its process, or `None` if there are no more and the fork is
    /// complete.
    ///
    /// # Errors
    ///
    /// `hook_failed`: the command cannot be run.
    pub fn run_next(&mut self, launcher: &mut Launcher) -> Outcome<Option<Pid>> {
        let Some(command) = self.commands.pop_front() else {
            return Ok(None);
        };
        let process = logged(launcher, &command.args, &command.surroundings, &self.output)
            .map_err(recoded(ErrorCode::HookFailed))?;
        let pid = process.pid();
        self.running = Some((process, command));
        Ok(Some(pid))
    }

    /// A command has ended.
    ///
    /// # Errors
    ///
    /// `hook_failed`: not with 0.
    pub fn on_exit(&mut self, ended: Ended) -> Outcome<()> {
        let Some((_, command)) = self.running.take() else { return Ok(()) };
        if !ended.success() {
            let (name, said) = (command.name(), quote(&self.output));
            return Err(failure(ErrorCode::HookFailed, format!("{name} ended with {ended}{said}")));
        }
        if command.hook {
            self.hook = Hook::Ran;
        }
        Ok(())
    }

    /// When it has taken too long.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Why it has taken too long, if it has.
    pub fn timed_out(&self, now: Instant) -> Option<ErrorBody> {
        (now >= self.deadline).then(|| {
            let name =
                self.running.as_ref().map_or("the runtime".into(), |(_, command)| command.name());
            let limit = HOOK_TIMEOUT.as_secs();
            failure(ErrorCode::HookFailed, format!("{name} has not ended within {limit} s"))
        })
    }

    /// The command that runs.
    pub fn process(&self) -> Option<Pid> {
        self.running.as_ref().map(|(process, _)| process.pid())
    }

    /// Stops the command that runs.
    pub fn cancel(&self) {
        if let Some((process, _)) = &self.running {
            process.kill_all();
        }
    }

    /// The answer, once all is done.
    pub fn reply(&mut self) -> PostForkReply {
        PostForkReply {
            realtime_ns: clock::realtime_ns(),
            reseeded: std::mem::take(&mut self.done.reseeded),
            hook: self.hook,
            ipv6: self.done.ipv6,
            generation_on_request: true,
        }
    }
}

/// Whether the kernel has more to do for a new generation id than to reseed itself, which the agent
/// has it do anyway: `wireguard` forgets its session keys, so that no sibling encrypts with the
/// same.  It is the only listener that Linux has (`register_random_vmfork_notifier`).
pub fn needs_generation() -> bool {
    // A kernel that does not say what it has is taken to have it.
    let modules = Path::new("/sys/module");
    modules.join("wireguard").exists() || !modules.exists()
}

/// Whether the image has a hook of its own.  Also asked once before the snapshot: what the kernel
/// remembers of that saves each fork a look into a directory on the disk.
pub fn has_hook() -> bool {
    is_executable(Path::new(HOOK_FILE))
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
