//! The interpreter's process: its socket, its outputs, and what the kernel says of it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use forkd_proto::Kind;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::spec::Spec;
use crate::child::signal_group;
use crate::exec::{output_pipe, unread_bytes};
use crate::failure::{Outcome, refused};
use crate::image::Surroundings;
use crate::spawn::{Launch, Launcher, Standard};
use crate::stream::{BACKLOG_MAX, Stream};

/// Bytes read at once from an interpreter that has nothing to say.
pub(super) const HEARD_BYTES: usize = 64;

/// Most bytes that are read of a process' `status`.  What comes later is not seen, and a process
/// that says too late what is looked for is not taken for dormant.
const STATUS_BYTES_MAX: usize = 2048;

/// Most messages of a runtime's own before its next answer.  Each is taken at once, so one that
/// never stops would have the agent do nothing else.
const CONTROLS_MAX: u32 = 1024;

/// The signals that the script has a handler for, as a mask: SIGINT.
const CAUGHT: u64 = 1 << (Signal::SIGINT as u64 - 1);

#[derive(Debug)]
pub(super) struct Process {
    pub pid: Pid,
    pub stream: Stream,
    pub outputs: [(Option<File>, Kind); 2],
    /// Bytes that were in each output when the answer came, and so have to go before it.
    pub rest: [u64; 2],
    pub verdict: Option<File>,
    /// What the kernel says of it; proc(5), `status`.  Kept open: a fork that had to look it up
    /// would touch more than twice as many pages of the kernel's.
    pub status: Option<File>,
    /// It has said that code of its own is to run in forks.
    pub hooked: bool,
    /// Messages of its own since its last answer.
    pub controls: u32,
    /// What it did that its contract does not allow, for which it was killed.
    pub broken: Option<String>,
}

/// Whether its `status` says of a process that it has one thread, which catches [`CAUGHT`].
fn alone_and_quiet(status: &File) -> Option<bool> {
    let mut said = [0; STATUS_BYTES_MAX];
    let length = status.read_at(&mut said, 0).ok()?;
    let status = str::from_utf8(said.get(..length)?).ok()?;
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let caught = u64::from_str_radix(field("SigCgt:")?, 16).ok()?;
    Some(field("Threads:")? == "1" && caught == CAUGHT)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Drained {
    /// Nothing is left.
    Empty,
    /// The client must read first.
    Full,
    /// There may be more.
    More,
}

impl Process {
    /// Starts it, with its script in `folder`.
    ///
    /// # Errors
    ///
    /// It cannot be started; nothing is left.
    pub fn start(
        launcher: &mut Launcher,
        spec: &Spec,
        surroundings: &Surroundings,
        folder: &Path,
    ) -> Outcome<Self> {
        let no_start = |error: io::Error| refused("cannot start the runtime", &error);
        for (name, text) in spec.scripts {
            fs::write(folder.join(name), text).map_err(no_start)?;
        }
        let (ours, theirs) = UnixStream::pair().map_err(no_start)?;
        let theirs = OwnedFd::from(theirs);
        let (stdout, theirs_out) = output_pipe().map_err(no_start)?;
        let (stderr, theirs_err) = output_pipe().map_err(no_start)?;
        let args = spec.args(folder, theirs.as_raw_fd());
        let standard = Standard {
            stdin: Stdio::null(),
            stdout: Stdio::from(theirs_out),
            stderr: Stdio::from(theirs_err),
        };
        let started = launcher.launch_to_stay(Launch {
            args: &args,
            surroundings,
            standard,
            tty: false,
            keep: Some(&theirs),
        })?;
        let pid = started.process.pid();
        launcher.prefer_others(pid);
        Ok(Self {
            pid,
            stream: Stream::new(ours.into()),
            outputs: [(Some(stdout), Kind::Stdout), (Some(stderr), Kind::Stderr)],
            rest: [0; 2],
            verdict: started.verdict,
            status: File::open(format!("/proc/{pid}/status")).ok(),
            hooked: false,
            controls: 0,
            broken: None,
        })
    }

    pub fn kill(&self) {
        signal_group(self.pid, Signal::SIGKILL);
    }

    /// Kills it for what its contract does not allow.
    pub fn break_off(&mut self, what: String) {
        crate::log::line(&format!("the runtime breaks its contract: {what}"));
        self.broken.get_or_insert(what);
        self.kill();
    }

    /// The interpreter's answer, if it has come.  A broken socket is found out when the process
    /// ends.
    pub fn take_answer(&mut self, scratch: &mut [u8]) -> Option<(Kind, Vec<u8>)> {
        loop {
            match self.stream.next_frame() {
                // What was sent after it broke its contract counts no more.
                Ok(Some(_)) if self.broken.is_some() => return None,
                Ok(Some((Kind::Control, _))) => {
                    self.hooked = true;
                    self.controls += 1;
                    if self.controls > CONTROLS_MAX {
                        let what = format!("it sent {} messages without an answer", self.controls);
                        self.break_off(what);
                        return None;
                    }
                    continue;
                }
                Ok(Some((kind, _))) if !matches!(kind, Kind::Reply | Kind::Error) => {
                    self.break_off(format!("it sent a frame of kind {kind:?}"));
                    return None;
                }
                Ok(Some(frame)) => {
                    self.controls = 0;
                    return Some(frame);
                }
                Ok(None) => {}
                Err(error) => {
                    self.break_off(format!("it sent what is no frame: {error}"));
                    return None;
                }
            }
            if !self.stream.fill(scratch).unwrap_or(false) {
                return None;
            }
        }
    }

    /// Whether nothing can happen in it until it is asked for something: it has one thread, native
    /// ones included, a handler for no signal but SIGINT, and no code of its own to run in forks.
    /// Then nobody can see the state of its generators either.
    pub fn is_dormant(&mut self) -> bool {
        // Without a job it can have nothing else to say.
        drop(self.take_answer(&mut [0; HEARD_BYTES]));
        !self.hooked && self.status.as_ref().and_then(alone_and_quiet).unwrap_or(false)
    }

    /// Notes how much is in the outputs now.
    pub fn measure_rest(&mut self) {
        for ((file, _), rest) in self.outputs.iter().zip(&mut self.rest) {
            *rest = file.as_ref().map_or(0, unread_bytes);
        }
    }

    /// Reads a buffer from each output; only from those that have some of their `rest`, if it is
    /// what counts.
    pub fn move_output(
        &mut self,
        mut client: Option<&mut Stream>,
        scratch: &mut [u8],
        only_rest: bool,
    ) -> Drained {
        let mut drained = Drained::Empty;
        for ((slot, kind), rest) in self.outputs.iter_mut().zip(&mut self.rest) {
            let Some(file) = slot.as_mut().filter(|_| !only_rest || *rest > 0) else { continue };
            if client.as_ref().is_some_and(|client| client.backlog() >= BACKLOG_MAX) {
                return Drained::Full;
            }
            match file.read(scratch) {
                Ok(0) => *slot = None,
                Ok(count) => {
                    if let Some(client) = client.as_deref_mut() {
                        client.queue(*kind, scratch.get(..count).unwrap_or_default());
                    }
                    *rest = rest.saturating_sub(count as u64);
                    drained = Drained::More;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => *rest = 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    drained = Drained::More;
                }
                Err(_) => *slot = None,
            }
        }
        drained
    }
}
