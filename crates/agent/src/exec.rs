//! `exec`: one process, its streams, its end.
//!
//! # When it is over
//!
//! The process has ended, and its output has been read to the end.  A process in the background may
//! hold the pipes open for ever, though.  So the answer waits until nothing has come for
//! [`DRAIN_GRACE`], at most [`DRAIN_MAX`] after the end of the process itself.  Of what is in the
//! pipes at that moment nothing is lost, and the answer says `truncated`.  Whatever else the
//! process has started lives on, as it would in a shell, and may go on writing: its pipes go to
//! [`sinks`](crate::sinks).  With a process that was cancelled or timed out all of that is killed.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_proto::Kind;
use forkd_proto::guest::{Control, ErrorBody, ErrorCode, Exec as Request, ExecReply, WindowSize};
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::{Pid, pipe2};

use crate::child::{Ended, Process, signal_group};
use crate::failure::{Outcome, failure, refused};
use crate::image::Defaults;
use crate::spawn::{self, Launch, Launcher, Standard};
use crate::stream::{BACKLOG_MAX, Stream};
use crate::terminal;

/// How long after the end of the process, and after each output since, more is waited for.
pub const DRAIN_GRACE: Duration = Duration::from_millis(200);

/// How long after the end of the process its output is waited for at most.
pub const DRAIN_MAX: Duration = Duration::from_secs(2);

/// Unwritten bytes of standard input from which on the client is read no further.
const STDIN_MAX: usize = 256 << 10;

/// Most bytes taken from one stream once the grace is over: the largest capacity that a pipe has
/// unless somebody raises the kernel's limit (`pipe-max-size`), and so all that was in it.
const LAST_BYTES_MAX: u64 = 1 << 20;

/// One process with its streams.
#[derive(Debug)]
pub struct Exec {
    process: Process,
    started: Instant,
    deadline: Option<Instant>,
    /// Until a staged process has become the program.
    verdict: Option<File>,
    stdin: Option<Arc<File>>,
    stdin_queue: Vec<u8>,
    stdin_eof: bool,
    outputs: [Option<Output>; 2],
    /// The end of its input, if that is a terminal.
    terminal: Option<terminal::End>,
    ended: Option<(Ended, Instant)>,
    /// When output came last since the end.
    heard_at: Option<Instant>,
    timed_out: bool,
}

#[derive(Debug)]
struct Output {
    file: Arc<File>,
    kind: Kind,
}

/// What comes of driving an [`Exec`].
#[derive(Debug)]
pub enum Progress {
    /// It waits for something.
    Waiting,
    /// It could go on at once, were it not for the others.
    More,
    /// It is over.
    Done(Outcome<ExecReply>),
}

impl Exec {
    /// Starts the process.
    ///
    /// # Errors
    ///
    /// As [`Launcher::launch`].
    pub fn start(
        launcher: &mut Launcher,
        request: &Request,
        defaults: &Defaults,
        now: Instant,
    ) -> Outcome<Self> {
        let surroundings =
            defaults.surroundings(&request.env, request.cwd.as_ref(), request.user.as_deref());
        let no_pipe = |error: io::Error| refused("cannot make a pipe", &error);
        let Plumbing { standard, stdin, outputs, end } = match request.tty {
            Some(size) => terminal(size).map_err(no_pipe)?,
            None => pipes(request.stdin).map_err(no_pipe)?,
        };
        let tty = request.tty.is_some();
        let args = &request.args;
        let started = launcher.launch(Launch {
            args,
            surroundings: &surroundings,
            standard,
            tty,
            keep: None,
        })?;
        Ok(Self {
            process: started.process,
            started: now,
            deadline: request.timeout_s.map(|s| now + forkd_proto::guest::timeout(s)),
            verdict: started.verdict,
            stdin,
            stdin_queue: Vec::new(),
            stdin_eof: false,
            outputs,
            terminal: end,
            ended: None,
            heard_at: None,
            timed_out: false,
        })
    }

    /// The process.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// Whether the program runs, as far as is known.
    pub fn is_running(&self) -> bool {
        self.verdict.is_none()
    }

    /// Everything that the poll loop must watch for it.
    pub fn descriptors(&self) -> Vec<&File> {
        let outputs = self.outputs.iter().flatten().map(|output| output.file.as_ref());
        // The terminal is one descriptor for both directions.
        let stdin = self.stdin.as_deref().filter(|_| self.terminal.is_none());
        self.verdict.as_ref().into_iter().chain(stdin).chain(outputs).collect()
    }

    /// When to drive it even if nothing happens.  A client that is `blocked` has to read before
    /// anything can be done about output, and that is an event.
    pub fn wake_at(&self, blocked: bool) -> Option<Instant> {
        if let Some(at) = self.drained_at() {
            return Some(at).filter(|_| !blocked);
        }
        let end = self.terminal.as_ref().and_then(terminal::End::due);
        self.deadline.filter(|_| !self.timed_out).into_iter().chain(end).min()
    }

    /// When output is waited for no longer, once the process has ended.
    fn drained_at(&self) -> Option<Instant> {
        let (_, ended_at) = self.ended?;
        let heard_at = self.heard_at.unwrap_or(ended_at);
        Some((heard_at + DRAIN_GRACE).min(ended_at + DRAIN_MAX))
    }

    /// Whether it takes more frames from its client.
    pub fn wants_input(&self) -> bool {
        self.stdin_queue.len() < STDIN_MAX
    }

    /// Its process has ended.
    pub fn on_exit(&mut self, ended: Ended, now: Instant) {
        self.ended = Some((ended, now));
    }

    /// Takes one frame from the client.
    ///
    /// # Errors
    ///
    /// What makes the frame unacceptable.
    pub fn on_frame(&mut self, kind: Kind, payload: &[u8]) -> Outcome<()> {
        match kind {
            Kind::Stdin if self.stdin.is_some() => self.stdin_queue.extend_from_slice(payload),
            Kind::StdinEof => self.stdin_eof = true,
            // To a process that has closed its input, or never had one.
            Kind::Stdin => {}
            Kind::Control => self.on_control(Control::parse(payload)?),
            _ => return Err(failure(ErrorCode::Protocol, format!("{kind:?} during exec"))),
        }
        Ok(())
    }

    fn on_control(&self, control: Control) {
        match control {
            Control::Signal(number) => match Signal::try_from(number) {
                Ok(signal) if self.ended.is_none() => signal_group(self.pid(), signal),
                _ => {}
            },
            Control::Resize(size) => {
                if let Some(terminal) = self.stdin.as_ref().filter(|_| self.terminal.is_some())
                    && let Err(error) = terminal::resize(terminal, size)
                {
                    crate::log::line(&format!("cannot resize a terminal: {error}"));
                }
            }
        }
    }

    /// Kills the process and all that it has started, unless it has ended by itself.
    pub fn cancel(&self) {
        if self.ended.is_none() {
            self.process.kill_all();
        }
    }

    /// The pipes that somebody may go on writing to, now that the process has ended.  A terminal is
    /// not among them: it hangs up.
    pub fn leftovers(&mut self) -> Vec<Arc<File>> {
        if self.ended.is_none() || self.terminal.is_some() {
            return Vec::new();
        }
        self.outputs.iter_mut().filter_map(Option::take).map(|output| output.file).collect()
    }

    /// Moves bytes in both directions as far as they go without waiting.
    pub fn drive(&mut self, stream: &mut Stream, scratch: &mut [u8], now: Instant) -> Progress {
        let late = self.deadline.is_some_and(|deadline| now >= deadline);
        if late && self.ended.is_none() && !self.timed_out {
            self.timed_out = true;
            self.cancel();
        }
        if self.verdict.is_some() {
            // Even if it runs now: the client is told before it gets any output.
            return self
                .read_verdict()
                .map_or(Progress::Waiting, |failed| Progress::Done(Err(failed)));
        }
        self.write_stdin(now);
        let more = self.read_outputs(stream, scratch);
        if more && self.ended.is_some() {
            self.heard_at = Some(now);
        }
        let drained = self.drained_at().is_some_and(|at| now >= at);
        match self.ended {
            Some((ended, at)) if self.outputs.iter().all(Option::is_none) => self.over(ended, at),
            Some((ended, at)) if drained && stream.backlog() < BACKLOG_MAX => {
                self.read_last(stream, scratch);
                self.over(ended, at)
            }
            _ if more => Progress::More,
            _ => Progress::Waiting,
        }
    }

    fn over(&self, ended: Ended, at: Instant) -> Progress {
        Progress::Done(Ok(ExecReply {
            exit_code: ended.exit_code,
            signal: ended.signal,
            timed_out: self.timed_out,
            duration_s: at.duration_since(self.started).as_secs_f64(),
            truncated: self.outputs.iter().any(Option::is_some),
        }))
    }

    /// Whether a staged process has failed; forgets the verdict once it is good.
    fn read_verdict(&mut self) -> Option<ErrorBody> {
        let verdict = self.verdict.as_mut()?;
        match spawn::verdict(verdict) {
            spawn::Verdict::Pending => None,
            spawn::Verdict::Running => {
                self.verdict = None;
                None
            }
            spawn::Verdict::Failed(failed) => Some(failed),
        }
    }

    fn write_stdin(&mut self, now: Instant) {
        let Some(stdin) = &self.stdin else {
            self.stdin_queue.clear();
            return;
        };
        while !self.stdin_queue.is_empty() {
            match stdin.as_ref().write(&self.stdin_queue) {
                Ok(count) => drop(self.stdin_queue.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // It has closed its input; that is its right.
                Err(_) => {
                    self.stdin = None;
                    self.stdin_queue.clear();
                    return;
                }
            }
        }
        let ends = std::mem::take(&mut self.stdin_eof);
        match &mut self.terminal {
            Some(end) => {
                if ends {
                    end.begin(now);
                }
                end.type_to(stdin, now);
            }
            None if ends => self.stdin = None,
            None => {}
        }
    }

    /// Reads a buffer from each output; true if there may be more.
    fn read_outputs(&mut self, stream: &mut Stream, scratch: &mut [u8]) -> bool {
        let mut more = false;
        for slot in &mut self.outputs {
            let Some(output) = slot else { continue };
            if stream.backlog() >= BACKLOG_MAX {
                // Goes on when the client has read, which is an event of its own.
                return false;
            }
            match output.file.as_ref().read(scratch) {
                Ok(0) => *slot = None,
                Ok(count) => {
                    stream.queue(output.kind, scratch.get(..count).unwrap_or_default());
                    more = true;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => more = true,
                // A terminal whose last user has gone says so with EIO.
                Err(_) => *slot = None,
            }
        }
        more
    }

    /// Takes what is in the pipes now, and no more.
    fn read_last(&mut self, stream: &mut Stream, scratch: &mut [u8]) {
        for slot in &mut self.outputs {
            let Some(output) = slot else { continue };
            let mut left = unread_bytes(&output.file).min(LAST_BYTES_MAX);
            while left > 0 {
                let Ok(count @ 1..) = output.file.as_ref().read(scratch) else { break };
                stream.queue(output.kind, scratch.get(..count).unwrap_or_default());
                left = left.saturating_sub(count as u64);
            }
            if left == 0 && is_closed(&output.file) {
                *slot = None;
            }
        }
    }
}

/// Bytes that can be read from a pipe now.
pub fn unread_bytes(pipe: &File) -> u64 {
    rustix::io::ioctl_fionread(pipe).unwrap_or(0)
}

/// Whether nobody can write to an output any more, and all of it has been read.
fn is_closed(output: &File) -> bool {
    let mut fds = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
    let polled = poll(&mut fds, PollTimeout::ZERO);
    let [fd] = fds;
    polled.is_ok() && fd.revents() == Some(PollFlags::POLLHUP)
}

struct Plumbing {
    standard: Standard,
    stdin: Option<Arc<File>>,
    outputs: [Option<Output>; 2],
    end: Option<terminal::End>,
}

fn pipes(with_stdin: bool) -> io::Result<Plumbing> {
    let (stdout, theirs_out) = output_pipe()?;
    let (stderr, theirs_err) = output_pipe()?;
    let (stdin, theirs_in) = if with_stdin {
        let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
        spawn::set_nonblocking(&write)?;
        (Some(Arc::new(File::from(write))), Stdio::from(read))
    } else {
        (None, Stdio::null())
    };
    let output = |file, kind| Some(Output { file: Arc::new(file), kind });
    Ok(Plumbing {
        standard: Standard {
            stdin: theirs_in,
            stdout: Stdio::from(theirs_out),
            stderr: Stdio::from(theirs_err),
        },
        stdin,
        outputs: [output(stdout, Kind::Stdout), output(stderr, Kind::Stderr)],
        end: None,
    })
}

/// A pipe whose reading end never waits.
///
/// # Errors
///
/// Too many descriptors are open.
pub fn output_pipe() -> io::Result<(File, OwnedFd)> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC)?;
    spawn::set_nonblocking(&read)?;
    Ok((File::from(read), write))
}

fn terminal(size: WindowSize) -> io::Result<Plumbing> {
    let (master, slave, end) = terminal::open(size)?;
    let master = Arc::new(master);
    let standard = Standard {
        stdin: Stdio::from(slave.try_clone()?),
        stdout: Stdio::from(slave.try_clone()?),
        stderr: Stdio::from(slave),
    };
    let output = Output { file: Arc::clone(&master), kind: Kind::Stdout };
    Ok(Plumbing { standard, stdin: Some(master), outputs: [Some(output), None], end: Some(end) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::fcntl::{FcntlArg, fcntl};

    use super::*;

    /// A process that ended at `now`, and what still writes to its output.
    fn ended(now: Instant) -> (Exec, File, Stream) {
        let (read, write) = output_pipe().unwrap();
        let exit = Ended { exit_code: Some(0), signal: None };
        let exec = Exec {
            process: Process::new(Pid::from_raw(i32::MAX), None),
            started: now,
            deadline: None,
            verdict: None,
            stdin: None,
            stdin_queue: Vec::new(),
            stdin_eof: false,
            outputs: [Some(Output { file: Arc::new(read), kind: Kind::Stdout }), None],
            terminal: None,
            ended: Some((exit, now)),
            heard_at: None,
            timed_out: false,
        };
        (exec, write.into(), Stream::new(UnixStream::pair().unwrap().0.into()))
    }

    #[test]
    fn what_was_in_a_large_pipe_when_the_grace_ended_is_not_lost() {
        let now = Instant::now();
        let (mut exec, mut write, mut stream) = ended(now);
        fcntl(&write, FcntlArg::F_SETPIPE_SZ(1 << 20)).unwrap();
        write.write_all(&vec![7; 1 << 20]).unwrap();

        let progress = exec.drive(&mut stream, &mut [0; 4096], now + DRAIN_MAX);

        assert!(stream.backlog() >= 1 << 20, "{} bytes", stream.backlog());
        assert!(matches!(progress, Progress::Done(Ok(ExecReply { truncated: true, .. }))));
    }

    #[test]
    fn each_output_after_the_end_is_waited_for_anew_and_not_for_ever() {
        let now = Instant::now();
        let (mut exec, mut write, mut stream) = ended(now);
        let mut drive = |at| exec.drive(&mut stream, &mut [0; 64], at);
        let mut at = now;
        while at < now + DRAIN_MAX {
            write.write_all(b"x").unwrap();
            assert!(matches!(drive(at), Progress::More), "{:?}", at - now);
            at += DRAIN_GRACE.mul_f64(0.9);
            if at < now + DRAIN_MAX {
                assert!(matches!(drive(at), Progress::Waiting), "{:?}", at - now);
            }
        }

        assert!(matches!(drive(at), Progress::Done(Ok(ExecReply { truncated: true, .. }))));
    }

    #[test]
    fn output_that_was_closed_meanwhile_is_whole() {
        let now = Instant::now();
        let (mut exec, mut write, mut stream) = ended(now);
        write.write_all(b"last").unwrap();
        drop(write);

        let progress = exec.drive(&mut stream, &mut [0; 64], now + DRAIN_MAX);

        assert!(matches!(progress, Progress::Done(Ok(ExecReply { truncated: false, .. }))));
    }
}
