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
//! # An interpreter that died
//!
//! Code can end its interpreter (`os._exit`, endless recursion), and so can other programs.
//! Whoever waits for it is told.  If nobody did, the next evaluation is refused once, because its
//! names are gone.  The one after that starts a new interpreter, in which the image's warm-up has
//! not run; so the image's `post_fork` code, which is for what the warm-up made, does not either.
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
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_proto::Kind;
use forkd_proto::guest::{ErrorBody, ErrorCode, RuntimeState};
use forkd_proto::limits::EVAL_QUEUE_MAX;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::child::{Ended, signal_group, signal_one};
use crate::exec::{output_pipe, unread_bytes};
use crate::failure::{Outcome, failure, recoded, refused};
use crate::image::Surroundings;
use crate::spawn::{self, Launch, Launcher, Standard};
use crate::stream::{BACKLOG_MAX, Stream};

/// Time between two SIGINTs to code that goes on.
pub const INTERRUPT_EVERY: Duration = Duration::from_secs(1);

/// SIGINTs before SIGKILL.
pub const INTERRUPTS_MAX: u32 = 5;

/// How long a new interpreter may take until it is ready, in place of one that died.
pub const RESTART_TIMEOUT: Duration = Duration::from_mins(1);

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

/// The request by which an interpreter is made cheap to fork.
pub const FREEZE: &[u8] = br#"{"op": "freeze"}"#;

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
    namespace: Namespace,
    /// Of whom it was started, and where its script is.
    origin: Option<(Surroundings, PathBuf)>,
    /// Why it has ended, if nobody was told.
    untold: Option<String>,
}

/// What became of the namespace that the image's warm-up has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Namespace {
    /// The warm-up has not ended yet.
    Unmade,
    /// The interpreter has it.
    Warm,
    /// Its interpreter has died; another one, with an empty namespace, takes its place when it is
    /// asked for.
    Lost,
}

#[derive(Debug)]
struct Process {
    pid: Pid,
    stream: Stream,
    outputs: [(Option<File>, Kind); 2],
    /// Bytes that were in each output when the answer came, and so have to go before it.
    rest: [u64; 2],
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
            namespace: Namespace::Unmade,
            origin: None,
            untold: None,
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
        (self.namespace, self.untold) = (Namespace::Unmade, None);
        self.origin = Some((surroundings.clone(), folder.to_owned()));
        Ok(())
    }

    /// Starts a new interpreter if one is needed before a job can be submitted; true if it was.
    ///
    /// # Errors
    ///
    /// `runtime_failed`: the last one has ended and nobody was told until now, or there can be no
    /// new one.
    pub fn restart_if_lost(&mut self, launcher: &mut Launcher, now: Instant) -> Outcome<bool> {
        if self.process.is_some() || self.namespace != Namespace::Lost {
            return Ok(false);
        }
        if let Some(reason) = self.untold.take() {
            let said = format!("{reason}; this code did not run");
            return Err(failure(ErrorCode::RuntimeFailed, said));
        }
        let Some((surroundings, folder)) = self.origin.take() else { return Ok(false) };
        let started = self.start(launcher, &surroundings, &folder);
        (self.namespace, self.origin) = (Namespace::Lost, Some((surroundings, folder)));
        started.map_err(recoded(ErrorCode::RuntimeFailed))?;
        if let Some(process) = &mut self.process {
            process.stream.queue(Kind::Request, FREEZE);
        }
        let deadline = Some(now + RESTART_TIMEOUT);
        let purpose = Purpose::Freeze;
        self.current = Some(Current { owner: None, purpose, deadline, interrupts: 0 });
        Ok(true)
    }

    /// Whether the namespace that the image's warm-up made is gone.
    pub fn is_lost(&self) -> bool {
        self.namespace == Namespace::Lost
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
        let current = self.current.as_ref().filter(|_| self.answered.is_none());
        current.and_then(|current| current.deadline).or(self.look_at)
    }

    /// Interrupts what has run too long, and looks at what has nothing to do.
    pub fn on_time(&mut self, now: Instant) {
        let Some(process) = &mut self.process else { return };
        if self.look_at.take_if(|at| *at <= now).is_some() {
            self.dormant = process.is_dormant();
        }
        // What has answered has ended, however long its client takes to read.
        let Some(current) = self.current.as_mut().filter(|_| self.answered.is_none()) else {
            return;
        };
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
    /// All output that was written before the answer goes before it, and what is written later does
    /// not hold it up.  Returns at most one answer; the next job has been sent then.  True: there
    /// may be more to move.
    pub fn drive(
        &mut self,
        client: Option<&mut Stream>,
        scratch: &mut [u8],
        now: Instant,
    ) -> (Option<Answer>, bool) {
        let Some(process) = &mut self.process else { return (None, false) };
        if self.answered.is_none() {
            self.answered = process.take_answer(scratch);
            if self.answered.is_some() {
                process.measure_rest();
            }
        }
        let drained = process.move_output(client, scratch, self.answered.is_some());
        if self.answered.is_none() || drained != Drained::Empty {
            return (None, drained == Drained::More);
        }
        let (Some((kind, payload)), Some(current)) = (self.answered.take(), self.current.take())
        else {
            return (None, false);
        };
        self.state = RuntimeState::Ready;
        match (current.purpose, kind) {
            (Purpose::Freeze, Kind::Reply) => {
                self.dormant = process.is_dormant();
                if self.namespace == Namespace::Unmade {
                    self.namespace = Namespace::Warm;
                }
            }
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

    /// Takes what an interpreter that has ended left in its outputs, and no more.
    pub fn move_last(&mut self, mut client: Option<&mut Stream>, scratch: &mut [u8]) {
        let Some(process) = &mut self.process else { return };
        process.measure_rest();
        while process.move_output(client.as_deref_mut(), scratch, true) == Drained::More {}
    }

    /// The outputs of an interpreter that has ended, which programs that it has started may go on
    /// writing to.
    pub fn leftovers(&mut self) -> Vec<Arc<File>> {
        let outputs = self.process.iter_mut().flat_map(|process| &mut process.outputs);
        outputs.filter_map(|(file, _)| file.take()).map(Arc::new).collect()
    }

    /// The interpreter has ended: so have all jobs.
    pub fn on_exit(&mut self, ended: Ended) -> Vec<Answer> {
        let current = self.current.take();
        let message = self.end_reason(current.as_ref(), ended);
        let first = current.and_then(|current| Some((current.owner?, current.purpose)));
        let waiting = self.queue.drain(..).map(|job| (job.owner, job.purpose));
        let told: Vec<(u32, Purpose)> = first.into_iter().chain(waiting).collect();
        self.state = RuntimeState::Failed;
        self.process = None;
        self.answered = None;
        (self.dormant, self.look_at, self.put_off) = (false, None, None);
        if self.namespace == Namespace::Warm {
            self.namespace = Namespace::Lost;
        }
        self.untold = (self.is_lost() && told.is_empty()).then(|| message.clone());
        let failed: ErrorBody = failure(ErrorCode::RuntimeFailed, message);
        let answer = |(owner, purpose)| Answer { owner, purpose, result: Err(failed.clone()) };
        told.into_iter().map(answer).collect()
    }

    /// Why the interpreter has ended, and what that means for who uses it.
    fn end_reason(&mut self, current: Option<&Current>, ended: Ended) -> String {
        let verdict = self.process.as_mut().and_then(|process| process.verdict.as_mut());
        let reason = match (verdict.map(spawn::verdict), current) {
            (Some(spawn::Verdict::Failed(failed)), _) => failed.message,
            (_, Some(current)) if current.purpose == Purpose::Reseed => {
                "the runtime could not reseed itself after the fork, so it was ended".to_owned()
            }
            (_, Some(current)) if current.interrupts > 0 => {
                "the code could not be interrupted, so the runtime was killed".to_owned()
            }
            _ => cause(ended),
        };
        match self.namespace {
            Namespace::Unmade => reason,
            Namespace::Warm | Namespace::Lost => format!(
                "{reason}; its namespace is lost, and the next evaluation starts with an empty one"
            ),
        }
    }
}

/// What probably ended an interpreter, from the way it ended.
fn cause(ended: Ended) -> String {
    let signal = match (ended.exit_code, ended.signal.map(Signal::try_from)) {
        (Some(code), _) => {
            return format!("the runtime exited with status {code}, as by `os._exit`");
        }
        (None, Some(Ok(signal))) => signal,
        (None, _) => return format!("the runtime has ended with {ended}"),
    };
    match signal {
        Signal::SIGKILL => "the runtime was killed by SIGKILL: by a program in the guest, such as \
                            pkill, or by the kernel because memory ran out"
            .to_owned(),
        Signal::SIGSEGV | Signal::SIGBUS | Signal::SIGABRT | Signal::SIGILL | Signal::SIGFPE => {
            format!("the runtime crashed with {signal}, as by endless recursion or in native code")
        }
        _ => format!("the runtime was ended by {signal}, which the code or a program sent"),
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
        let args = [
            "python3".into(),
            script.into_os_string().into(),
            theirs.as_raw_fd().to_string().into(),
        ];
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

    /// Notes how much is in the outputs now.
    fn measure_rest(&mut self) {
        for ((file, _), rest) in self.outputs.iter().zip(&mut self.rest) {
            *rest = file.as_ref().map_or(0, unread_bytes);
        }
    }

    /// Reads a buffer from each output; only from those that have some of their `rest`, if it is
    /// what counts.
    fn move_output(
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

#[cfg(test)]
mod tests;
