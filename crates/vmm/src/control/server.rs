//! The I/O thread of a machine: one poll loop for clients, sockets, the tap and the end.
//!
//! It is the process's first thread.  The machine belongs to it; vCPU threads see
//! only the bus.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_proto::control::{
    Branch, BranchReply, Event, ExitReason, Identify, IdentifyReply, MachineRequest, PauseReply,
    Reset, ResetReply,
};
use forkd_proto::frame::Kind;
use serde::Serialize;
use serde_json::{Value, json};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::control::handshake::Identity;
use crate::control::introduction::Introduction;
use crate::control::socket::{Control, Token};
use crate::error::Error;
use crate::fork::branch::{Branched, SeedLife};
use crate::fork::plan::ForkPlan;
use crate::fork::reset::{self, Means};
use crate::io::bus::End;
use crate::io::console;
use crate::io::vsock::VsockHost;
use crate::machine::Machine;
use crate::machine::place::Place;
use crate::machine::save;
use crate::sys::pagemap::Pagemap;
use crate::sys::{descriptors, process};

/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 32;
/// How soon after a guest has said that it halts it is looked whether it did, and then again.
const HALT_CHECK: Duration = Duration::from_millis(250);
/// How often it is looked.  A kernel stops its other processors first, which takes it up to two
/// seconds, and longer on a busy host.
const HALT_CHECKS_MAX: u32 = 40;
/// Longest report of a seed; longer ones are cut, and so no report.
const REPORT_BYTES_MAX: usize = 4096;

// What the upper half of an epoll token says; the lower half is the token within that group.
const TAG_END: u64 = 1 << 32;
const TAG_CONTROL: u64 = 2 << 32;
const TAG_VSOCK: u64 = 3 << 32;
const TAG_TAP: u64 = 4 << 32;
const TAG_HANDSHAKE: u64 = 5 << 32;
const TAG_REST: u64 = 6 << 32;
const TAG_BRANCH: u64 = 7 << 32;
const TAG_MASK: u64 = !0 << 32;

/// A folder and a poll loop for one machine.
///
/// # Errors
///
/// [`Error::Io`] if no epoll descriptor is to be had.
pub fn place(directory: PathBuf) -> Result<Place, Error> {
    let epoll = Arc::new(Epoll::new().map_err(Error::io("epoll_create1"))?);
    Ok(Place { directory, epoll, vsock_tag: TAG_VSOCK })
}

/// A machine with its sockets.
#[derive(Debug)]
pub struct Server {
    machine: Machine,
    place: Place,
    /// Where it was forked; `None` if it booted.
    origin: Option<Arc<ForkPlan>>,
    seed_life: SeedLife,
    control: Option<Control>,
    pending: VecDeque<(Token, Vec<u8>)>,
    branches: BTreeMap<u32, Branching>,
    next_branch: u32,
    identifying: Option<Identifying>,
    /// The sandbox's id, as the guest was told last.
    id: String,
    /// Whether the guest has the IPv6 address that it was given first, or will.
    ipv6: bool,
    /// Requests wait: the guest is not yet who it will be.
    changing: bool,
    /// When to wake up though nothing happens: for a client who waits to be accepted, or for what
    /// is to be looked at again.
    retry: Option<Duration>,
    /// When it is looked next whether the guest has halted, and how often it still is.
    halting: Option<(Instant, u32)>,
}

/// A branch whose seed does not listen yet.
#[derive(Debug)]
struct Branching {
    token: Token,
    report: File,
    reply: BranchReply,
}

/// An `identify` that the agent has not answered yet.
#[derive(Debug)]
struct Identifying {
    token: Token,
    id: String,
    started: Instant,
    introduction: Introduction,
}

/// Why a poll loop came back.
enum Woke {
    /// Nothing of interest to the caller.
    Served,
    /// The machine is over.
    Ended(End),
    /// The handshake's stream is ready.
    Handshake,
}

impl Server {
    /// Watches what `machine`, which was forked at `origin` unless it booted, needs watched.  Opens
    /// no socket yet.
    ///
    /// Whoever calls says what a seed of it does, which is to be a zygote: those know servers.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn new(
        machine: Machine,
        place: Place,
        origin: Option<Arc<ForkPlan>>,
        seed_life: SeedLife,
    ) -> Result<Self, Error> {
        let server = Self {
            machine,
            place,
            origin,
            seed_life,
            control: None,
            pending: VecDeque::new(),
            branches: BTreeMap::new(),
            next_branch: 0,
            identifying: None,
            id: String::new(),
            ipv6: false,
            changing: false,
            retry: None,
            halting: None,
        };
        let bus = server.machine.bus();
        server.watch(bus.ended().as_raw_fd(), TAG_END)?;
        server.watch(bus.rest().as_raw_fd(), TAG_REST)?;
        let net = bus.net();
        if let Some(tap) = net.device().wire().file() {
            // For edges: a guest that takes no frames must not have them wake us for ever.
            let event = EpollEvent::new(EventSet::IN | EventSet::EDGE_TRIGGERED, TAG_TAP);
            server.add(tap.as_raw_fd(), event)?;
        }
        drop(net);
        Ok(server)
    }

    /// The machine.
    pub fn machine(&mut self) -> &mut Machine {
        &mut self.machine
    }

    /// Whether the guest has the IPv6 address that it was given, or will.
    #[must_use]
    pub fn has_ipv6(&self) -> bool {
        self.ipv6
    }

    /// Opens `control.sock` and `vsock.sock`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if one cannot be made.
    pub fn open(&mut self) -> Result<(), Error> {
        let path = self.place.directory.join("control.sock");
        self.control = Some(Control::listen(&path, &self.place.epoll, TAG_CONTROL)?);
        self.machine.bus().vsock(VsockHost::listen)
    }

    /// Prepares `post_fork`, resumes the guest, and returns when its agent has answered.
    ///
    /// # Errors
    ///
    /// [`Error::GuestReset`] if the guest is reset; [`Error::Guest`] if it ends otherwise, the
    /// agent refuses, or `deadline` passes.
    pub fn make_own(&mut self, identity: Identity<'_>, deadline: Instant) -> Result<(), Error> {
        let streams = UnixStream::pair().map_err(Error::io("make a socket pair"))?;
        self.make_own_over(streams, identity, deadline)
    }

    fn make_own_over(
        &mut self,
        streams: (UnixStream, UnixStream),
        identity: Identity<'_>,
        deadline: Instant,
    ) -> Result<(), Error> {
        identity.id().clone_into(&mut self.id);
        // The connection is queued before the guest runs: it finds it with its first instruction.
        let mut introduction =
            Introduction::start(self.machine.bus(), streams, identity, deadline)?;
        self.watch(introduction.descriptor(), TAG_HANDSHAKE)?;
        self.machine.resume()?;
        loop {
            match self.poll(Some(introduction.time_left()?))? {
                Woke::Served => {}
                Woke::Ended(end) => {
                    let said = console::tail(&self.place.directory);
                    let how = format!("the machine ended: {end}{said}");
                    return Err(match end {
                        End::Reset | End::Panic | End::TripleFault => Error::GuestReset(how),
                        _ => Error::Guest(how),
                    });
                }
                Woke::Handshake => {
                    let bus = self.machine.bus();
                    if introduction.advance(bus)? {
                        bus.vsock(|vsock| vsock.pass_on(introduction.connection()));
                        self.ipv6 = introduction.has_ipv6();
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Serves the machine until it is over, tells every client, and removes the sockets.
    #[must_use]
    pub fn run(mut self) -> End {
        let end = loop {
            let timeout = self.identifying.as_ref().map(|under_way| {
                // One that is late is answered below.
                under_way.introduction.time_left().unwrap_or_default()
            });
            match self.poll(timeout) {
                Ok(Woke::Ended(end)) => break end,
                Ok(Woke::Handshake) => self.advance_identify(true),
                Ok(Woke::Served) => self.advance_identify(false),
                Err(error) => break End::Error(error.to_string()),
            }
        };
        if let Some(control) = &mut self.control {
            let (reason, message) = exit_reason(&end);
            control.broadcast(Kind::Event, &Event::Exited { reason, message });
            control.unlink();
        }
        end
    }

    fn watch(&self, fd: i32, token: u64) -> Result<(), Error> {
        self.add(fd, EpollEvent::new(EventSet::IN, token))
    }

    fn add(&self, fd: i32, event: EpollEvent) -> Result<(), Error> {
        self.place.epoll.ctl(ControlOperation::Add, fd, event).map_err(Error::io("epoll_ctl"))
    }

    fn poll(&mut self, timeout: Option<Duration>) -> Result<Woke, Error> {
        let mut events = [EpollEvent::default(); EVENTS_MAX];
        let timeout_ms = poll_ms(timeout.into_iter().chain(self.retry).min());
        let count = match self.place.epoll.wait(timeout_ms, &mut events) {
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(Error::Io { what: "epoll_wait".into(), source: error }),
        };
        let mut woke = Woke::Served;
        for event in &events[..count] {
            let token = u32::try_from(event.data() & !TAG_MASK).unwrap_or(0);
            match event.data() & TAG_MASK {
                TAG_END => {
                    let end = self.machine.bus().end_reason();
                    return Ok(Woke::Ended(end.unwrap_or(End::Stopped)));
                }
                TAG_CONTROL => self.on_control(token),
                TAG_VSOCK => self.machine.bus().vsock(|vsock| vsock.on_socket(token)),
                TAG_TAP => self.machine.bus().poll_tap(),
                TAG_REST => self.machine.bus().serve_rest(),
                TAG_BRANCH => self.on_seed(token),
                TAG_HANDSHAKE => woke = Woke::Handshake,
                _ => {}
            }
        }
        self.answer_pending();
        let for_control = self.control.as_mut().and_then(Control::accept_waiting);
        let for_guest = self.machine.bus().vsock_still(VsockHost::accept_waiting);
        let for_end = [self.check_halted(), self.check_agent()];
        self.retry = for_end.into_iter().chain([for_control, for_guest]).flatten().min();
        Ok(woke)
    }

    /// Ends a machine whose guest has halted: no vCPU would ever come back from `KVM_RUN`.
    ///
    /// A guest that says that it halts is looked at a few times.  Returns when the next time is.
    fn check_halted(&mut self) -> Option<Duration> {
        if self.machine.bus().take_halting() {
            self.halting = Some((Instant::now() + HALT_CHECK, HALT_CHECKS_MAX));
        }
        let (due, left) = self.halting.filter(|_| self.machine.is_running())?;
        let now = Instant::now();
        if now < due {
            return Some(due - now);
        }
        // A vCPU that does not stop in time has not halted; one that is over has told why.
        if self.machine.has_halted().unwrap_or(false) {
            self.machine.bus().end(End::Halted);
        }
        self.halting = (left > 1).then(|| (Instant::now() + HALT_CHECK, left - 1));
        self.halting.map(|_| HALT_CHECK)
    }

    /// Ends a machine without an agent.  Returns when to look again, if it is not certain yet.
    fn check_agent(&self) -> Option<Duration> {
        let bus = self.machine.bus();
        if !self.machine.is_running() {
            return None;
        }
        if bus.vsock_still(|vsock| vsock.agent_is_due()) {
            bus.vsock(VsockHost::call_agent);
        }
        if bus.vsock_still(|vsock| vsock.agent_is_gone()) {
            bus.end(End::Agent);
        }
        bus.vsock_still(|vsock| vsock.agent_due_in())
    }

    fn on_control(&mut self, token: Token) {
        let requests = self.control.as_mut().map(|control| control.on_socket(token));
        for request in requests.unwrap_or_default() {
            self.pending.push_back((token, request));
        }
    }

    fn answer_pending(&mut self) {
        while !self.changing {
            let Some((token, request)) = self.pending.pop_front() else { return };
            let Some(answer) = self.handle(token, &request).transpose() else { continue };
            self.answer(token, answer);
        }
    }

    /// Does what is asked.  `None` if the answer comes later.
    fn handle(&mut self, token: Token, request: &[u8]) -> Result<Option<Value>, Error> {
        let machine = &mut self.machine;
        let reply = match MachineRequest::parse(request)? {
            MachineRequest::Status => json!(machine.status()),
            MachineRequest::Metrics => json!(machine.metrics()),
            MachineRequest::Pause => {
                machine.pause()?;
                json!(PauseReply::default())
            }
            MachineRequest::Resume => {
                machine.tell_of_pause()?;
                let pause_ms = machine.resume()?;
                self.answer(token, Ok(PauseReply { pause_ms }));
                // It may have been paused to be saved, which freezes a top as a branch does.
                self.machine.tidy_disk();
                return Ok(None);
            }
            MachineRequest::Save(save) => json!(match save.disk_above {
                None => machine.save(&save.directory)?,
                Some(above) => machine.save_disk(&save.directory, above)?,
            }),
            MachineRequest::Branch(branch) => {
                self.branch(token, &branch)?;
                return Ok(None);
            }
            MachineRequest::Reset(reset) => json!(self.reset(&reset)?),
            MachineRequest::Identify(identify) => {
                self.identify(token, identify)?;
                return Ok(None);
            }
            MachineRequest::Stop => {
                machine.bus().end(End::Stopped);
                json!({})
            }
        };
        Ok(Some(reply))
    }

    /// Goes back to the fork point; the machine ends if that fails once it has begun.
    fn reset(&mut self, request: &Reset) -> Result<ResetReply, Error> {
        let started = Instant::now();
        let plan = reset::fork_point(self.origin.as_ref())?;
        let means = Means::take()?;
        self.machine.pause()?;
        if let Some(lost) = self.identifying.take() {
            self.answer::<()>(lost.token, Err(Error::State("the machine was reset meanwhile")));
        }
        let deadline = started + Duration::from_secs_f64(request.deadline_s);
        self.changing = true;
        let made = self.make_anew(&plan, means, request, deadline);
        self.changing = false;
        if let Err(error) = &made {
            self.machine.bus().end(End::Error(format!("it could not be reset: {error}")));
        }
        made.map(|()| ResetReply { ms: started.elapsed().as_secs_f64() * 1e3 })
    }

    fn make_anew(
        &mut self,
        plan: &Arc<ForkPlan>,
        means: Means,
        request: &Reset,
        deadline: Instant,
    ) -> Result<(), Error> {
        self.machine.rewind(plan, &means)?;
        let id = self.id.clone();
        self.make_own_over(means.streams, Identity::after_reset(&id, request), deadline)?;
        // The first fork of a snapshot was forked before its zygote had learned anything.  What a
        // sibling has of its own says less: it keeps the pages that its seed has.
        if !plan.is_live()
            && let Ok(own) = Pagemap::own()
        {
            plan.learn(&own);
        }
        self.machine.bus().vsock(|vsock| vsock.admit())
    }

    /// Has the guest take another identity while it runs; answers when it has.
    fn identify(&mut self, token: Token, request: Identify) -> Result<(), Error> {
        let started = Instant::now();
        if self.identifying.is_some() {
            return Err(Error::State("the machine is being identified already"));
        }
        if !self.machine.is_running() {
            return Err(Error::State("the machine is paused; resume it first"));
        }
        let deadline = started + Duration::from_secs_f64(request.deadline_s);
        let streams = UnixStream::pair().map_err(Error::io("make a socket pair"))?;
        let bus = self.machine.bus();
        let introduction = Introduction::start(bus, streams, (&request).into(), deadline)?;
        self.watch(introduction.descriptor(), TAG_HANDSHAKE)?;
        self.identifying = Some(Identifying { token, id: request.id, started, introduction });
        Ok(())
    }

    /// Goes on with an `identify`, of which there is something to read if it is `ready`.
    fn advance_identify(&mut self, ready: bool) {
        let Some(mut under_way) = self.identifying.take() else { return };
        let advanced = if ready {
            under_way.introduction.advance(self.machine.bus())
        } else {
            under_way.introduction.time_left().map(|_| false)
        };
        let answer = match advanced {
            Ok(false) => {
                self.identifying = Some(under_way);
                return;
            }
            Ok(true) => {
                self.id = under_way.id;
                Ok(IdentifyReply { ms: under_way.started.elapsed().as_secs_f64() * 1e3 })
            }
            Err(error) => Err(error),
        };
        self.answer(under_way.token, answer);
    }

    fn answer<T: Serialize>(&mut self, token: Token, result: Result<T, Error>) {
        if let Some(control) = &mut self.control {
            control.answer(token, result);
        }
    }

    /// Forks a seed; answers when that listens.
    fn branch(&mut self, token: Token, request: &Branch) -> Result<(), Error> {
        save::check_empty(&request.directory)?;
        // Nobody waits for seeds, which outlive the request.
        process::mind_children(false);
        let (report, theirs) = descriptors::pipe()?;
        match self.machine.branch(request.cgroup.as_deref(), self.origin.as_ref())? {
            Branched::Seed(seed) => (self.seed_life)(*seed, &request.directory, &theirs),
            Branched::Source { pid, pause_ms } => {
                let reply = BranchReply { pid: pid.unsigned_abs(), pause_ms, users: true };
                let number = self.next_branch;
                self.next_branch = number.wrapping_add(1);
                self.watch(report.as_raw_fd(), TAG_BRANCH | u64::from(number))?;
                self.branches.insert(number, Branching { token, report, reply });
                Ok(())
            }
        }
    }

    /// A seed listens, or has failed.
    fn on_seed(&mut self, number: u32) {
        let Some(mut branching) = self.branches.remove(&number) else { return };
        let Some(control) = &mut self.control else { return };
        let mut said = [0; REPORT_BYTES_MAX];
        let read = branching.report.read(&mut said).unwrap_or(0);
        match serde_json::from_slice::<Value>(&said[..read]) {
            Ok(Value::Object(members)) if members.is_empty() => {
                if !control.answer(branching.token, Ok(branching.reply)) {
                    process::kill(branching.reply.pid.cast_signed());
                }
            }
            Ok(error) => {
                control.send(branching.token, Kind::Error, &error);
            }
            Err(_) => {
                let error = Error::State("the seed ended before it listened");
                control.answer::<()>(branching.token, Err(error));
            }
        }
    }
}

/// How long epoll is to wait, for ever if nobody says: rounded up, so as not to wake too early.
#[must_use]
pub fn poll_ms(timeout: Option<Duration>) -> i32 {
    timeout.map_or(-1, |left| i32::try_from(left.as_millis()).unwrap_or(i32::MAX).saturating_add(1))
}

fn exit_reason(end: &End) -> (ExitReason, Option<String>) {
    match end {
        End::Shutdown => (ExitReason::Shutdown, None),
        End::Halted => (ExitReason::Shutdown, Some(end.to_string())),
        End::Reset => (ExitReason::Reset, None),
        End::Panic | End::TripleFault => (ExitReason::Reset, Some(end.to_string())),
        End::Agent => (ExitReason::Error, Some(end.to_string())),
        End::Stopped => (ExitReason::Stopped, None),
        End::Error(message) => (ExitReason::Error, Some(message.clone())),
    }
}
