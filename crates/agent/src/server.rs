//! The poll loop: one thread that serves every client, and that nothing wakes but an event.
//!
//! Everything that has a descriptor is watched edge-triggered, and whatever happens to one part of
//! an operation drives all of it.  So there is nothing to arm and disarm, a quiet guest makes no
//! system call, and the way from a request to its answer is as short as it can be: wait, receive,
//! send.  There are no timers but the wait's own limit, and that only while an operation has a
//! deadline.
//!
//! What each operation does is in [`ops`]; this file knows descriptors.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use forkd_proto::guest::{ErrorCode, Nothing};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::net::{SocketFlags, accept_with};

use crate::child::Ended;
use crate::conn::{Conn, Op};
use crate::failure::{failure, refused};
use crate::identity::Identity;
use crate::image::Defaults;
use crate::runtime::Runtime;
use crate::sinks::{self, Sinks};
use crate::spawn::Launcher;
use crate::stream::Stream;
use crate::{disk, files, freeze, log, memory, quiesce};

mod ops;

/// Most clients at a time; the next one is told `busy`.
pub const CONNECTIONS_MAX: usize = 512;

/// How long until a client is accepted for whom there was no descriptor.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Stack of the thread that serves one operation on files.
const THREAD_STACK: usize = 128 << 10;

/// Bytes taken from a descriptor at once.  Only what was read is touched, so a large one costs
/// nothing.
const SCRATCH: usize = 64 << 10;

const EVENTS_MAX: usize = 64;

const LISTENER: u64 = 0;
const SIGNALS: u64 = 1;
const RETURNS: u64 = 2;
const RUNTIME: u64 = 3;
const CONNECTIONS: u64 = 16;

/// The agent.
#[derive(Debug)]
pub struct Server {
    epoll: Epoll,
    listener: OwnedFd,
    /// When to accept though no event says so: somebody could not be.
    accept_at: Option<Instant>,
    signals: SignalFd,
    conns: BTreeMap<u32, Box<Conn>>,
    conns_made: u32,
    /// Connections that threads have, and their way back.
    lent: usize,
    returns: Receiver<Returned>,
    returning: Sender<Returned>,
    returned: Arc<EventFd>,
    /// Whose operation each process belongs to.
    children: BTreeMap<Pid, u32>,
    /// Whether one was started whose end may have gone unnoticed.
    started: bool,
    /// Connections that have more to do than one turn allows.
    again: Vec<u32>,
    runtime: Runtime,
    runtime_again: bool,
    runtime_blocked: bool,
    sinks: Sinks,
    launcher: Launcher,
    defaults: Defaults,
    identity: Option<Identity>,
    disk_limit: disk::Limit,
    memory_limit: memory::Limit,
    folder: PathBuf,
    scratch: Box<[u8]>,
    now: Instant,
}

/// What a server is made of.
#[derive(Debug)]
pub struct Parts {
    /// A listening socket.
    pub listener: OwnedFd,
    /// What the image says.
    pub defaults: Defaults,
    /// Who the guest is; nobody, where there is no guest around the agent.
    pub identity: Option<Identity>,
    /// Starts its processes.
    pub launcher: Launcher,
    /// For the agent's own files, in memory.
    pub folder: PathBuf,
}

#[derive(Debug)]
struct Returned {
    conn: Box<Conn>,
    rehearse: bool,
}

/// What a thread does with a connection.
#[derive(Debug)]
enum Errand {
    Files(Box<files::Job>),
    Freeze,
    Shrink,
}

/// What becomes of a connection after its turn.
#[derive(Debug)]
enum Turn {
    Keep,
    Again,
    Close,
    Lend(Errand),
}

impl Server {
    /// An agent that listens, and has yet to [`run`](Self::run).  Blocks SIGCHLD in this thread and
    /// all that it starts.
    ///
    /// # Errors
    ///
    /// The kernel refused a descriptor.
    pub fn new(parts: Parts) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGCHLD);
        mask.thread_block()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        let returned = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        crate::spawn::set_nonblocking(&parts.listener)?;
        let readable = |token| EpollEvent::new(EpollFlags::EPOLLIN, token);
        epoll.add(&parts.listener, readable(LISTENER))?;
        epoll.add(&signals, readable(SIGNALS))?;
        epoll.add(&returned, readable(RETURNS))?;
        let (returning, returns) = channel();
        Ok(Self {
            epoll,
            listener: parts.listener,
            accept_at: None,
            signals,
            conns: BTreeMap::new(),
            conns_made: 0,
            lent: 0,
            returns,
            returning,
            returned: Arc::new(returned),
            children: BTreeMap::new(),
            started: false,
            again: Vec::new(),
            runtime: Runtime::none(),
            runtime_again: false,
            runtime_blocked: false,
            sinks: Sinks::default(),
            launcher: parts.launcher,
            defaults: parts.defaults,
            identity: parts.identity,
            disk_limit: disk::Limit::default(),
            memory_limit: memory::Limit::default(),
            folder: parts.folder,
            scratch: vec![0; SCRATCH].into_boxed_slice(),
            now: Instant::now(),
        })
    }

    /// Serves for ever.
    ///
    /// # Errors
    ///
    /// The poll itself failed, which the kernel does not do to those who ask properly.
    pub fn run(mut self) -> io::Result<std::convert::Infallible> {
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        loop {
            let count = match self.epoll.wait(&mut events, self.patience()) {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(errno) => return Err(errno.into()),
            };
            self.now = Instant::now();
            for event in events.iter().take(count) {
                self.on_event(event.data(), event.events());
            }
            self.on_time();
            for id in std::mem::take(&mut self.again) {
                self.drive(id);
            }
            if std::mem::take(&mut self.runtime_again) {
                self.drive_runtime();
            }
            if std::mem::take(&mut self.started) {
                self.reap();
            }
        }
    }

    /// How long the next wait may last.
    fn patience(&self) -> EpollTimeout {
        if !self.again.is_empty() || self.runtime_again || self.started {
            return EpollTimeout::ZERO;
        }
        let deadlines = self.conns.values().filter_map(|conn| conn.wake_at());
        let others = self.runtime.wake_at().into_iter().chain(self.accept_at);
        let Some(first) = deadlines.chain(others).min() else {
            return EpollTimeout::NONE;
        };
        // Rounded up: waking a moment early would mean waking twice.
        let wait = first.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
        EpollTimeout::try_from(wait).unwrap_or(EpollTimeout::MAX)
    }

    fn on_event(&mut self, token: u64, flags: EpollFlags) {
        match token {
            LISTENER => self.accept(),
            SIGNALS => {
                while let Ok(Some(_)) = self.signals.read_signal() {}
                self.reap();
            }
            RETURNS => self.take_back(),
            RUNTIME => {
                if let Some(stream) = self.runtime.stream() {
                    stream.readable = true;
                }
                self.drive_runtime();
            }
            sinks::FIRST_TOKEN.. => self.sinks.drain(token, &mut self.scratch),
            _ => self.on_connection(token, flags),
        }
    }

    fn on_connection(&mut self, token: u64, flags: EpollFlags) {
        let Ok(id) = u32::try_from((token - CONNECTIONS) / 2) else { return };
        let is_socket = token.is_multiple_of(2);
        let was_blocked = self.conns.get(&id).is_some_and(|conn| conn.blocked);
        if let Some(conn) = self.conns.get_mut(&id)
            && is_socket
        {
            let over = EpollFlags::EPOLLHUP | EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLERR;
            conn.gone |= flags.intersects(over);
            conn.stream.readable = true;
        }
        self.drive(id);
        if was_blocked && self.runtime.owner() == Some(id) {
            // Its client may have made room for more output.
            self.drive_runtime();
        }
    }

    /// Accepts the first who waits; the poll tells of others.  Asking whether there are any would
    /// have the kernel make a socket and a file, and free them again, in each fork.
    fn accept(&mut self) {
        use rustix::io::Errno;
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(socket) => self.welcome(socket),
            // A signal came, or the client has gone again.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            Err(error) => {
                if self.accept_at.is_none() {
                    log::line(&format!("cannot accept a connection: {error}"));
                    // Or who waits would wake us for ever.
                    self.watch_listener(EpollFlags::empty());
                }
                self.accept_at = Some(self.now + ACCEPT_RETRY);
                return;
            }
        }
        if self.accept_at.take().is_some() {
            self.watch_listener(EpollFlags::EPOLLIN);
        }
    }

    fn watch_listener(&self, flags: EpollFlags) {
        if let Err(error) = self.epoll.modify(&self.listener, &mut EpollEvent::new(flags, LISTENER))
        {
            log::line(&format!("cannot watch the listener: {error}"));
        }
    }

    fn welcome(&mut self, socket: OwnedFd) {
        let mut stream = Stream::new(socket);
        if self.conns.len() + self.lent >= CONNECTIONS_MAX {
            let body = failure(ErrorCode::Busy, format!("{CONNECTIONS_MAX} connections are open"));
            let mut refused = Conn::new(0, stream);
            refused.fail(&body);
            // It is told if it can be; it is closed in any case.
            drop(refused.stream.flush());
            return;
        }
        stream.readable = false;
        let id = self.conns_made;
        self.conns_made = self.conns_made.wrapping_add(1);
        let token = CONNECTIONS + 2 * u64::from(id);
        if let Err(error) = self.epoll.add(&stream, EpollEvent::new(CALM, token)) {
            log::line(&format!("cannot watch a connection: {error}"));
            return;
        }
        self.conns.insert(id, Box::new(Conn::new(id, stream)));
    }

    /// Watches whatever an operation of connection `id` reads and writes.
    fn watch(&self, id: u32, fd: impl AsFd) {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLOUT | EpollFlags::EPOLLET;
        let token = CONNECTIONS + 2 * u64::from(id) + 1;
        if let Err(error) = self.epoll.add(fd, EpollEvent::new(flags, token)) {
            log::line(&format!("cannot watch a process: {error}"));
        }
    }

    fn watch_runtime(&self) {
        let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET;
        for fd in self.runtime.descriptors() {
            if let Err(error) = self.epoll.add(fd, EpollEvent::new(flags, RUNTIME)) {
                log::line(&format!("cannot watch the runtime: {error}"));
            }
        }
    }

    /// Gives a connection its turn.
    fn drive(&mut self, id: u32) {
        let Some(mut conn) = self.conns.remove(&id) else { return };
        match self.take_turn(&mut conn) {
            Turn::Keep => drop(self.conns.insert(id, conn)),
            Turn::Again => {
                self.again.push(id);
                self.conns.insert(id, conn);
            }
            Turn::Close => self.close(conn),
            Turn::Lend(errand) => self.lend(conn, errand),
        }
    }

    fn take_turn(&mut self, conn: &mut Conn) -> Turn {
        let mut again = false;
        loop {
            if conn.gone {
                return Turn::Close;
            }
            again |= self.advance(conn);
            if !conn.wants_frames() {
                break;
            }
            match conn.stream.next_frame() {
                Ok(Some((kind, payload))) => {
                    if let Some(errand) = self.on_frame(conn, kind, &payload) {
                        return Turn::Lend(errand);
                    }
                    continue;
                }
                Ok(None) => {}
                Err(error) => {
                    self.break_off(conn, &failure(ErrorCode::Protocol, error.to_string()));
                    break;
                }
            }
            match conn.stream.fill(&mut self.scratch) {
                Ok(true) => {}
                Ok(false) if conn.stream.ended => return Turn::Close,
                Ok(false) => break,
                Err(_) => return Turn::Close,
            }
        }
        self.flush(conn, again)
    }

    fn flush(&mut self, conn: &mut Conn, again: bool) -> Turn {
        let Ok(clear) = conn.stream.flush() else { return Turn::Close };
        // What took no more because of the backlog has seen its last edge: it gets another turn.
        let again = again || (conn.blocked && clear);
        match (&conn.op, clear) {
            (Op::Closing, true) => return Turn::Close,
            (Op::Shutdown, true) => self.shut_down(),
            _ => {}
        }
        if clear == conn.blocked {
            // Only a client that does not read is watched for reading: room appears with every
            // answer that is read, and would wake us each time.
            let flags = if clear { CALM } else { CALM | EpollFlags::EPOLLOUT };
            let token = CONNECTIONS + 2 * u64::from(conn.id);
            conn.blocked = !clear;
            if let Err(error) = self.epoll.modify(&conn.stream, &mut EpollEvent::new(flags, token))
            {
                log::line(&format!("cannot watch a connection: {error}"));
                return Turn::Close;
            }
        }
        if again && clear { Turn::Again } else { Turn::Keep }
    }

    fn lend(&mut self, mut conn: Box<Conn>, errand: Errand) {
        let id = conn.id;
        let (returning, returned) = (self.returning.clone(), Arc::clone(&self.returned));
        let work = move || {
            let rehearse = matches!(errand, Errand::Shrink);
            match errand {
                Errand::Shrink => quiesce::shrink(),
                Errand::Freeze => {
                    let frozen = freeze::root().map(|()| Nothing {});
                    let failed = |error| refused("cannot freeze the root file system", &error);
                    ops::answer(&mut conn, frozen.map_err(failed));
                }
                Errand::Files(job) => {
                    conn.gone = files::serve(&job, &mut conn.stream).is_err();
                }
            }
            let sent = returning.send(Returned { conn, rehearse }).is_ok();
            if !sent || returned.write(1).is_err() {
                log::line("a connection was lost on its way back");
            }
        };
        match thread::Builder::new().stack_size(THREAD_STACK).spawn(work) {
            Ok(_) => self.lent += 1,
            // The connection went with the closure, and so the client sees it close.
            Err(error) => log::line(&format!("no thread for connection {id}: {error}")),
        }
    }

    fn take_back(&mut self) {
        if let Err(errno) = self.returned.read() {
            log::line(&format!("cannot count the connections that come back: {errno}"));
        }
        while let Ok(Returned { mut conn, rehearse }) = self.returns.try_recv() {
            self.lent -= 1;
            conn.stream.readable = true;
            let id = conn.id;
            if rehearse {
                self.rehearse(&mut conn);
            }
            self.conns.insert(id, conn);
            self.drive(id);
        }
    }

    fn on_time(&mut self) {
        let due = |conn: &Conn| conn.wake_at().is_some_and(|at| at <= self.now);
        let late: Vec<u32> =
            self.conns.values().filter(|conn| due(conn)).map(|conn| conn.id).collect();
        for id in late {
            self.drive(id);
        }
        if self.accept_at.is_some_and(|at| at <= self.now) {
            self.accept();
        }
        self.runtime.on_time(self.now);
    }

    /// Collects every process that has ended: ours, and in a guest without an init of its own
    /// everybody's.
    fn reap(&mut self) {
        while let Ok(status) = waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            let Some((pid, ended)) = Ended::from_status(status) else { return };
            if self.runtime.pid() == Some(pid) {
                self.on_runtime_end(ended);
            } else if let Some(id) = self.children.remove(&pid) {
                self.on_child_end(id, pid, ended);
                self.drive(id);
            }
        }
    }

    /// Lets the runtime's output and answers go to whom they belong.
    fn drive_runtime(&mut self) {
        let client = self.runtime.owner().and_then(|id| self.conns.remove(&id));
        let (answer, more) = match client {
            Some(mut conn) => {
                let driven =
                    self.runtime.drive(Some(&mut conn.stream), &mut self.scratch, self.now);
                let id = conn.id;
                self.conns.insert(id, conn);
                if driven.0.is_none() {
                    self.drive(id);
                }
                driven
            }
            None => self.runtime.drive(None, &mut self.scratch, self.now),
        };
        self.runtime_again |= more;
        if let Some(answer) = answer {
            self.deliver(answer);
        }
        self.flush_runtime();
    }

    /// Sends the runtime what is meant for it; what does not fit is tried again when it has read.
    fn flush_runtime(&mut self) {
        let Some(stream) = self.runtime.stream() else { return };
        // A broken socket means that the process is ending, and that arrives as a signal.
        let clear = stream.flush().unwrap_or(true);
        let room = if clear { EpollFlags::empty() } else { EpollFlags::EPOLLOUT };
        if !clear || self.runtime_blocked {
            let flags = EpollFlags::EPOLLIN | EpollFlags::EPOLLET | room;
            self.runtime_blocked = !clear;
            if let Err(error) = self.epoll.modify(&*stream, &mut EpollEvent::new(flags, RUNTIME)) {
                log::line(&format!("cannot watch the runtime: {error}"));
            }
        }
    }
}

/// What a connection is watched for, unless it is blocked.
const CALM: EpollFlags =
    EpollFlags::EPOLLIN.union(EpollFlags::EPOLLRDHUP).union(EpollFlags::EPOLLET);
