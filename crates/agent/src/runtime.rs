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
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_proto::Kind;
use forkd_proto::guest::{ErrorBody, ErrorCode, EvalReply, RuntimeState};
use forkd_proto::limits::EVAL_QUEUE_MAX;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use self::process::{Drained, HEARD_BYTES, Process};
use crate::child::{Ended, signal_one};
use crate::failure::{Outcome, failure, recoded};
use crate::image::Surroundings;
use crate::spawn::{self, Launcher};
use crate::stream::Stream;

mod process;
mod spec;

pub use spec::Spec;

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

/// The version of the contract with runtimes.
const CONTRACT: u64 = 1;

/// What is wrong with an answer to nothing.
const UNASKED: &str = "it sent an answer without a request";

/// The first request to an interpreter.
const HELLO: &[u8] = br#"{"op": "hello", "contract": 1}"#;

/// The request by which an interpreter is made cheap to fork.
pub const FREEZE: &[u8] = br#"{"op": "freeze"}"#;

/// What a job is for, and so who gets its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The first request to an interpreter: is it one?
    Hello,
    /// `eval`.
    Eval,
    /// `eval` with a context or variables, whose payload is that of a REQUEST.
    EvalIn,
    /// The warm-up's code.
    Warm,
    /// The end of the warm-up.
    Freeze,
    /// Reseeding after a fork.
    PostFork,
    /// The same, put off until the first job; nobody waits for it.
    Reseed,
}

impl Purpose {
    /// Whether it is code of a client's.
    pub fn is_eval(self) -> bool {
        matches!(self, Self::Eval | Self::EvalIn)
    }
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
    /// What was started, of whom, and where its script is.
    origin: Option<(Spec, Surroundings, PathBuf)>,
    /// Why it has ended, if nobody was told.
    untold: Option<ErrorBody>,
    /// What it has said that it knows.
    knows: Knows,
}

/// What a runtime can do that not every one can, as its answer to hello says.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(default)]
struct Knows {
    /// Evaluates in contexts.
    contexts: bool,
    /// Has variables for one evaluation.
    env: bool,
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
            knows: Knows::default(),
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
    /// `warm_up_failed`: the image has no such interpreter or user, or the kernel refused.
    pub fn start(
        &mut self,
        launcher: &mut Launcher,
        spec: &Spec,
        surroundings: &Surroundings,
        folder: &Path,
    ) -> Outcome<()> {
        let mut process = Process::start(launcher, spec, surroundings, folder)
            .map_err(recoded(ErrorCode::WarmUpFailed))?;
        process.stream.queue(Kind::Request, HELLO);
        self.process = Some(process);
        let purpose = Purpose::Hello;
        self.current = Some(Current { owner: None, purpose, deadline: None, interrupts: 0 });
        self.state = RuntimeState::Starting;
        (self.dormant, self.look_at, self.put_off) = (false, None, None);
        (self.namespace, self.untold) = (Namespace::Unmade, None);
        self.origin = Some((spec.clone(), surroundings.clone(), folder.to_owned()));
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
        if let Some(body) = self.untold.take() {
            return Err(failure(body.code, format!("{}; this code did not run", body.message)));
        }
        let Some((spec, surroundings, folder)) = self.origin.clone() else { return Ok(false) };
        let started = self.start(launcher, &spec, &surroundings, &folder);
        self.namespace = Namespace::Lost;
        started.map_err(recoded(ErrorCode::RuntimeFailed))?;
        if let Some(current) = &mut self.current {
            current.deadline = Some(now + RESTART_TIMEOUT);
        }
        Ok(true)
    }

    /// What an error calls it.
    pub fn title(&self) -> String {
        self.origin.as_ref().map_or_else(|| "the runtime".into(), |(spec, ..)| spec.title())
    }

    /// Returns if code for the runtime `name` is for this one.
    ///
    /// # Errors
    ///
    /// `no_runtime`: it is another one, or there is none.
    pub fn check_name(&self, name: &str) -> Outcome<()> {
        let found = match &self.origin {
            Some((spec, ..)) if spec.name == name => return Ok(()),
            Some((spec, ..)) => format!("its warm runtime is {}", spec.name),
            None => "it has no warm runtime".to_owned(),
        };
        let message = format!("there is no runtime '{name}' in this sandbox: {found}");
        Err(failure(ErrorCode::NoRuntime, message))
    }

    /// Returns if code can have a context, or variables of its own, in this runtime.
    ///
    /// # Errors
    ///
    /// `no_runtime`: it knows none.
    pub fn check_knows(&self, contexts: bool, env: bool) -> Outcome<()> {
        let lacks = match &self.process {
            Some(_) if contexts && !self.knows.contexts => "contexts",
            Some(_) if env && !self.knows.env => "variables for one evaluation",
            _ => return Ok(()),
        };
        Err(failure(ErrorCode::NoRuntime, format!("{} has no {lacks}", self.title())))
    }

    /// Whether it has yet to say that it is a runtime at all.
    pub fn is_mute(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.purpose == Purpose::Hello)
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
        self.refuse_unasked();
        self.start_next(now);
        Ok(())
    }

    /// Ends a runtime that has sent an answer to nothing, which would pass for that to its next
    /// job.  Python's are the agent's own.
    fn refuse_unasked(&mut self) {
        let idle = self.current.is_none() && self.answered.is_none();
        let is_python = self.origin.as_ref().is_none_or(|(spec, ..)| spec.is_python());
        let Some(process) = self.process.as_mut().filter(|_| idle && !is_python) else { return };
        process.stream.readable = true;
        if process.take_answer(&mut [0; HEARD_BYTES]).is_some() {
            process.break_off(UNASKED.to_owned());
        }
    }

    fn start_next(&mut self, now: Instant) {
        let (None, Some(process)) = (&self.current, &mut self.process) else { return };
        if process.broken.is_some() {
            return; // its end tells whoever waits
        }
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
        let Some((kind, payload)) = self.answered.take() else { return (None, false) };
        let Some(current) = self.current.take() else {
            process.break_off(UNASKED.to_owned());
            return (None, false);
        };
        let is_python = self.origin.as_ref().is_none_or(|(spec, ..)| spec.is_python());
        if let Some(what) = flaw(current.purpose, kind, &payload, is_python) {
            process.break_off(what);
            self.current = Some(current);
            return (None, false);
        }
        if current.purpose == Purpose::Hello {
            self.knows = serde_json::from_slice(&payload).unwrap_or_default();
        } else {
            self.state = RuntimeState::Ready;
        }
        match (current.purpose, kind) {
            // In place of one that died, whose warm-up does not run again.
            (Purpose::Hello, _) if self.namespace == Namespace::Lost => {
                process.stream.queue(Kind::Request, FREEZE);
                self.current = Some(Current { purpose: Purpose::Freeze, ..current });
                return (None, false);
            }
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
        if current.purpose.is_eval() && self.current.is_none() {
            self.look_at = Some(now + LOOK_AFTER);
        }
        let result = if kind == Kind::Reply {
            Ok(payload)
        } else {
            let unclear = |_| failure(ErrorCode::RuntimeBroken, "the runtime's answer is garbled");
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
        let broken = self.process.as_ref().is_some_and(|process| process.broken.is_some());
        let code = if broken { ErrorCode::RuntimeBroken } else { ErrorCode::RuntimeFailed };
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
        let failed: ErrorBody = failure(code, message);
        self.untold = (self.is_lost() && told.is_empty()).then(|| failed.clone());
        let answer = |(owner, purpose)| Answer { owner, purpose, result: Err(failed.clone()) };
        told.into_iter().map(answer).collect()
    }

    /// Why the interpreter has ended, and what that means for who uses it.
    fn end_reason(&mut self, current: Option<&Current>, ended: Ended) -> String {
        let title = self.title();
        let broken = self.process.as_mut().and_then(|process| process.broken.take());
        let verdict = self.process.as_mut().and_then(|process| process.verdict.as_mut());
        let reason = match (verdict.map(spawn::verdict), current) {
            _ if broken.is_some() => {
                let what = broken.unwrap_or_default();
                format!("{title} broke its contract, so it was ended: {what}")
            }
            (Some(spawn::Verdict::Failed(failed)), _) => failed.message,
            (_, Some(current)) if current.purpose == Purpose::Hello && current.interrupts == 0 => {
                format!("{title} has ended with {ended} before it said that it is one")
            }
            (_, Some(current)) if current.purpose == Purpose::Reseed => {
                format!("{title} could not reseed itself after the fork, so it was ended")
            }
            (_, Some(current)) if current.interrupts > 0 => {
                format!("the code could not be interrupted, so {title} was killed")
            }
            _ => cause(&title, ended),
        };
        match self.namespace {
            Namespace::Unmade => reason,
            Namespace::Warm | Namespace::Lost => format!(
                "{reason}; its namespace is lost, and the next evaluation starts with an empty one"
            ),
        }
    }
}

/// What is wrong with an answer, if anything is.
fn flaw(purpose: Purpose, kind: Kind, payload: &[u8], is_python: bool) -> Option<String> {
    let wrong = |what: &str, error: &dyn std::fmt::Display| Some(format!("{what}: {error}"));
    match (purpose, kind) {
        (Purpose::Hello, Kind::Reply) => {
            let said: Result<serde_json::Value, _> = serde_json::from_slice(payload);
            match said.as_ref().map(|said| said.get("contract")) {
                Ok(Some(version)) if *version == CONTRACT => None,
                Ok(Some(version)) => {
                    wrong("it speaks another version than 1 of the contract", version)
                }
                Ok(None) => Some("its answer to hello names no contract".to_owned()),
                Err(error) => wrong("its answer to hello is no JSON", error),
            }
        }
        (Purpose::Hello, _) => wrong("it refused hello", &String::from_utf8_lossy(payload)),
        // Python's answers are ours, and reading each would be work that nobody needs.
        (_, _) if is_python => None,
        (Purpose::Eval | Purpose::EvalIn, Kind::Reply) => {
            serde_json::from_slice::<EvalReply>(payload).err().and_then(|error| {
                wrong("its answer to an evaluation is not as it should be", &error)
            })
        }
        (_, Kind::Error) => serde_json::from_slice::<ErrorBody>(payload)
            .err()
            .and_then(|error| wrong("its error is not as it should be", &error)),
        (_, _) => None,
    }
}

/// What probably ended an interpreter, from the way it ended.
fn cause(title: &str, ended: Ended) -> String {
    let python = title == "the runtime";
    let hint = |text| if python { text } else { "" };
    let signal = match (ended.exit_code, ended.signal.map(Signal::try_from)) {
        (Some(code), _) => {
            return format!("{title} exited with status {code}{}", hint(", as by `os._exit`"));
        }
        (None, Some(Ok(signal))) => signal,
        (None, _) => return format!("{title} has ended with {ended}"),
    };
    match signal {
        Signal::SIGKILL => format!(
            "{title} was killed by SIGKILL: by a program in the guest, such as pkill, or by the \
             kernel because memory ran out"
        ),
        Signal::SIGSEGV | Signal::SIGBUS | Signal::SIGABRT | Signal::SIGILL | Signal::SIGFPE => {
            format!("{title} crashed with {signal}, as by endless recursion or in native code")
        }
        _ => format!("{title} was ended by {signal}, which the code or a program sent"),
    }
}

#[cfg(test)]
mod tests;
