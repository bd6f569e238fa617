//! The children of a zygote: which are to be forked, which are alive, and what became of each.
//!
//! Every child of a request is reported exactly once, as ready or as failed.  One whose guest was
//! reset before its agent answered is forked again (ADR 0023).
//!
//! Decisions only: nothing here forks a process, sends a frame or removes a file.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forkd_proto::control::{Child, ErrorCode, Event, Fork, ForkMs, ForkReply};

use crate::control::socket::Token;
use crate::kvm::emulator;

/// Children of one zygote that may be on their way to ready at the same time, on a host with few
/// processors; the rest wait.
///
/// Such a host gains nothing from more, and each waits in the kernel a good part of its way, so it
/// is well above the number of processors.
pub const STARTING_MAX: usize = 64;
/// The same for each processor, on a host with many.
pub const STARTING_PER_PROCESSOR: usize = 2;
/// How often a child is forked whose guest is reset before its agent has answered, on a processor
/// that QEMU emulates: that resets one guest in some hundreds.  Others reset none, so there a
/// second attempt would only hide why, and serve who probes.
pub const ATTEMPTS_MAX: u32 = 3;

/// How often it is here.
#[must_use]
pub fn attempts_here() -> u32 {
    if emulator::is_here() { ATTEMPTS_MAX } else { 1 }
}

/// How many children may be on their way to ready at the same time, with so many processors.
#[must_use]
pub fn starting_max(processors: usize) -> usize {
    STARTING_MAX.max(processors.saturating_mul(STARTING_PER_PROCESSOR))
}

/// How many may be here.
#[must_use]
pub fn starting_max_here() -> usize {
    starting_max(std::thread::available_parallelism().map_or(1, NonZero::get))
}

/// One attempt to fork a child.
#[derive(Debug)]
pub(super) struct Birth {
    pub(super) child: Child,
    /// 1 for the first.
    pub(super) attempt: u32,
    /// For all attempts together, counted from the first clone.
    pub(super) deadline: Instant,
}

/// Why an attempt failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) stage: String,
    pub(super) code: ErrorCode,
    pub(super) message: String,
    /// Whether another attempt may succeed.
    pub(super) again: bool,
}

/// What the end of a process means.
#[derive(Debug)]
pub(super) enum Ended {
    /// A child that was ready has ended: for everybody to hear.
    Exited(Event),
    /// An attempt has failed, and the child waits to be forked again.
    Again { id: String, directory: PathBuf, attempt: u32, message: String },
    /// A child has failed: for whoever asked for it.
    Failed { directory: PathBuf, attempts: u32, token: Token, event: Event },
}

#[derive(Debug)]
struct Alive {
    birth: Birth,
    /// Whose request it belongs to, until it has been reported.
    batch: Option<u64>,
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Batch {
    token: Token,
    started: Instant,
    patience: Duration,
    /// Those that were never forked.
    waiting: VecDeque<Child>,
    /// Those that are to be forked again.
    again: VecDeque<Birth>,
    starting: usize,
    ready: u64,
    failed: u64,
}

/// All children of a zygote.
#[derive(Debug)]
pub(super) struct Children {
    /// How often each is forked that is reset.
    attempts_max: u32,
    /// How many may be on their way to ready.
    starting_max: usize,
    alive: BTreeMap<i32, Alive>,
    batches: BTreeMap<u64, Batch>,
    next_batch: u64,
}

impl Children {
    /// None, of which `starting_max` will start at the same time, each at most `attempts_max`
    /// times.
    pub(super) fn new(attempts_max: u32, starting_max: usize) -> Self {
        let (alive, batches) = (BTreeMap::new(), BTreeMap::new());
        Self { attempts_max, starting_max, alive, batches, next_batch: 0 }
    }

    /// Takes in a request.
    pub(super) fn accept(&mut self, token: Token, fork: Fork, now: Instant) {
        let batch = Batch {
            token,
            started: now,
            patience: Duration::from_secs_f64(fork.deadline_s),
            waiting: fork.children.into(),
            again: VecDeque::new(),
            starting: 0,
            ready: 0,
            failed: 0,
        };
        self.batches.insert(self.next_batch, batch);
        self.next_batch += 1;
    }

    /// The child to be forked next, and its request.  Say [`Self::started`] or
    /// [`Self::not_started`] of it.
    pub(super) fn next(&mut self, now: Instant) -> Option<(u64, Birth)> {
        if self.batches.values().map(|batch| batch.starting).sum::<usize>() >= self.starting_max {
            return None;
        }
        self.batches.iter_mut().find_map(|(number, batch)| {
            let first = |child| Birth { child, attempt: 1, deadline: now + batch.patience };
            let birth = batch.again.pop_front().or_else(|| batch.waiting.pop_front().map(first))?;
            Some((*number, birth))
        })
    }

    /// Process `pid` is to be that child.
    pub(super) fn started(&mut self, pid: i32, number: u64, birth: Birth) {
        if let Some(batch) = self.batches.get_mut(&number) {
            batch.starting += 1;
        }
        self.alive.insert(pid, Alive { birth, batch: Some(number), failure: None });
    }

    /// No process could be made for that child.  Returns what to tell whom.
    pub(super) fn not_started(
        &mut self,
        number: u64,
        birth: &Birth,
        failure: Failure,
    ) -> Option<(Token, Event)> {
        let batch = self.batches.get_mut(&number)?;
        batch.failed += 1;
        Some((batch.token, failed(birth, failure)))
    }

    /// A child's agent has answered.  Returns what to tell whom.
    pub(super) fn ready(&mut self, pid: i32, ms: ForkMs, ipv6: bool) -> Option<(Token, Event)> {
        let Alive { birth, batch, .. } = self.alive.get_mut(&pid)?;
        let batch = self.batches.get_mut(&batch.take()?)?;
        batch.starting -= 1;
        batch.ready += 1;
        let (id, attempts) = (birth.child.id.clone(), birth.attempt);
        Some((batch.token, Event::Ready { id, pid: pid.unsigned_abs(), ms, attempts, ipv6 }))
    }

    /// A child has said why it is about to end.
    pub(super) fn failing(&mut self, pid: i32, failure: Failure) {
        if let Some(child) = self.alive.get_mut(&pid) {
            child.failure = Some(failure);
        }
    }

    /// A process has ended; `None` if it was none of the children.
    pub(super) fn ended(&mut self, pid: i32, status: i32, now: Instant) -> Option<Ended> {
        let Alive { birth, batch, failure } = self.alive.remove(&pid)?;
        let Some(batch) = batch.and_then(|number| self.batches.get_mut(&number)) else {
            let (id, pid) = (birth.child.id, pid.unsigned_abs());
            return Some(Ended::Exited(Event::ChildExited { id, pid, status }));
        };
        batch.starting -= 1;
        let directory = birth.child.directory.clone();
        let failure = failure.unwrap_or_else(|| Failure {
            stage: "process".to_owned(),
            code: ErrorCode::Guest,
            message: unready(status),
            again: false,
        });
        if failure.again && birth.attempt < self.attempts_max && now < birth.deadline {
            let (id, attempt) = (birth.child.id.clone(), birth.attempt);
            batch.again.push_back(Birth { attempt: attempt + 1, ..birth });
            return Some(Ended::Again { id, directory, attempt, message: failure.message });
        }
        batch.failed += 1;
        let (attempts, token) = (birth.attempt, batch.token);
        Some(Ended::Failed { directory, attempts, token, event: failed(&birth, failure) })
    }

    /// Requests of which every child was reported, with their answers.
    pub(super) fn take_finished(&mut self, now: Instant) -> Vec<(Token, ForkReply)> {
        let done = |_: &u64, batch: &mut Batch| {
            batch.starting == 0 && batch.waiting.is_empty() && batch.again.is_empty()
        };
        let finished = self.batches.extract_if(.., done);
        finished
            .map(|(_, batch)| {
                let wall_ms = now.duration_since(batch.started).as_secs_f64() * 1e3;
                (batch.token, ForkReply { ready: batch.ready, failed: batch.failed, wall_ms })
            })
            .collect()
    }

    /// Which processes are alive, ready or not.
    #[cfg(feature = "captive")]
    pub(super) fn pids(&self) -> Vec<i32> {
        self.alive.keys().copied().collect()
    }

    /// Processes that are alive, ready or not.
    pub(super) fn alive(&self) -> u64 {
        self.alive.len() as u64
    }

    /// Children that were reported as ready, and are alive.
    pub(super) fn alive_and_ready(&self) -> u64 {
        self.alive.values().filter(|child| child.batch.is_none()).count() as u64
    }
}

/// Why a child that said nothing was never ready.
fn unready(status: i32) -> String {
    if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS {
        return "its VMM was killed by the filter before it was ready: its zygote's log names the \
                system call"
            .to_owned();
    }
    format!("its process ended before it was ready (status {status:#x})")
}

fn failed(birth: &Birth, failure: Failure) -> Event {
    let Failure { stage, code, message, again: _ } = failure;
    Event::Failed {
        id: Some(birth.child.id.clone()),
        stage: Some(stage),
        code,
        message,
        attempts: Some(birth.attempt),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE_S: f64 = 10.0;

    fn of(count: usize, now: Instant) -> Children {
        let child = |number| Child {
            id: format!("sb-{number}"),
            directory: "/run/m".into(),
            hostname: "h".into(),
            machine_id: "0".repeat(32),
            boot_id: "b".into(),
            uid: None,
            cgroup: None,
            network: None,
            guest_memory_bytes: None,
            top_limit_bytes: None,
            top_directory: None,
            top_reserve_bytes: 0,
        };
        let mut children = Children::new(ATTEMPTS_MAX, STARTING_MAX);
        let children_ = (0..count).map(child).collect();
        let fork = Fork { children: children_, users: None, deadline_s: PATIENCE_S };
        children.accept(1, fork, now);
        children
    }

    fn start(children: &mut Children, pid: i32, now: Instant) -> Option<Instant> {
        let (number, birth) = children.next(now)?;
        let deadline = birth.deadline;
        children.started(pid, number, birth);
        Some(deadline)
    }

    fn fail(children: &mut Children, pid: i32, again: bool, now: Instant) -> Ended {
        let (stage, code, message) = ("agent".into(), ErrorCode::Guest, "it was reset".into());
        children.failing(pid, Failure { stage, code, message, again });
        children.ended(pid, 256, now).unwrap()
    }

    fn attempts(ended: &Ended) -> Option<u32> {
        match ended {
            Ended::Failed { event: Event::Failed { attempts, .. }, .. } => *attempts,
            _ => None,
        }
    }

    #[test]
    fn a_child_whose_guest_was_reset_is_forked_again_when_its_process_has_ended() {
        let now = Instant::now();
        let mut children = of(1, now);
        start(&mut children, 1, now).unwrap();
        let (stage, code, message) = ("agent".into(), ErrorCode::Guest, "it was reset".into());

        children.failing(1, Failure { stage, code, message, again: true });
        assert!(children.next(now).is_none(), "its process is still there");
        assert!(matches!(children.ended(1, 256, now), Some(Ended::Again { attempt: 1, .. })));
        start(&mut children, 2, now).unwrap();

        let (token, event) = children.ready(2, ForkMs::default(), true).unwrap();
        assert!(matches!(
            (token, event),
            (1, Event::Ready { pid: 2, attempts: 2, ipv6: true, .. })
        ));
        let (_, reply) = children.take_finished(now).pop().unwrap();
        assert_eq!((reply.ready, reply.failed), (1, 0));
    }

    #[test]
    fn a_processor_that_nobody_emulates_gets_no_other_try() {
        let now = Instant::now();
        let mut children = Children { attempts_max: 1, ..of(1, now) };
        start(&mut children, 1, now).unwrap();
        assert_eq!(attempts(&fail(&mut children, 1, true, now)), Some(1));
    }

    #[test]
    fn a_child_that_is_reset_too_often_has_failed_and_a_refusal_is_final() {
        let now = Instant::now();
        let mut children = of(2, now);

        for pid in 1..=ATTEMPTS_MAX.cast_signed() {
            start(&mut children, pid, now).unwrap();
            let ended = fail(&mut children, pid, true, now);
            let last = pid == ATTEMPTS_MAX.cast_signed();
            assert_eq!(attempts(&ended), last.then_some(ATTEMPTS_MAX));
        }
        start(&mut children, 9, now).unwrap();
        assert_eq!(attempts(&fail(&mut children, 9, false, now)), Some(1));
        assert_eq!(children.take_finished(now)[0].1.failed, 2);
    }

    #[test]
    fn a_child_that_its_filter_killed_is_said_to_be() {
        let now = Instant::now();
        let mut children = of(2, now);
        start(&mut children, 1, now).unwrap();
        start(&mut children, 2, now).unwrap();
        let mut said = |pid, status| match children.ended(pid, status, now) {
            Some(Ended::Failed { event: Event::Failed { message, .. }, .. }) => message,
            other => panic!("{other:?}"),
        };

        assert!(said(1, libc::SIGSYS | 0x80).contains("by the filter"));
        assert_eq!(said(2, libc::SIGKILL), "its process ended before it was ready (status 0x9)");
    }

    #[test]
    fn all_attempts_have_one_deadline() {
        let now = Instant::now();
        let mut children = of(1, now);
        let first = start(&mut children, 1, now).unwrap();
        let later = now + Duration::from_secs(1);
        fail(&mut children, 1, true, later);

        assert_eq!(start(&mut children, 2, later), Some(first));
        let ended = fail(&mut children, 2, true, first);

        assert_eq!(attempts(&ended), Some(2), "there is no time left for a third");
    }

    #[test]
    fn two_children_of_each_processor_may_start_where_that_is_more_than_64() {
        assert_eq!([1, 32, 33, 192].map(starting_max), [64, 64, 66, 384]);
    }

    #[test]
    fn one_child_more_than_may_start_waits_for_another_to_be_ready_or_to_end() {
        let now = Instant::now();
        let mut children = of(STARTING_MAX + 2, now);
        let pids = 1..=i32::try_from(STARTING_MAX).unwrap();
        assert!(pids.clone().all(|pid| start(&mut children, pid, now).is_some()));

        assert!(children.next(now).is_none());
        children.ready(1, ForkMs::default(), false).unwrap();
        assert!(start(&mut children, 100, now).is_some() && children.next(now).is_none());
        assert!(matches!(children.ended(2, 9, now), Some(Ended::Failed { .. })));
        assert!(start(&mut children, 101, now).is_some());
        assert!(children.take_finished(now).is_empty());
        assert!(matches!(children.ended(1, 0, now), Some(Ended::Exited(_))));
    }
}
