//! A zygote: one process that holds a snapshot, and forks machines from it.
//!
//! It has one thread, verifies and parses everything once, and never touches the
//! guest's memory that it maps; so a `clone3` of it is a machine's memory, ready.
//! A child builds its VM, resumes, and reports through its pipe ([`reports`]) when its agent
//! has answered.  Children do not depend on the zygote afterwards, but for going back: those of
//! a seed read their fork point in it, so one that is retired holds its memory until the last of
//! them has ended.
//!
//! Partial failure: every child of a request is reported exactly once, as ready or
//! as failed ([`children`]).  Of a failed child no process and no file in its folder
//! remains.

mod children;
mod help;
mod leavings;
mod lessons;
mod report;
mod reports;
pub mod seed;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use forkd_proto::control::{Child, Fork, ForkMs, ZygoteConfig, ZygoteRequest, ZygoteStatus};
use forkd_proto::frame::Kind;
use serde_json::json;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::control::server::{self, Server};
use crate::control::socket::{Control, Token};
use crate::error::Error;
use crate::fork::plan::ForkPlan;
use crate::io::bus::End;
use crate::jail::filter::Role;
use crate::jail::{self, filter, rights};
use crate::sys::handed::{self, Keep};
use crate::sys::process::{self, Forked};
use crate::sys::{descriptors, output, sharing};
use children::{Birth, Children, Ended, Failure, attempts_here, starting_max_here};
use help::{Helper, Task};
use lessons::Lessons;
use report::Report;
use reports::{Opened, Reports, Said};

/// What a seed is called once it only holds memory: a daemon that comes later lets it be.
const RETIRED_NAME: &std::ffi::CStr = c"forkd-seed";
/// Why a machine ended, in its folder.
const LOG_FILE: &str = "vmm.log";

const TAG_CONTROL: u64 = 1 << 32;
const TAG_REPORTS: u64 = 2 << 32;
const TAG_CHILDREN: u64 = 3 << 32;
const TAG_MASK: u64 = !0 << 32;

/// The zygote's process.
#[derive(Debug)]
pub struct Zygote {
    plan: Arc<ForkPlan>,
    helpers: BTreeMap<i32, Helper>,
    epoll: Arc<Epoll>,
    control: Control,
    reports: Reports,
    /// Until something was learned.
    lessons: Option<Lessons>,
    signals: File,
    children: Children,
    stopping: bool,
    /// It keeps its memory for its children after that.
    retiring: bool,
}

impl Zygote {
    /// Loads the snapshot, under a filter of system calls, and listens at `zygote.sock`.
    ///
    /// # Errors
    ///
    /// Those of [`ForkPlan::load`]; [`Error::Io`].
    pub fn start(config: &ZygoteConfig) -> Result<Self, Error> {
        filter::put_on(Role::Process)?;
        let plan = ForkPlan::load(config)?;
        handed::keep_only(Keep::Zygote);
        Self::serve(plan, &config.directory)
    }

    /// Listens at `zygote.sock` in `directory`, to fork what `plan` says.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn serve(plan: ForkPlan, directory: &Path) -> Result<Self, Error> {
        descriptors::raise_file_limit();
        let epoll = Arc::new(Epoll::new().map_err(Error::io("epoll_create1"))?);
        let reports = Reports::new(&epoll, TAG_REPORTS);
        let signals = process::child_signals()?;
        let event = EpollEvent::new(EventSet::IN, TAG_CHILDREN);
        epoll
            .ctl(ControlOperation::Add, signals.as_raw_fd(), event)
            .map_err(Error::io("epoll_ctl"))?;
        let control = Control::listen(&directory.join("zygote.sock"), &epoll, TAG_CONTROL)?;
        let lessons = plan.warmth().is_none().then(Lessons::new).transpose()?;
        Ok(Self {
            lessons,
            plan: Arc::new(plan),
            helpers: BTreeMap::new(),
            epoll,
            control,
            reports,
            signals,
            children: Children::new(attempts_here(), starting_max_here()),
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
        let mut timeout = None;
        while !self.stopping {
            let count = match self.epoll.wait(server::poll_ms(timeout), &mut events) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                waited => waited.map_err(Error::io("epoll_wait"))?,
            };
            for event in &events[..count] {
                let token = u32::try_from(event.data() & !TAG_MASK).unwrap_or(0);
                match event.data() & TAG_MASK {
                    TAG_CONTROL => self.on_control(token),
                    TAG_REPORTS => {
                        if let Some((pid, said)) = self.reports.read(token.cast_signed()) {
                            self.on_report(pid, said);
                        }
                    }
                    TAG_CHILDREN => self.reap(),
                    _ => {}
                }
            }
            self.fork_waiting();
            timeout = self.control.accept_waiting();
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
                Ok(ZygoteRequest::Files(files)) => {
                    let took = self.control.take_files(token, &files.names);
                    self.control.answer(token, took.map(|()| json!({})));
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
                    let mut children = 0;
                    // Before the answer: whoever has it may look for the name, or at the folder.
                    if self.retiring {
                        children = self.children.alive_and_ready();
                        process::rename(RETIRED_NAME);
                    }
                    self.control.unlink();
                    self.control.answer(token, Ok(json!({"children": children})));
                }
                Ok(ZygoteRequest::Fork(fork)) => match self.enter_users(&fork) {
                    Ok(()) => self.children.accept(token, fork, Instant::now()),
                    Err(error) => {
                        self.control.answer::<()>(token, Err(error));
                    }
                },
                Ok(ZygoteRequest::Save(save)) => self.help(token, Task::Save(save)),
                Ok(ZygoteRequest::Derive(derive)) => self.help(token, Task::Derive(derive)),
            }
        }
    }

    /// Enters the namespace in which children become others, if there is one for them.
    fn enter_users(&self, fork: &Fork) -> Result<(), Error> {
        match &fork.users {
            Some(_) if !self.plan.is_live() => Err(Error::State("it is no seed")),
            Some(name) => jail::users::enter(name),
            None => Ok(()),
        }
    }

    fn status(&self) -> ZygoteStatus {
        let (memory_bytes, vcpus) = self.plan.size();
        ZygoteStatus {
            pid: std::process::id(),
            children: self.children.alive(),
            memory_bytes,
            vcpus,
            resident_bytes: self.plan.ram().loaded_bytes(),
        }
    }

    /// Starts children that wait, and answers requests of which none does.
    fn fork_waiting(&mut self) {
        while let Some((number, birth)) = self.children.next(Instant::now()) {
            self.fork_one(number, birth);
        }
        for (token, reply) in self.children.take_finished(Instant::now()) {
            self.control.answer(token, Ok(reply));
        }
    }

    fn fork_one(&mut self, number: u64, birth: Birth) {
        let cloned = Instant::now();
        // One that was handed over is entered by the child itself.
        let cgroup = birth.child.cgroup.as_deref().filter(|path| !handed::has(path));
        let cgroup = cgroup.map(process::open_cgroup).transpose();
        #[cfg(feature = "captive")]
        let cgroup = cgroup.and_then(|cgroup| {
            // A seed is the user of the machine that it is of.
            let source = self.plan.is_live().then(|| std::os::unix::process::parent_id());
            let known = [self.children.pids(), source.into_iter().map(u32::cast_signed).collect()];
            jail::try_to_leave_above(&birth.child, &known.concat()).map(|()| cgroup)
        });
        let forked = cgroup.and_then(|cgroup| {
            let pipe = self.reports.open()?;
            Ok((process::fork_into(cgroup.as_ref())?, pipe))
        });
        match forked {
            Ok((Forked::Child, pipe)) => self.become_machine(&birth, cloned, pipe),
            Ok((Forked::Parent(pid), pipe)) => {
                self.reports.expect(pid, pipe);
                self.children.started(pid, number, birth);
            }
            Err(error) => {
                let (stage, code) = ("clone".to_owned(), error.code());
                let failure = Failure { stage, code, message: error.to_string(), again: false };
                if let Some((token, event)) = self.children.not_started(number, &birth, failure) {
                    self.control.send(token, Kind::Event, &event);
                }
            }
        }
    }

    /// In the child: the machine's whole life.
    fn become_machine(&self, birth: &Birth, cloned: Instant, pipe: Opened) -> ! {
        let child = &birth.child;
        let log = child.directory.join(LOG_FILE);
        filter::log_to(Some(&log));
        let reporter = pipe.reporter();
        let mut ms = ForkMs { clone: since(cloned), ..ForkMs::default() };
        let mut stage = "prepare";
        let made = self.make(child, birth.deadline, cloned, &mut ms, &mut stage);
        match made {
            Ok(server) => {
                let ipv6 = server.has_ipv6();
                if reporter.say(Report::Ready { ms, ipv6 }).is_err() {
                    leavings::remove_all(&child.directory, birth.attempt);
                    process::exit_now(1);
                }
                let end = server.run();
                // Standard error is the zygote's log; who asks about a machine looks in its folder.
                drop(std::fs::write(log, format!("{end}\n")));
                process::exit_now(i32::from(matches!(end, End::Error(_))));
            }
            Err(error) => {
                let (stage, code, message) = (stage.to_owned(), error.code(), error.to_string());
                let again = matches!(error, Error::GuestReset(_));
                // The zygote removes the files, or keeps what the guest said; if it is gone, they
                // are of use to nobody.
                if reporter.say(Report::Failed { stage, code, message, again }).is_err() {
                    leavings::remove_all(&child.directory, birth.attempt);
                }
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
        sharing::own_core()?;
        let tap = enter_jail(child)?;
        #[cfg(feature = "captive")]
        jail::try_to_leave(child)?;
        *stage = "build";
        let place = server::place(child.directory.clone())?;
        let machine = self.plan.fork(child, tap, &place)?;
        let mut server = Server::new(machine, place, Some(Arc::clone(&self.plan)), seed::live)?;
        ms.build = since(cloned) - ms.clone;
        *stage = "agent";
        server.make_own(child.into(), deadline)?;
        ms.agent = since(cloned) - ms.clone - ms.build;
        *stage = "open";
        server.open()?;
        if let Some(lessons) = &self.lessons {
            lessons.teach()?;
        }
        ms.total = since(cloned);
        Ok(server)
    }

    /// Closes what belongs to the zygote alone, so that its clients see its end and not ours.
    fn close_inherited(&self) -> Result<(), Error> {
        self.control.close_in_child()?;
        self.reports.close_in_child()?;
        self.lessons.as_ref().map_or(Ok(()), Lessons::close_in_child)?;
        self.plan.awake().map_or(Ok(()), descriptors::close_in_child)?;
        descriptors::close_in_child(self.signals.as_raw_fd())?;
        descriptors::close_in_child(self.epoll.as_raw_fd())
    }

    /// A process, which has not been reaped, has said its one word.
    fn on_report(&mut self, pid: i32, said: Said) {
        if self.helpers.contains_key(&pid) {
            return self.on_help(pid, said);
        }
        match said {
            Some(Report::Ready { ms, ipv6 }) => {
                let Some((token, event)) = self.children.ready(pid, ms, ipv6) else { return };
                self.control.send(token, Kind::Event, &event);
                self.learn();
            }
            Some(Report::Failed { stage, code, message, again }) => {
                self.children.failing(pid, Failure { stage, code, message, again });
                process::kill(pid);
            }
            // It will never be ready: nobody hears it any more.
            _ => process::kill(pid),
        }
    }

    /// A child is ready, and has passed its page map on if there was something to learn.
    fn learn(&mut self) {
        while let Some(pagemap) = self.lessons.as_ref().and_then(Lessons::next) {
            if self.plan.learn(&pagemap) {
                self.lessons = None;
            }
        }
    }

    /// Processes have ended.
    fn reap(&mut self) {
        let mut signal = [0; 128];
        // The descriptor says only that there is something; `reap` says what.
        drop(self.signals.read(&mut signal));
        while let Some(pid) = process::ended() {
            // It writes its report before it exits, so read first what is there.
            if let Some((pid, said)) = self.reports.last_words(pid) {
                self.on_report(pid, said);
            }
            let Some(status) = process::reap(pid) else { return };
            if let Some(helper) = self.helpers.remove(&pid) {
                self.help_failed(&helper, status);
            }
            if let Some(ended) = self.children.ended(pid, status, Instant::now()) {
                self.on_end(ended);
            }
        }
    }

    fn on_end(&mut self, ended: Ended) {
        match ended {
            Ended::Exited(event) => self.control.broadcast(Kind::Event, &event),
            Ended::Again { id, directory, attempt, message } => {
                output::log(format_args!("machine {id}, attempt {attempt}: {message}"));
                leavings::set_aside(&directory, attempt);
            }
            Ended::Failed { directory, attempts, token, event } => {
                leavings::remove_all(&directory, attempts);
                self.control.send(token, Kind::Event, &event);
            }
        }
    }
}

/// Takes what the host has for a child, and then no more of it: in the child.
fn enter_jail(child: &Child) -> Result<Option<File>, Error> {
    let tap = child.network.as_ref().map(|network| descriptors::open_tap(&network.tap));
    let tap = tap.transpose()?;
    if let Some(path) = &child.cgroup
        && let Some(gate) = handed::take(path)
    {
        // The daemon moves who writes there, and says when it has.
        let moved = (&gate).write_all(b"0").and_then(|()| (&gate).read_exact(&mut [0]));
        moved.map_err(Error::io(format!("enter {}", path.display())))?;
    }
    handed::keep_only(Keep::Always);
    jail::become_own(child.uid)?;
    Ok(tap)
}

/// Holds this process's memory for its children, and nothing else; ends with the last of them.
///
/// Those that were not reported yet cannot be now, and end by themselves.
fn hold_on() -> Result<(), Error> {
    descriptors::close_all_but(&[0, 1, 2])?;
    rights::keep(&[])?;
    filter::put_on(Role::Holder)?;
    process::outlast_children();
    process::exit_now(0)
}

fn since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
