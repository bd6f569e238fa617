//! What each operation does: from frame to answer.

use std::time::Instant;

use forkd_proto::Kind;
use forkd_proto::guest::{
    ErrorBody, ErrorCode, Eval as EvalRequest, Event, Exec as ExecRequest, Nothing, Pong,
    PostFork as PostForkRequest, Request, RuntimeState, TimeReply, Warm as WarmRequest, WarmReply,
    timeout,
};
use nix::sys::reboot::{RebootMode, reboot};
use nix::unistd::Pid;
use serde_json::json;

use super::{Errand, Server};
use crate::child::Ended;
use crate::conn::{Conn, Op};
use crate::connect::{self, Connect};
use crate::exec::{Exec, Progress};
use crate::failure::{Outcome, failure, refused};
use crate::fork::{KernelPart, PostFork, needs_generation};
use crate::identity::Identity;
use crate::quiesce::{self, Rehearsal};
use crate::runtime::{Answer, FREEZE, Job, Purpose, Spec};
use crate::warm::Warm;
use crate::watch::Watch;
use crate::{clock, files, log, processes, systemd};

impl Server {
    /// Takes one frame; what a thread is to do about it, if one is.
    pub(super) fn on_frame(
        &mut self,
        conn: &mut Conn,
        kind: Kind,
        payload: &[u8],
    ) -> Option<Errand> {
        let taken = match &mut conn.op {
            Op::Exec(exec) => Some(exec.on_frame(kind, payload)),
            Op::Connect(connect) => Some(connect.on_frame(kind, payload)),
            _ => None,
        };
        match taken {
            Some(Ok(())) => return None,
            Some(Err(body)) => {
                self.break_off(conn, &body);
                return None;
            }
            None => {}
        }
        match kind {
            Kind::Request => match Request::parse(payload) {
                Ok(request) => return self.begin(conn, request),
                Err(error) => conn.fail(&error.into()),
            },
            // Late ones of an operation that is over: both sides may end it at the same time.
            Kind::Stdin | Kind::StdinEof | Kind::Control | Kind::Data | Kind::DataEof => {}
            _ => {
                let body = failure(ErrorCode::Protocol, format!("{kind:?} is not for the agent"));
                self.break_off(conn, &body);
            }
        }
        None
    }

    fn begin(&mut self, conn: &mut Conn, request: Request) -> Option<Errand> {
        if !leaves_the_guest_alone(&request)
            && let Err(body) = self.rouse()
        {
            conn.fail(&body);
            return None;
        }
        match request {
            Request::Ping => conn.reply(&self.pong()),
            Request::Echo(echo) => conn.reply(&echo),
            Request::Exec(exec) => self.begin_exec(conn, &exec),
            Request::Connect(connect) => match Connect::start(connect.port, self.now) {
                Ok(connect) => {
                    self.watch(conn.id, connect.socket());
                    conn.op = Op::Connect(Box::new(connect));
                }
                Err(body) => conn.fail(&body),
            },
            Request::Eval(eval) => self.begin_eval(conn, eval),
            Request::Warm(warm) => self.begin_warm(conn, warm),
            Request::Configure(configure) => {
                self.defaults.configure(configure);
                conn.reply(&Nothing {});
            }
            Request::Quiesce if self.identity.is_some() => {
                // What the kernel frees late of the last cgroup goes when caches are dropped: left
                // pending, each fork would be woken for it.
                self.launcher.rest();
                return Some(Errand::Shrink);
            }
            Request::Freeze if self.identity.is_some() => return Some(Errand::Freeze),
            // This file system is not ours to freeze.
            Request::Freeze => conn.reply(&Nothing {}),
            // These caches are not ours to drop.
            Request::Quiesce => self.rehearse(conn),
            Request::PostFork(fork) => self.begin_post_fork(conn, &fork),
            Request::SetTime(time) => answer(conn, self.set_time(time.realtime_ns)),
            Request::AdjustTime(adjust) => {
                let wanted_ns = clock::realtime_ns().saturating_add(adjust.offset_ns);
                answer(conn, self.set_time(wanted_ns));
            }
            Request::Limit(limit) => {
                // This memory would not be ours to limit.
                if self.identity.is_some() {
                    self.memory_limit.set(limit.memory_bytes);
                }
                conn.reply(&Nothing {});
            }
            Request::Watch(watch) => {
                conn.watch = Some(Watch::new(self.now, watch.for_s));
                conn.reply(&Nothing {});
            }
            Request::Watched(watched) => match &conn.watch {
                Some(watch) => conn.op = Op::Watched(watch.lasted_at(watched.at_least_s)),
                None => conn.fail(&failure(ErrorCode::NotFound, "this connection watches nothing")),
            },
            Request::Shutdown => {
                conn.reply(&Nothing {});
                conn.op = Op::Shutdown;
            }
            request => {
                let user = self.defaults.user.clone();
                return Some(Errand::Files(Box::new(files::Job { request, user })));
            }
        }
        None
    }

    /// Goes on with an operation as far as it can without waiting; true if it could go further in
    /// another turn.
    pub(super) fn advance(&mut self, conn: &mut Conn) -> bool {
        if let Some(watch) = &mut conn.watch {
            watch.look(self.now);
        }
        match &mut conn.op {
            Op::Exec(exec) => {
                let was_running = exec.is_running();
                let progress = exec.drive(&mut conn.stream, &mut self.scratch, self.now);
                match progress {
                    Progress::Done(result) => {
                        self.sinks.adopt(&self.epoll, exec.leftovers());
                        answer(conn, result);
                    }
                    Progress::More => return true,
                    Progress::Waiting if !was_running && exec.is_running() => {
                        // The started event goes before all output, so that is read in the next
                        // turn.
                        let pid = number(exec.pid());
                        conn.event(&Event::Started { pid });
                        return true;
                    }
                    Progress::Waiting => {}
                }
            }
            Op::Connect(_) => return self.advance_connect(conn),
            Op::Warm(_) => self.advance_warm(conn),
            Op::PostFork(fork) => {
                if let Some(body) = fork.timed_out(self.now) {
                    fork.cancel();
                    self.runtime.abandon(conn.id, self.now);
                    conn.fail(&body);
                }
            }
            Op::Watched(due) if self.now >= *due => {
                if let Some(watch) = conn.watch.take() {
                    conn.reply(&watch.reply());
                }
            }
            Op::Rehearsal(rehearsal) if self.now >= rehearsal.deadline() => {
                rehearsal.cancel();
                self.finish_quiesce(conn);
            }
            _ => {}
        }
        false
    }

    /// A process of an operation has ended.
    pub(super) fn on_child_end(&mut self, id: u32, pid: Pid, ended: Ended) {
        // It may be of an operation that was over before its process was.
        if self.conns.get(&id).is_none_or(|conn| conn.op.process() != Some(pid)) {
            return;
        }
        let Some(mut conn) = self.conns.remove(&id) else { return };
        match &mut conn.op {
            Op::Exec(exec) => exec.on_exit(ended, self.now),
            Op::Warm(warm) => {
                if warm.on_exit(ended, self.now) {
                    self.finish_warm(&mut conn);
                }
            }
            Op::PostFork(fork) => match fork.on_exit(ended) {
                Ok(()) => self.advance_post_fork(&mut conn),
                Err(body) => conn.fail(&body),
            },
            Op::Rehearsal(_) => self.finish_quiesce(&mut conn),
            Op::Idle | Op::Connect(_) | Op::Eval | Op::Watched(_) | Op::Closing | Op::Shutdown => {}
        }
        self.conns.insert(id, conn);
    }

    /// The runtime has answered, or ended.
    pub(super) fn deliver(&mut self, answer_: Answer) {
        let Some(mut conn) = self.conns.remove(&answer_.owner) else { return };
        match (answer_.purpose, answer_.result) {
            (Purpose::Eval | Purpose::EvalIn, Ok(payload)) => conn.reply_raw(&payload),
            (Purpose::Warm, Ok(_)) => self.run_ready(&mut conn),
            (Purpose::Freeze, Ok(_)) => {
                if let Op::Warm(warm) = &conn.op {
                    let duration_s = warm.duration_s(self.now);
                    conn.reply(&WarmReply { duration_s });
                }
            }
            (Purpose::PostFork, Ok(payload)) => self.on_runtime_forked(&mut conn, &payload),
            (Purpose::Warm | Purpose::Freeze, Err(body)) => {
                self.runtime.kill();
                conn.fail(&ErrorBody { code: ErrorCode::WarmUpFailed, ..body });
            }
            (Purpose::PostFork, Err(body)) if body.code == ErrorCode::RuntimeFailed => {
                conn.fail(&ErrorBody { code: ErrorCode::ReseedFailed, ..body });
            }
            // Nobody waits for it: `Runtime` sees to its answer.
            (Purpose::Hello | Purpose::Reseed, Ok(_)) => {}
            (_, Err(body)) => conn.fail(&body),
        }
        let id = conn.id;
        self.conns.insert(id, conn);
        self.drive(id);
    }

    /// The interpreter has ended: who waits gets what it said last, and is told why.
    pub(super) fn on_runtime_end(&mut self, ended: Ended) {
        let client = self.runtime.owner().and_then(|id| self.conns.get_mut(&id));
        self.runtime.move_last(client.map(|conn| &mut conn.stream), &mut self.scratch);
        self.sinks.adopt(&self.epoll, self.runtime.leftovers());
        for answer in self.runtime.on_exit(ended) {
            self.deliver(answer);
        }
    }

    /// The client has gone: what it waited for is cancelled.
    pub(super) fn close(&mut self, mut conn: Box<Conn>) {
        self.cancel(&mut conn);
    }

    /// Answers ERROR and closes the connection, because what follows could not be understood.
    pub(super) fn break_off(&mut self, conn: &mut Conn, body: &ErrorBody) {
        self.cancel(conn);
        conn.fail(body);
        conn.op = Op::Closing;
    }

    fn cancel(&mut self, conn: &mut Conn) {
        match &mut conn.op {
            Op::Exec(exec) => {
                exec.cancel();
                self.sinks.adopt(&self.epoll, exec.leftovers());
            }
            Op::Eval => {
                self.runtime.abandon(conn.id, self.now);
                // It may have answered, and waited only for the client to read.
                self.runtime_again = true;
            }
            Op::Warm(warm) => {
                warm.cancel();
                self.runtime.abandon(conn.id, self.now);
            }
            Op::PostFork(fork) => {
                fork.cancel();
                self.runtime.abandon(conn.id, self.now);
            }
            Op::Rehearsal(rehearsal) => rehearsal.cancel(),
            Op::Connect(connect) => connect.cancel(),
            Op::Idle | Op::Watched(_) | Op::Closing | Op::Shutdown => {}
        }
    }

    /// Moves bytes between a client and its program; true if it could go on in another turn.
    fn advance_connect(&mut self, conn: &mut Conn) -> bool {
        let Op::Connect(connect) = &mut conn.op else { return false };
        match connect.drive(&mut conn.stream, &mut self.scratch, self.now) {
            connect::Progress::Waiting => return false,
            connect::Progress::More => {}
            connect::Progress::Connected => conn.event(&Event::Connected),
            connect::Progress::Redialed => self.watch(conn.id, connect.socket()),
            connect::Progress::Done(result) => {
                answer(conn, result.map(|()| Nothing {}));
                return false;
            }
        }
        true
    }

    /// Notes which connection a process belongs to.
    fn adopt(&mut self, pid: Pid, id: u32) {
        self.children.insert(pid, id);
        self.started = true;
    }

    fn begin_exec(&mut self, conn: &mut Conn, request: &ExecRequest) {
        let exec = match Exec::start(&mut self.launcher, request, &self.defaults, self.now) {
            Ok(exec) => exec,
            Err(body) => return conn.fail(&body),
        };
        self.adopt(exec.pid(), conn.id);
        for file in exec.descriptors() {
            self.watch(conn.id, file);
        }
        if exec.is_running() {
            conn.event(&Event::Started { pid: number(exec.pid()) });
        }
        conn.op = Op::Exec(Box::new(exec));
    }

    fn begin_eval(&mut self, conn: &mut Conn, eval: EvalRequest) {
        let named = eval.runtime.as_deref();
        if let Err(body) = named.map_or(Ok(()), |name| self.runtime.check_name(name)) {
            return conn.fail(&body);
        }
        if eval.context.is_none() && eval.env.is_empty() {
            conn.op = Op::Eval;
            return self.submit(conn, Purpose::Eval, eval.code.into_bytes(), eval.timeout_s);
        }
        if let Err(body) = self.runtime.check_knows(eval.context.is_some(), !eval.env.is_empty()) {
            return conn.fail(&body);
        }
        conn.op = Op::Eval;
        let mut request = json!({ "op": "eval", "code": eval.code });
        if let Some(context) = eval.context {
            request["context"] = context.into();
        }
        if !eval.env.is_empty() {
            request["env"] = json!(eval.env);
        }
        self.submit(conn, Purpose::EvalIn, request.to_string().into_bytes(), eval.timeout_s);
    }

    fn submit(
        &mut self,
        conn: &mut Conn,
        purpose: Purpose,
        payload: Vec<u8>,
        timeout_s: Option<f64>,
    ) {
        let job = Job { owner: conn.id, purpose, payload, timeout: timeout_s.map(timeout) };
        if purpose.is_eval() {
            match self.runtime.restart_if_lost(&mut self.launcher, self.now) {
                Ok(true) => {
                    self.watch_runtime();
                    self.started = true;
                }
                Ok(false) => {}
                Err(body) => return conn.fail(&body),
            }
        }
        match self.runtime.submit(job, self.now) {
            Ok(()) => self.flush_runtime(),
            Err(body) => conn.fail(&body),
        }
    }

    fn pong(&self) -> Pong {
        Pong {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: clock::uptime_s(),
            runtime: self.runtime.state(),
        }
    }

    fn set_time(&self, realtime_ns: i64) -> Outcome<TimeReply> {
        if self.identity.is_some() {
            clock::set_realtime_ns(realtime_ns)
                .map_err(|error| refused("cannot set the clock", &error))?;
        }
        Ok(TimeReply { realtime_ns: clock::realtime_ns() })
    }

    fn begin_warm(&mut self, conn: &mut Conn, request: WarmRequest) {
        let wanted = match (&request.runtime, &request.python) {
            (Some(runtime), _) => Spec::find(&runtime.name).map(|it| Some((it, &runtime.code))),
            (None, Some(python)) => Ok(Some((Spec::python(), &python.code))),
            (None, None) => Ok(None),
        };
        let wanted = match wanted {
            Ok(wanted) => wanted.map(|(spec, code)| (spec, code.clone())),
            Err(body) => {
                return conn.fail(&ErrorBody { code: ErrorCode::WarmUpFailed, ..body });
            }
        };
        let warm = Warm::new(request, &self.defaults, &self.folder, self.now);
        let surroundings = warm.surroundings.clone();
        conn.op = Op::Warm(Box::new(warm));
        let Some((spec, code)) = wanted else { return self.run_ready(conn) };
        if matches!(self.runtime.state(), RuntimeState::None | RuntimeState::Failed) {
            let launcher = &mut self.launcher;
            if let Err(body) = self.runtime.start(launcher, &spec, &surroundings, &self.folder) {
                return conn.fail(&body);
            }
            self.watch_runtime();
            self.started = true;
        } else if let Err(body) = self.runtime.check_name(&spec.name) {
            return conn.fail(&ErrorBody { code: ErrorCode::WarmUpFailed, ..body });
        }
        let payload = json!({"op": "warm", "code": code}).to_string();
        self.submit(conn, Purpose::Warm, payload.into_bytes(), None);
    }

    fn advance_warm(&mut self, conn: &mut Conn) {
        let Op::Warm(warm) = &mut conn.op else { return };
        if let Some(mut body) = warm.timed_out(self.now) {
            if self.runtime.is_mute() {
                let (limit_s, title) = (warm.request.timeout_s, self.runtime.title());
                body.message = format!("after {limit_s} s {title} has not answered hello");
            }
            warm.cancel();
            self.runtime.kill();
            self.runtime.abandon(conn.id, self.now);
            return conn.fail(&body);
        }
        if warm.wake_at() <= self.now {
            self.run_ready(conn);
        }
    }

    /// Runs the readiness command, or goes on if the image has none.
    fn run_ready(&mut self, conn: &mut Conn) {
        let Op::Warm(warm) = &mut conn.op else { return };
        match warm.run_ready(&mut self.launcher, self.now) {
            Ok(Some(pid)) => self.adopt(pid, conn.id),
            Ok(None) => self.finish_warm(conn),
            Err(body) => {
                self.runtime.kill();
                conn.fail(&body);
            }
        }
    }

    fn finish_warm(&mut self, conn: &mut Conn) {
        let Op::Warm(warm) = &conn.op else { return };
        if warm.request.python.is_none() && warm.request.runtime.is_none() {
            let duration_s = warm.duration_s(self.now);
            return conn.reply(&WarmReply { duration_s });
        }
        self.submit(conn, Purpose::Freeze, FREEZE.to_vec(), None);
    }

    /// Gives the guest what was put off until it is first used.
    fn rouse(&mut self) -> Outcome<()> {
        self.memory_limit.rouse();
        self.identity.as_mut().map_or(Ok(()), Identity::rouse)
    }

    /// Has the connection wait for a shell that fills the caches; see [`quiesce`].
    pub(super) fn rehearse(&mut self, conn: &mut Conn) {
        // The deadline counts from now, and the thread may have taken long.
        self.now = Instant::now();
        let rehearsal = Rehearsal::start(&mut self.launcher, &self.defaults, self.now);
        let Some(rehearsal) = rehearsal else { return self.finish_quiesce(conn) };
        self.adopt(rehearsal.pid(), conn.id);
        conn.op = Op::Rehearsal(rehearsal);
    }

    fn finish_quiesce(&mut self, conn: &mut Conn) {
        let dormant = self.has_no_programs();
        self.identity.iter_mut().for_each(|it| it.prepare_for_forks(dormant));
        self.launcher.rest();
        conn.reply(&quiesce::reply());
    }

    fn begin_post_fork(&mut self, conn: &mut Conn, request: &PostForkRequest) {
        // The init of a host that the agent only serves on is none of its business.
        let systemd = self.identity.is_some() && systemd::runs();
        let mut fork = PostFork::new(&self.defaults, &self.folder, systemd, self.now);
        let hooked = fork.has_commands() || self.defaults.post_fork.is_some();
        if let Some(identity) = &mut self.identity {
            if needs_generation() {
                conn.event(&Event::AnnounceGeneration);
                // Before anything can be sent over the network.  What is left goes with the reply.
                drop(conn.stream.flush());
            }
            self.disk_limit.set(request.disk);
            let idle = !hooked && self.runtime.is_dormant();
            if idle && identity.is_dormant() {
                self.memory_limit.put_off(request.memory_bytes);
            } else {
                self.memory_limit.set(request.memory_bytes);
            }
            match identity.become_sandbox(request, idle) {
                Ok(ipv6) => {
                    fork.on_kernel(KernelPart { reseeded: vec!["kernel".to_owned()], ipv6 });
                }
                Err(body) => return conn.fail(&body),
            }
        }
        conn.op = Op::PostFork(Box::new(fork));
        // The image's code is for what the warm-up made, and means nothing where that is gone.
        let code = self.defaults.post_fork.as_deref().filter(|_| !self.runtime.is_lost());
        if matches!(self.runtime.state(), RuntimeState::None | RuntimeState::Failed) {
            if code.is_some() {
                let missing = "there is no runtime for the image's post_fork code";
                return conn.fail(&failure(ErrorCode::HookFailed, missing));
            }
            return self.advance_post_fork(conn);
        }
        let payload = PostFork::runtime_request(request, code);
        if code.is_none() && self.runtime.put_off(&payload) {
            return self.advance_post_fork(conn);
        }
        self.submit(conn, Purpose::PostFork, payload, None);
    }

    /// Whether nothing runs in the guest but the agent and its runtime.
    fn has_no_programs(&self) -> bool {
        let mut known = vec![Pid::this()];
        known.extend(self.runtime.pid());
        let alone = processes::none_but(&known);
        alone.inspect_err(|error| log::line(&format!("/proc: {error}"))).unwrap_or(false)
    }

    fn on_runtime_forked(&mut self, conn: &mut Conn, payload: &[u8]) {
        let Op::PostFork(fork) = &mut conn.op else { return };
        match fork.on_runtime(payload) {
            Ok(()) => self.advance_post_fork(conn),
            Err(body) => conn.fail(&body),
        }
    }

    /// Runs the next hook, or answers.
    fn advance_post_fork(&mut self, conn: &mut Conn) {
        let Op::PostFork(fork) = &mut conn.op else { return };
        match fork.run_next(&mut self.launcher) {
            Ok(Some(pid)) => self.adopt(pid, conn.id),
            Ok(None) => {
                let reply = fork.reply();
                conn.reply(&reply);
            }
            Err(body) => conn.fail(&body),
        }
    }

    /// Ends the machine, or the process where there is no machine around it.
    pub(super) fn shut_down(&self) {
        if self.identity.is_none() {
            std::process::exit(0);
        }
        nix::unistd::sync();
        let Err(errno) = reboot(RebootMode::RB_POWER_OFF);
        log::line(&format!("cannot power off: {errno}"));
    }
}

/// Whether nobody can look at the guest's network by it, nor start a program.
fn leaves_the_guest_alone(request: &Request) -> bool {
    match request {
        Request::Ping
        | Request::Echo(_)
        | Request::Quiesce
        | Request::Freeze
        | Request::PostFork(_)
        | Request::SetTime(_)
        | Request::AdjustTime(_)
        | Request::Limit(_)
        | Request::Watch(_)
        | Request::Watched(_)
        | Request::Shutdown => true,
        Request::Exec(_)
        | Request::Connect(_)
        | Request::Eval(_)
        | Request::ReadFile(_)
        | Request::WriteFile(_)
        | Request::ReadArchive(_)
        | Request::WriteArchive(_)
        | Request::Stat(_)
        | Request::ListDir(_)
        | Request::MakeDir(_)
        | Request::Move(_)
        | Request::Remove(_)
        | Request::Warm(_)
        | Request::Configure(_) => false,
    }
}

pub(super) fn answer<T: serde::Serialize>(conn: &mut Conn, result: Outcome<T>) {
    match result {
        Ok(reply) => conn.reply(&reply),
        Err(body) => conn.fail(&body),
    }
}

fn number(pid: Pid) -> u32 {
    pid.as_raw().unsigned_abs()
}
