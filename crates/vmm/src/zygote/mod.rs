//! A zygote: one process that holds a snapshot, and forks machines from it.
//!
//! It has one thread, verifies and parses everything once, and never touches the
//! guest's memory that it maps; so a `clone3` of it is a machine's memory, ready.
//! A child builds its VM, resumes, and reports through a pipe when its agent has
//! answered.  Children do not depend on the zygote afterwards, but for going back: those of
//! a seed read their fork point in it, so one that is retired holds its memory until the last of
//! them has ended.
//!
//! Partial failure: every child of a request is reported exactly once, as ready or
//! as failed; a child that dies without a word is reported by its exit.  Of a
//! failed child no process and no file in its folder remains.
//!
//! A guest that ends before its agent has answered is forked once more: that is no refusal, it has
//! done nothing anybody saw, and an emulated processor loses one guest in some hundreds (ADR 0013).

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_proto::control::{
    Child, ErrorCode, Event, Fork, ForkMs, ForkReply, ZygoteConfig, ZygoteRequest, ZygoteStatus,
};
use forkd_proto::frame::Kind;
use serde_json::json;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::control::server::{self, Server};
use crate::control::socket::{Control, Token};
use crate::error::Error;
use crate::fork::plan::ForkPlan;
use crate::io::bus::End;
use crate::sys::descriptors;
use crate::sys::process::{self, Forked};

/// Children of one zygote that may be on their way to ready at the same time; the rest wait.
///
/// A host with few processors gains nothing from more, and each waits in the kernel a good part of
/// its way, so it is well above the number of processors.
pub const STARTING_MAX: usize = 64;
/// How often a child is forked whose guest ends before its agent has answered.
pub const ATTEMPTS_MAX: u32 = 3;
/// What a seed is called once it only holds memory: a daemon that comes later lets it be.
const RETIRED_NAME: &std::ffi::CStr = c"forkd-seed";
/// Why a machine ended, in its folder.
const LOG_FILE: &str = "vmm.log";
/// Files that a machine may have made in its folder before it failed.
const MACHINE_FILES: [&str; 5] =
    ["control.sock", "vsock.sock", "console.log", "console.log.1", "disk.top"];

const TAG_CONTROL: u64 = 1 << 32;
const TAG_REPORTS: u64 = 2 << 32;
const TAG_CHILDREN: u64 = 3 << 32;
const TAG_MASK: u64 = !0 << 32;

mod help;
mod report;
pub mod seed;

use help::{Helper, Task};
use report::{REPORT_BYTES_MAX, Report};

#[derive(Debug)]
struct Alive {
    child: Child,
    attempt: u32,
    /// Whose request it belongs to, until it has been reported.
    batch: Option<u64>,
}

#[derive(Debug)]
struct Batch {
    token: Token,
    started: Instant,
    deadline: Duration,
    waiting: VecDeque<(Child, u32)>,
    starting: usize,
    ready: u64,
    failed: u64,
}

/// The zygote's process.
#[derive(Debug)]
pub struct Zygote {
    plan: Arc<ForkPlan>,
    helpers: BTreeMap<i32, Helper>,
    epoll: Arc<Epoll>,
    control: Control,
    reports: (File, File),
    buffer: Vec<u8>,
    signals: File,
    children: BTreeMap<i32, Alive>,
    batches: BTreeMap<u64, Batch>,
    next_batch: u64,
    stopping: bool,
    /// Its children's memory is to be held after that.
    retiring: bool,
}

impl Zygote {
    /// Loads the snapshot and listens at `zygote.sock`.
    ///
    /// # Errors
    ///
    /// Those of [`ForkPlan::load`]; [`Error::Io`].
    pub fn start(config: &ZygoteConfig) -> Result<Self, Error> {
        Self::serve(ForkPlan::load(config)?, &config.directory)
    }

    /// Listens at `zygote.sock` in `directory`, to fork what `plan` says.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn serve(plan: ForkPlan, directory: &Path) -> Result<Self, Error> {
        descriptors::raise_file_limit();
        let epoll = Arc::new(Epoll::new().map_err(Error::io("epoll_create1"))?);
        let reports = descriptors::pipe()?;
        let signals = process::child_signals()?;
        for (fd, tag) in [(reports.0.as_raw_fd(), TAG_REPORTS), (signals.as_raw_fd(), TAG_CHILDREN)]
        {
            let event = EpollEvent::new(EventSet::IN, tag);
            epoll.ctl(ControlOperation::Add, fd, event).map_err(Error::io("epoll_ctl"))?;
        }
        let control = Control::listen(&directory.join("zygote.sock"), &epoll, TAG_CONTROL)?;
        Ok(Self {
            plan: Arc::new(plan),
            helpers: BTreeMap::new(),
            epoll,
            control,
            reports,
            buffer: Vec::new(),
            signals,
            children: BTreeMap::new(),
            batches: BTreeMap::new(),
            next_batch: 0,
            stopping: false,
            retiring: false,
        })
    }

    /// Serves requests until told to stop.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the poll loop breaks.
    pub fn run(mut self) -> Result<(), Error> {
        let mut events = [EpollEvent::default(); 32];
        while !self.stopping {
            let count = match self.epoll.wait(-1, &mut events) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                waited => waited.map_err(Error::io("epoll_wait"))?,
            };
            for event in &events[..count] {
                let token = u32::try_from(event.data() & !TAG_MASK).unwrap_or(0);
                match event.data() & TAG_MASK {
                    TAG_CONTROL => self.on_control(token),
                    TAG_REPORTS => self.read_reports()?,
                    TAG_CHILDREN => self.reap()?,
                    _ => {}
                }
            }
            self.fork_waiting();
        }
        self.control.unlink();
        for (pid, helper) in &self.helpers {
            process::kill(*pid);
            helper.task.undo();
        }
        if self.retiring {
            hold_on()?;
        }
        Ok(())
    }

    fn on_control(&mut self, token: Token) {
        for request in self.control.on_socket(token) {
            match ZygoteRequest::parse(&request) {
                Err(error) => {
                    self.control.answer::<()>(token, Err(error.into()));
                }
                Ok(ZygoteRequest::Status) => {
                    let status = self.status();
                    self.control.answer(token, Ok(status));
                }
                Ok(ZygoteRequest::Stop) => {
                    self.stopping = true;
                    self.control.answer(token, Ok(json!({})));
                }
                Ok(ZygoteRequest::Retire) => {
                    self.stopping = true;
                    self.retiring = self.plan.is_live();
                    let mut held = 0;
                    // Before the answer: whoever has it may look for the name, or at the folder.
                    if self.retiring {
                        held = self.ready_children();
                        process::rename(RETIRED_NAME);
                    }
                    self.control.unlink();
                    self.control.answer(token, Ok(json!({"children": held})));
                }
                Ok(ZygoteRequest::Fork(fork)) => self.accept(token, fork),
                Ok(ZygoteRequest::Save(save)) => self.help(token, Task::Save(save)),
                Ok(ZygoteRequest::Derive(derive)) => self.help(token, Task::Derive(derive)),
            }
        }
    }

    fn status(&self) -> ZygoteStatus {
        let (memory_bytes, vcpus) = self.plan.size();
        ZygoteStatus {
            pid: std::process::id(),
            children: self.children.len() as u64,
            memory_bytes,
            vcpus,
            resident_bytes: self.plan.ram().resident_bytes(),
        }
    }

    fn ready_children(&self) -> u64 {
        self.children.values().filter(|child| child.batch.is_none()).count() as u64
    }

    fn accept(&mut self, token: Token, fork: Fork) {
        let batch = Batch {
            token,
            started: Instant::now(),
            deadline: Duration::from_secs_f64(fork.deadline_s),
            waiting: fork.children.into_iter().map(|child| (child, 1)).collect(),
            starting: 0,
            ready: 0,
            failed: 0,
        };
        self.batches.insert(self.next_batch, batch);
        self.next_batch += 1;
    }

    /// Starts children that wait, as far as [`STARTING_MAX`] allows, and ends finished batches.
    fn fork_waiting(&mut self) {
        let mut starting: usize = self.batches.values().map(|batch| batch.starting).sum();
        for number in self.batches.keys().copied().collect::<Vec<_>>() {
            while starting < STARTING_MAX {
                let next = self
                    .batches
                    .get_mut(&number)
                    .and_then(|batch| batch.waiting.pop_front().map(|next| (next, batch.deadline)));
                let Some(((child, attempt), deadline)) = next else { break };
                starting += usize::from(self.fork_one(number, child, attempt, deadline));
            }
            self.finish(number);
        }
    }

    /// Forks one child.  Returns whether it is on its way.
    fn fork_one(&mut self, number: u64, child: Child, attempt: u32, deadline: Duration) -> bool {
        let cloned = Instant::now();
        let cgroup = child.cgroup.as_deref().map(process::open_cgroup).transpose();
        match cgroup.and_then(|cgroup| process::fork_into(cgroup.as_ref())) {
            Ok(Forked::Child) => self.become_machine(&child, cloned, cloned + deadline),
            Ok(Forked::Parent(pid)) => {
                self.children.insert(pid, Alive { child, attempt, batch: Some(number) });
                if let Some(batch) = self.batches.get_mut(&number) {
                    batch.starting += 1;
                }
                true
            }
            Err(error) => {
                let (code, message) = (error.code(), error.to_string());
                self.report_failed(number, child.id, "clone", code, message);
                false
            }
        }
    }

    /// In the child: the machine's whole life.
    fn become_machine(&self, child: &Child, cloned: Instant, deadline: Instant) -> ! {
        let mut ms = ForkMs { clone: since(cloned), ..ForkMs::default() };
        let mut stage = "prepare";
        match self.make(child, deadline, cloned, &mut ms, &mut stage) {
            Ok(server) => {
                let pid = std::process::id().cast_signed();
                if self.send_report(Report::Ready { pid, ms }).is_err() {
                    remove_files(&child.directory);
                    process::exit_now(1);
                }
                let end = server.run();
                // Standard error is the zygote's log; who asks about a machine looks in its folder.
                drop(std::fs::write(child.directory.join(LOG_FILE), format!("{end}\n")));
                process::exit_now(i32::from(matches!(end, End::Error(_))));
            }
            Err(error) => {
                remove_files(&child.directory);
                let pid = std::process::id().cast_signed();
                let (stage, code, message) = (stage.to_owned(), error.code(), error.to_string());
                let again = matches!(error, Error::GuestEnded(_));
                drop(self.send_report(Report::Failed { pid, stage, code, message, again }));
                process::exit_now(1);
            }
        }
    }

    fn make(
        &self,
        child: &Child,
        deadline: Instant,
        cloned: Instant,
        ms: &mut ForkMs,
        stage: &mut &str,
    ) -> Result<Server, Error> {
        self.close_inherited()?;
        process::new_session()?;
        process::unblock_child_signals();
        *stage = "build";
        let place = server::place(child.directory.clone())?;
        let machine = self.plan.fork(child, &place)?;
        let mut server = Server::new(machine, place, Some(Arc::clone(&self.plan)), seed::live)?;
        ms.build = since(cloned) - ms.clone;
        *stage = "agent";
        server.make_own(child.into(), deadline)?;
        ms.agent = since(cloned) - ms.clone - ms.build;
        *stage = "open";
        server.open()?;
        ms.total = since(cloned);
        Ok(server)
    }

    /// Closes what belongs to the zygote alone, so that its clients see its end and not ours.
    fn close_inherited(&self) -> Result<(), Error> {
        self.control.close_in_child()?;
        descriptors::close_in_child(self.reports.0.as_raw_fd())?;
        descriptors::close_in_child(self.signals.as_raw_fd())?;
        descriptors::close_in_child(self.epoll.as_raw_fd())
    }

    /// Tells the zygote.  If it is gone, nobody has heard of us or will: whoever asked for us was
    /// told that it ended, and counts us as ended.
    fn send_report(&self, mut report: Report) -> std::io::Result<()> {
        (&self.reports.1).write_all(&report.line())
    }

    fn read_reports(&mut self) -> Result<(), Error> {
        let mut chunk = [0; REPORT_BYTES_MAX];
        let read = self.reports.0.read(&mut chunk).map_err(Error::io("read reports"))?;
        self.buffer.extend_from_slice(&chunk[..read]);
        while let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            if let Ok(report) = serde_json::from_slice(&line) {
                self.on_report(report);
            }
        }
        Ok(())
    }

    fn on_report(&mut self, report: Report) {
        let pid = match &report {
            Report::Ready { pid, .. } | Report::Failed { pid, .. } => pid,
            Report::Done { pid, .. } | Report::Refused { pid, .. } => {
                return self.on_help(*pid, report);
            }
        };
        let Some(child) = self.children.get_mut(pid) else { return };
        let Some(number) = child.batch.take() else { return };
        let id = child.child.id.clone();
        match report {
            Report::Ready { pid, ms } => {
                let Some(batch) = self.batches.get_mut(&number) else { return };
                batch.starting -= 1;
                batch.ready += 1;
                let event = Event::Ready { id, pid: pid.unsigned_abs(), ms };
                self.control.send(batch.token, Kind::Event, &event);
                self.plan.learn(pid);
            }
            Report::Failed { pid, stage, code, message, again } => {
                // It is about to exit; nobody waits for that.
                let Some(Alive { child, attempt, .. }) = self.children.remove(&pid) else { return };
                self.child_gone(number);
                if again && attempt < ATTEMPTS_MAX {
                    eprintln!("machine {id}, attempt {attempt}: {message}");
                    self.try_again(number, child, attempt + 1);
                } else {
                    self.report_failed(number, id, &stage, code, message);
                }
            }
            Report::Done { .. } | Report::Refused { .. } => {}
        }
    }

    fn try_again(&mut self, number: u64, child: Child, attempt: u32) {
        if let Some(batch) = self.batches.get_mut(&number) {
            batch.waiting.push_front((child, attempt));
        }
    }

    fn child_gone(&mut self, number: u64) {
        if let Some(batch) = self.batches.get_mut(&number) {
            batch.starting -= 1;
        }
    }

    fn report_failed(
        &mut self,
        number: u64,
        id: String,
        stage: &str,
        code: ErrorCode,
        message: String,
    ) {
        let Some(batch) = self.batches.get_mut(&number) else { return };
        batch.failed += 1;
        let stage = Some(stage.to_owned());
        let event = Event::Failed { id: Some(id), stage, code, message };
        self.control.send(batch.token, Kind::Event, &event);
    }

    fn finish(&mut self, number: u64) {
        let done = self
            .batches
            .get(&number)
            .is_some_and(|batch| batch.starting == 0 && batch.waiting.is_empty());
        if let Some(batch) = self.batches.get(&number).filter(|_| done) {
            let wall_ms = since(batch.started);
            let reply = ForkReply { ready: batch.ready, failed: batch.failed, wall_ms };
            self.control.answer(batch.token, Ok(reply));
            self.batches.remove(&number);
        }
    }

    /// Children have ended.  One that was not reported yet has failed.
    fn reap(&mut self) -> Result<(), Error> {
        let mut signal = [0; 128];
        // The descriptor says only that there is something; `reap` says what.
        drop(self.signals.read(&mut signal));
        // A child writes its report before it exits, so read first what is there.
        while descriptors::readable(&self.reports.0)? {
            self.read_reports()?;
        }
        while let Some((pid, status)) = process::reap() {
            if let Some(helper) = self.helpers.remove(&pid) {
                self.help_failed(&helper, status);
            }
            let Some(child) = self.children.remove(&pid) else { continue };
            if let Some(number) = child.batch {
                remove_files(&child.child.directory);
                self.child_gone(number);
                let message = format!("its process ended before it was ready (status {status:#x})");
                self.report_failed(number, child.child.id, "process", ErrorCode::Guest, message);
            } else {
                let pid = pid.unsigned_abs();
                let event = Event::ChildExited { id: child.child.id, pid, status };
                self.control.broadcast(Kind::Event, &event);
            }
        }
        Ok(())
    }
}

/// Holds this process's memory for its children, and nothing else; ends with the last of them.
///
/// Those that were not reported yet cannot be now, and end by themselves.
fn hold_on() -> Result<(), Error> {
    descriptors::close_all_but(&[0, 1, 2])?;
    process::outlast_children();
    process::exit_now(0)
}

fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}

fn remove_files(directory: &Path) {
    for name in MACHINE_FILES {
        // Most were never made.
        drop(std::fs::remove_file(directory.join(name)));
    }
}
