//! The warm runtime: one persistent interpreter, and the queue before it.
//!
//! # Interruption
//!
//! An evaluation that takes too long, or whose client has gone, is told so on its socket and then
//! gets SIGINT, which Python turns into `KeyboardInterrupt`; the namespace survives.  Code may
//! swallow it, or sit in C code that never looks.  So SIGINT is repeated each [`INTERRUPT_EVERY`],
//! and after [`INTERRUPTS_MAX`] the interpreter is killed: the evaluation ends with
//! `runtime_failed`, the namespace is lost, and so says the message.
//!
//! # Reseeding when it is first used
//!
//! An interpreter that waits for a job and can do nothing by itself (no other thread, no signal
//! handler, no hook) need not be touched by a fork: it reseeds itself before the first job of the
//! child, and if it cannot, no job is ever run.  That is most of the memory that a fork would
//! touch, and a child that only runs commands never pays for it.  Whether that is so the kernel is
//! asked once an evaluation has been over for [`LOOK_AFTER`], and at a fork that comes before.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use forkd_proto::Kind;
use forkd_proto::guest::{ErrorBody, ErrorCode, RuntimeState};
use forkd_proto::limits::EVAL_QUEUE_MAX;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::child::{Ended, signal_group, signal_one};
use crate::exec::output_pipe;
use crate::failure::{Outcome, failure, recoded, refused};
use crate::image::Surroundings;
use crate::spawn::{self, Launch, Launcher, Standard};
use crate::stream::{BACKLOG_MAX, Stream};

/// Time between two SIGINTs to code that goes on.
pub const INTERRUPT_EVERY: Duration = Duration::from_secs(1);

/// SIGINTs before SIGKILL.
pub const INTERRUPTS_MAX: u32 = 5;

/// How long reseeding before the first job may take.
pub const RESEED_TIMEOUT: Duration = Duration::from_secs(30);

/// How long it has waited for its next job when it is looked at whether it is dormant: soon enough
/// that a machine that is branched between two jobs has been, late enough that no job waits for it.
const LOOK_AFTER: Duration = Duration::from_millis(100);

/// Bytes read at once from an interpreter that has nothing to say.
const HEARD_BYTES: usize = 64;

/// Most bytes that are read of a process' `status`.  What comes later is not seen, and a process
/// that says too late what is looked for is not taken for dormant.
const STATUS_BYTES_MAX: usize = 2048;

/// The signals that the script has a handler for, as a mask: SIGINT.
const CAUGHT: u64 = 1 << (Signal::SIGINT as u64 - 1);

const SCRIPT: &str = include_str!("../runtime/python.py");

/// What a job is for, and so who gets its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// `eval`.
    Eval,
    /// The warm-up's code.
    Warm,
    /// The end of the warm-up.
    Freeze,
    /// Reseeding after a fork.
    PostFork,
    /// The same, put off until the first job; nobody waits for it.
    Reseed,
}

/// One request to the interpreter.
#[derive(Debug)]
pub struct Job {
    /// The connection that waits for it.
    pub owner: u32,
    /// What it is for.
    pub purpose: Purpose,
    /// Code for [`Purpose::Eval`], otherwise the payload of a REQUEST frame.
    pub payload: Vec<u8>,
    /// From its start, not from when it was queued.
    pub timeout: Option<Duration>,
}

/// The end of a job.
#[derive(Debug)]
pub struct Answer {
    /// As in the [`Job`].
    pub owner: u32,
    /// As in the [`Job`].
    pub purpose: Purpose,
    /// Payload of the reply, or why there is none.
    pub result: Outcome<Vec<u8>>,
}

#[derive(Debug)]
struct Current {
    owner: Option<u32>,
    purpose: Purpose,
    deadline: Option<Instant>,
    interrupts: u32,
}

/// The interpreter and its queue; or neither, in an image that wants none.
#[derive(Debug)]
pub struct Runtime {
    state: RuntimeState,
    process: Option<Process>,
    current: Option<Current>,
    queue: VecDeque<Job>,
    answered: Option<(Kind, Vec<u8>)>,
    /// It could do nothing by itself when that was last looked at, and has done nothing since.
    dormant: bool,
    /// When to look at that before anybody asks: else each fork of this machine would.
    look_at: Option<Instant>,
    /// The request with which to reseed it before its next job.
    put_off: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Process {
    pid: Pid,
    stream: Stream,
    outputs: [(Option<File>, Kind); 2],
    verdict: Option<File>,
    /// What the kernel says of it; proc(5), `status`.  Kept open: a fork that had to look it up
    /// would touch more than twice as many pages of the kernel's.
    status: Option<File>,
    /// It has said that code of its own is to run in forks.
    hooked: bool,
}

impl Runtime {
    /// No interpreter.
    pub fn none() -> Self {
        let (state, queue) = (RuntimeState::None, VecDeque::new());
        Self {
            state,
            process: None,
            current: None,
            queue,
            answered: None,
            dormant: false,
            look_at: None,
            put_off: None,
        }
    }

    /// For `ping`.
    pub fn state(&self) -> RuntimeState {
        self.state
    }

    /// The interpreter's process.
    pub fn pid(&self) -> Option<Pid> {
        self.process.as_ref().map(|process| process.pid)
    }

    /// Starts the interpreter; `folder` gets its script.
    ///
    /// # Errors
    ///
    /// `warm_up_failed`: the image has no `python3`, or no such user, or the kernel refused.
    pub fn start(
        &mut self,
        launcher: &mut Launcher,
        surroundings: &Surroundings,
        folder: &Path,
    ) -> Outcome<()> {
        let process = Process::start(launcher, surroundings, folder);
        self.process = Some(process.map_err(recoded(ErrorCode::WarmUpFailed))?);
        self.state = RuntimeState::Starting;
        (self.dormant, self.look_at, self.put_off) = (false, None, None);
        Ok(())
    }

    /// Takes a `post_fork` request to be done before the next job, if nothing can happen in the
    /// interpreter until then.  False: it has to be done now.
    pub fn put_off(&mut self, request: &[u8]) -> bool {
        let dormant = self.process.is_some() && self.is_dormant();
        if dormant {
            self.put_off = Some(request.to_vec());
        }
        dormant
    }

    /// Whether nothing can happen in the interpreter until its next job; nothing can in none.
    pub fn is_dormant(&mut self) -> bool {
        let Some(process) = &mut self.process else { return true };
        let idle = self.current.is_none() && self.queue.is_empty();
        self.dormant = idle && (self.dormant || process.is_dormant());
        self.look_at = None;
        self.dormant
    }

    /// Everything that the poll loop must watch.
    pub fn descriptors(&self) -> Vec<&dyn AsFd> {
        let Some(process) = &self.process else { return Vec::new() };
        let mut all: Vec<&dyn AsFd> = vec![&process.stream];
        all.extend(
            process.outputs.iter().filter_map(|(file, _)| Some(file.as_ref()? as &dyn AsFd)),
        );
        all.extend(process.verdict.as_ref().map(|file| file as &dyn AsFd));
        all
    }

    /// The interpreter's socket, whose unsent bytes the poll loop may have to wait for.
    pub fn stream(&mut self) -> Option<&mut Stream> {
        self.process.as_mut().map(|process| &mut process.stream)
    }

    /// Queues a job, or starts it if the interpreter is idle.  After a fork nothing goes before
    /// [`Purpose::PostFork`].
    ///
    /// # Errors
    ///
    /// `no_runtime`, `runtime_failed` or `busy`.
    pub fn submit(&mut self, job: Job, now: Instant) -> Outcome<()> {
        match self.state {
            RuntimeState::None => {
                return Err(failure(ErrorCode::NoRuntime, "this image has no warm runtime"));
            }
            RuntimeState::Failed => {
                return Err(failure(ErrorCode::RuntimeFailed, "the runtime has ended"));
            }
            RuntimeState::Starting | RuntimeState::Ready => {}
        }
        if job.purpose == Purpose::PostFork {
            self.queue.push_front(job);
        } else if self.queue.len() >= EVAL_QUEUE_MAX {
            let waiting = format!("{EVAL_QUEUE_MAX} evaluations are waiting already");
            return Err(failure(ErrorCode::Busy, waiting));
        } else {
            self.queue.push_back(job);
        }
        self.start_next(now);
        Ok(())
    }

    fn start_next(&mut self, now: Instant) {
        let (None, Some(process)) = (&self.current, &mut self.process) else { return };
        self.look_at = None;
        if self.queue.front().is_some_and(|job| job.purpose != Purpose::PostFork) {
            self.dormant = false;
            if let Some(request) = self.put_off.take() {
                process.stream.queue(Kind::Request, &request);
                let deadline = Some(now + RESEED_TIMEOUT);
                let purpose = Purpose::Reseed;
                self.current = Some(Current { owner: None, purpose, deadline, interrupts: 0 });
                return;
            }
        }
        let Some(job) = self.queue.pop_front() else { return };
        // Code travels bare: most jobs are this one, and JSON around it would be taken off at once.
        let kind = if job.purpose == Purpose::Eval { Kind::Data } else { Kind::Request };
        process.stream.queue(kind, &job.payload);
        self.current = Some(Current {
            owner: Some(job.owner),
            purpose: job.purpose,
            deadline: job.timeout.map(|timeout| now + timeout),
            interrupts: 0,
        });
    }

    /// The connection whose job runs now.
    pub fn owner(&self) -> Option<u32> {
        self.current.as_ref().and_then(|current| current.owner)
    }

    /// `owner` has gone: its job is interrupted, or forgotten if it has not started.
    pub fn abandon(&mut self, owner: u32, now: Instant) {
        self.queue.retain(|job| job.owner != owner);
        if let Some(current) = self.current.as_mut().filter(|current| current.owner == Some(owner))
        {
            current.owner = None;
            current.deadline = Some(now);
        }
    }

    /// When to look after it even if nothing happens.
    pub fn wake_at(&self) -> Option<Instant> {
        let deadline = self.current.as_ref().and_then(|current| current.deadline);
        deadline.or(self.look_at)
    }

    /// Interrupts what has run too long, and looks at what has nothing to do.
    pub fn on_time(&mut self, now: Instant) {
        let Some(process) = &mut self.process else { return };
        if self.look_at.take_if(|at| *at <= now).is_some() {
            self.dormant = process.is_dormant();
        }
        let Some(current) = &mut self.current else { return };
        if current.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        if current.interrupts == INTERRUPTS_MAX {
            current.deadline = None;
            process.kill();
            return;
        }
        if current.interrupts == 0 {
            process.stream.queue(Kind::Control, br#"{"interrupt": true}"#);
        }
        current.interrupts += 1;
        current.deadline = Some(now + INTERRUPT_EVERY);
        // The message must be there before the signal is; what the socket cannot take now, the poll
        // loop sends.
        if let Err(error) = process.stream.flush() {
            crate::log::line(&format!("cannot reach the runtime: {error}"));
        }
        signal_one(process.pid, Signal::SIGINT);
    }

    /// Kills the interpreter; its end arrives as [`on_exit`](Self::on_exit).
    pub fn kill(&mut self) {
        if let Some(process) = &self.process {
            process.kill();
        }
    }

    /// Moves output to the client whose job runs (`None`: to nobody) and takes the interpreter's
    /// answer.
    ///
    /// All output that was written before the answer goes before it.  Returns at most one answer;
    /// the next job has been sent then.  True: there may be more to move.
    pub fn drive(
        &mut self,
        client: Option<&mut Stream>,
        scratch: &mut [u8],
        now: Instant,
    ) -> (Option<Answer>, bool) {
        let Some(process) = &mut self.process else { return (None, false) };
        if self.answered.is_none() {
            self.answered = process.take_answer(scratch);
        }
        let drained = process.move_output(client, scratch);
        if self.answered.is_none() || drained != Drained::Empty {
            return (None, drained == Drained::More);
        }
        let (Some((kind, payload)), Some(current)) = (self.answered.take(), self.current.take())
        else {
            return (None, false);
        };
        self.state = RuntimeState::Ready;
        match (current.purpose, kind) {
            (Purpose::Freeze, Kind::Reply) => self.dormant = process.is_dormant(),
            (Purpose::Reseed, Kind::Reply) => {}
            // What waits must never run with the state of its siblings: nothing is started any
            // more, and its end says why.
            (Purpose::Reseed, _) => {
                process.kill();
                self.current = Some(current);
                return (None, false);
            }
            _ => {}
        }
        self.start_next(now);
        if current.purpose == Purpose::Eval && self.current.is_none() {
            self.look_at = Some(now + LOOK_AFTER);
        }
        let result = if kind == Kind::Reply {
            Ok(payload)
        } else {
            let unclear = |_| failure(ErrorCode::RuntimeFailed, "the runtime's answer is garbled");
            Err(serde_json::from_slice(&payload).unwrap_or_else(unclear))
        };
        let answer = current.owner.map(|owner| Answer { owner, purpose: current.purpose, result });
        (answer, false)
    }

    /// The interpreter has ended: so have all jobs.
    pub fn on_exit(&mut self, ended: Ended) -> Vec<Answer> {
        let reason = self.end_reason(ended);
        let current = self.current.take();
        let killed = current.as_ref().is_some_and(|current| current.interrupts > 0);
        let unseeded = current.as_ref().is_some_and(|current| current.purpose == Purpose::Reseed);
        let first = current.and_then(|current| Some((current.owner?, current.purpose)));
        let waiting = self.queue.drain(..).map(|job| (job.owner, job.purpose));
        let message = if unseeded {
            "the runtime could not reseed itself after the fork, so it was ended".to_owned()
        } else if killed {
            "the code could not be interrupted, so the runtime was killed; its namespace is lost"
                .to_owned()
        } else {
            reason
        };
        self.state = RuntimeState::Failed;
        self.process = None;
        self.answered = None;
        (self.dormant, self.look_at, self.put_off) = (false, None, None);
        let failed: ErrorBody = failure(ErrorCode::RuntimeFailed, message);
        first
            .into_iter()
            .chain(waiting)
            .map(|(owner, purpose)| Answer { owner, purpose, result: Err(failed.clone()) })
            .collect()
    }

    fn end_reason(&mut self, ended: Ended) -> String {
        let verdict = self.process.as_mut().and_then(|process| process.verdict.as_mut());
        match verdict.map(spawn::verdict) {
            Some(spawn::Verdict::Failed(failed)) => failed.message,
            _ => format!("the runtime has ended with {ended}"),
        }
    }
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
enum Drained {
    /// Nothing is left.
    Empty,
    /// The client must read first.
    Full,
    /// There may be more.
    More,
}

impl Process {
    fn start(launcher: &mut Launcher, surroundings: &Surroundings, folder: &Path) -> Outcome<Self> {
        let no_start = |error: io::Error| refused("cannot start the runtime", &error);
        let script = folder.join("runtime.py");
        fs::write(&script, SCRIPT).map_err(no_start)?;
        let (ours, theirs) = UnixStream::pair().map_err(no_start)?;
        let theirs = OwnedFd::from(theirs);
        let (stdout, theirs_out) = output_pipe().map_err(no_start)?;
        let (stderr, theirs_err) = output_pipe().map_err(no_start)?;
        let args =
            ["python3".to_owned(), script.display().to_string(), theirs.as_raw_fd().to_string()];
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
        Ok(Self {
            pid,
            stream: Stream::new(ours.into()),
            outputs: [(Some(stdout), Kind::Stdout), (Some(stderr), Kind::Stderr)],
            verdict: started.verdict,
            status: File::open(format!("/proc/{pid}/status")).ok(),
            hooked: false,
        })
    }

    fn kill(&self) {
        signal_group(self.pid, Signal::SIGKILL);
    }

    /// The interpreter's answer, if it has come.  A broken socket is found out when the process
    /// ends.
    fn take_answer(&mut self, scratch: &mut [u8]) -> Option<(Kind, Vec<u8>)> {
        loop {
            match self.stream.next_frame() {
                Ok(Some((Kind::Control, _))) => {
                    self.hooked = true;
                    continue;
                }
                Ok(Some(frame)) => return Some(frame),
                Ok(None) => {}
                Err(error) => {
                    crate::log::line(&format!("the runtime breaks the protocol: {error}"));
                    self.kill();
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
    fn is_dormant(&mut self) -> bool {
        // Without a job it can have nothing else to say.
        drop(self.take_answer(&mut [0; HEARD_BYTES]));
        !self.hooked && self.status.as_ref().and_then(alone_and_quiet).unwrap_or(false)
    }

    fn move_output(&mut self, mut client: Option<&mut Stream>, scratch: &mut [u8]) -> Drained {
        let mut drained = Drained::Empty;
        for (slot, kind) in &mut self.outputs {
            let Some(file) = slot else { continue };
            if client.as_ref().is_some_and(|client| client.backlog() >= BACKLOG_MAX) {
                return Drained::Full;
            }
            match file.read(scratch) {
                Ok(0) => *slot = None,
                Ok(count) => {
                    if let Some(client) = client.as_deref_mut() {
                        client.queue(*kind, scratch.get(..count).unwrap_or_default());
                    }
                    drained = Drained::More;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    drained = Drained::More;
                }
                Err(_) => *slot = None,
            }
        }
        drained
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    const QUIET: &str = "Threads:\t1\nSigCgt:\t0000000000000002\n";
    const BUSY: &str = "Threads:\t2\nSigCgt:\t0000000000000002\n";

    /// A runtime that is ready, the interpreter's end of its socket, what the kernel says of it.
    fn ready() -> (Runtime, Stream, File) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let status = File::from(memfd_create("status", MFdFlags::empty()).unwrap());
        let process = Process {
            pid: Pid::from_raw(i32::MAX),
            stream: Stream::new(ours.into()),
            outputs: [(None, Kind::Stdout), (None, Kind::Stderr)],
            verdict: None,
            status: Some(status.try_clone().unwrap()),
            hooked: false,
        };
        let mut runtime = Runtime { process: Some(process), ..Runtime::none() };
        runtime.state = RuntimeState::Ready;
        (runtime, Stream::new(theirs.into()), status)
    }

    fn submit(runtime: &mut Runtime, purpose: Purpose, now: Instant) {
        runtime.submit(Job { owner: 1, purpose, payload: Vec::new(), timeout: None }, now).unwrap();
    }

    fn reply(runtime: &mut Runtime, interpreter: &mut Stream) {
        interpreter.wait_send(Kind::Reply, b"{}").unwrap();
        runtime.stream().unwrap().readable = true;
    }

    fn answer(runtime: &mut Runtime, now: Instant) -> Option<Answer> {
        runtime.drive(None, &mut [0; 64], now).0
    }

    /// One of which the kernel says so, and that has evaluated something until now.
    fn evaluated(said: &str, now: Instant) -> (Runtime, Stream, File) {
        let (mut runtime, mut interpreter, status) = ready();
        status.write_all_at(said.as_bytes(), 0).unwrap();
        submit(&mut runtime, Purpose::Eval, now);
        assert_eq!(runtime.wake_at(), None);
        reply(&mut runtime, &mut interpreter);
        assert!(answer(&mut runtime, now).is_some());
        (runtime, interpreter, status)
    }

    #[test]
    fn what_waits_for_its_next_job_is_looked_at_once_before_it_is_forked() {
        let now = Instant::now();
        let (mut runtime, _interpreter, status) = evaluated(QUIET, now);

        let due = runtime.wake_at().unwrap();
        runtime.on_time(due);

        assert_eq!((due, runtime.wake_at()), (now + LOOK_AFTER, None));
        // A fork believes what was seen then, and does not look again.
        status.write_all_at(BUSY.as_bytes(), 0).unwrap();
        assert!(runtime.put_off(b"{}"));
    }

    #[test]
    fn what_is_forked_before_it_was_looked_at_is_looked_at_once() {
        let (mut runtime, _interpreter, _) = evaluated(QUIET, Instant::now());

        assert!(runtime.put_off(b"{}"));

        assert_eq!(runtime.wake_at(), None);
    }

    #[test]
    fn what_has_its_next_job_already_is_not_looked_at() {
        let (mut runtime, mut interpreter, _) = ready();
        let now = Instant::now();
        submit(&mut runtime, Purpose::Eval, now);
        submit(&mut runtime, Purpose::Eval, now);

        reply(&mut runtime, &mut interpreter);
        assert!(answer(&mut runtime, now).is_some());

        assert_eq!(runtime.wake_at(), None);
    }

    #[test]
    fn what_got_a_job_meanwhile_is_not_looked_at() {
        for purpose in [Purpose::Eval, Purpose::PostFork] {
            let now = Instant::now();
            let (mut runtime, mut interpreter, _) = evaluated(BUSY, now);

            submit(&mut runtime, purpose, now);
            reply(&mut runtime, &mut interpreter);
            runtime.on_time(now + LOOK_AFTER);

            let answered = answer(&mut runtime, now);
            assert!(answered.is_some(), "the answer to {purpose:?} was lost");
        }
    }
}
