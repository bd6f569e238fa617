//! `warm`: the guest's way from booted to ready to be forked.
//!
//! First the image's Python code runs in the new runtime, then its readiness command is repeated
//! until it exits with 0, then the runtime makes itself cheap to fork.  Nothing sleeps for good
//! measure: readiness is what the image says it is.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use forkd_proto::Text;
use forkd_proto::guest::{ErrorBody, ErrorCode, Warm as Request, timeout};
use nix::unistd::Pid;

use crate::child::{Ended, Process, back_off};
use crate::failure::{Outcome, failure, recoded, refused};
use crate::image::{Defaults, Surroundings};
use crate::spawn::{Launch, Launcher, Standard};

/// Waits between two runs of the readiness command.
const RETRY_FIRST: Duration = Duration::from_millis(10);
const RETRY_MOST: Duration = Duration::from_millis(500);

/// Most bytes of a command's output that an error quotes.
const QUOTE_MAX: u64 = 4096;

/// A warm-up under way.
#[derive(Debug)]
pub struct Warm {
    /// As it was asked for.
    pub request: Request,
    /// What its processes start with.
    pub surroundings: Surroundings,
    started: Instant,
    deadline: Instant,
    ready: Ready,
    attempts: u32,
    output: PathBuf,
    /// What the last run that ended said.
    said: String,
}

#[derive(Clone, Debug)]
enum Ready {
    /// Its turn has not come.
    Later,
    /// It runs.
    Running(Process),
    /// It said no, and is asked again then.
    RetryAt(Instant),
}

impl Warm {
    /// A warm-up that begins now; the readiness command writes to a file in `folder`.
    pub fn new(request: Request, defaults: &Defaults, folder: &Path, now: Instant) -> Self {
        let surroundings =
            defaults.surroundings(&request.env, request.cwd.as_ref(), request.user.as_deref());
        Self {
            surroundings,
            started: now,
            deadline: now + timeout(request.timeout_s),
            ready: Ready::Later,
            attempts: 0,
            output: folder.join("ready.log"),
            said: String::new(),
            request,
        }
    }

    /// When something is due.
    pub fn wake_at(&self) -> Instant {
        match &self.ready {
            Ready::RetryAt(at) => (*at).min(self.deadline),
            Ready::Later | Ready::Running(_) => self.deadline,
        }
    }

    /// Seconds since it began.
    pub fn duration_s(&self, now: Instant) -> f64 {
        now.duration_since(self.started).as_secs_f64()
    }

    /// Why it has taken too long, if it has.
    pub fn timed_out(&self, now: Instant) -> Option<ErrorBody> {
        if now < self.deadline {
            return None;
        }
        let what = match &self.ready {
            Ready::Later => "the warm-up code is still running".to_owned(),
            Ready::Running(_) | Ready::RetryAt(_) => {
                let now = quote(&self.output);
                let said = if now.is_empty() { &self.said } else { &now };
                format!("the readiness command has not succeeded in {} runs{said}", self.attempts)
            }
        };
        let after = format!("after {} s {what}", self.request.timeout_s);
        Some(failure(ErrorCode::WarmUpTimeout, after))
    }

    /// Runs the readiness command if it is due; its process, if it was started.
    ///
    /// # Errors
    ///
    /// `warm_up_failed`: the command cannot be run at all, so waiting for it is pointless.
    pub fn run_ready(&mut self, launcher: &mut Launcher, now: Instant) -> Outcome<Option<Pid>> {
        let due = match &self.ready {
            Ready::Later => true,
            Ready::RetryAt(at) => now >= *at,
            Ready::Running(_) => false,
        };
        let Some(ready) = self.request.ready.as_ref().filter(|_| due) else {
            return Ok(None);
        };
        let process = logged(launcher, &ready.command, &self.surroundings, &self.output)
            .map_err(recoded(ErrorCode::WarmUpFailed))?;
        self.attempts += 1;
        let pid = process.pid();
        self.ready = Ready::Running(process);
        Ok(Some(pid))
    }

    /// The readiness command has ended; true if the guest is ready.
    pub fn on_exit(&mut self, ended: Ended, now: Instant) -> bool {
        if !ended.success() {
            self.said = quote(&self.output);
            self.ready = Ready::RetryAt(now + back_off(self.attempts - 1, RETRY_FIRST, RETRY_MOST));
        }
        ended.success()
    }

    /// The readiness command, while it runs.
    pub fn process(&self) -> Option<Pid> {
        match &self.ready {
            Ready::Running(process) => Some(process.pid()),
            Ready::Later | Ready::RetryAt(_) => None,
        }
    }

    /// Stops the readiness command.
    pub fn cancel(&self) {
        if let Ready::Running(process) = &self.ready {
            process.kill_all();
        }
    }
}

/// Starts a command of the image's own whose output goes to a file, for the error that may come of
/// it.
///
/// # Errors
///
/// As [`Launcher::launch`].
pub fn logged(
    launcher: &mut Launcher,
    args: &[Text],
    surroundings: &Surroundings,
    output: &Path,
) -> Outcome<Process> {
    let no_file = |error: io::Error| refused(&output.display().to_string(), &error);
    let file = File::create(output).map_err(no_file)?;
    let again = file.try_clone().map_err(no_file)?;
    let standard =
        Standard { stdin: Stdio::null(), stdout: Stdio::from(file), stderr: Stdio::from(again) };
    let started =
        launcher.launch(Launch { args, surroundings, standard, tty: false, keep: None })?;
    // A staged command that cannot run exits with 127, having said nothing; its verdict is not
    // waited for.
    Ok(started.process)
}

/// The end of what a command has written, as a clause of an error message.
pub fn quote(output: &Path) -> String {
    let tail = || -> io::Result<String> {
        let mut file = File::open(output)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(QUOTE_MAX)))?;
        let mut bytes = Vec::new();
        file.take(QUOTE_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    };
    match tail() {
        Ok(text) if !text.is_empty() => format!("; it said: {text}"),
        _ => String::new(),
    }
}
