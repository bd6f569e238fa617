//! The host's side of vsock: Unix sockets bridged to the streams of the device.
//!
//! A client connects to `vsock.sock` and sends `CONNECT <port>\n`; after `OK <port>\n`
//! the stream is the guest's (Firecracker's convention, which clients know).  A
//! guest that connects to port P of the host gets the Unix socket
//! `vsock.sock_P`, if somebody listens there.
//!
//! Both the I/O thread and vCPU threads work here, under one lock: a vCPU thread
//! that brings a packet writes it to the socket at once, which spares a thread
//! switch in every answer.  Sockets never block; what does not fit waits in the
//! device, whose credit holds the guest back.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_devices::virtio::mmio::Mmio;
use forkd_devices::virtio::vsock::{Id, RX_QUEUE, Shutdown, TX_QUEUE, Vsock, VsockEvent};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::error::Error;
use crate::io::client::{Greeting, Link};
use crate::io::queues::{PASSES_MAX, write_and_serve};
use crate::memory::question::Question;
use crate::sys::clock::realtime_ns;
use crate::sys::listener::Listener;

/// Bytes moved between a socket and the device at a time, at first: short questions and answers
/// shall not make a fork own pages that it does not need.
const CHUNK_BYTES_MIN: usize = 2 << 10;
/// The same, once a chunk was filled.
const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Clients that have connected and not yet said where to; further ones wait.
pub const GREETINGS_MAX: usize = 64;

/// How long after a guest refused the VMM's call its agent is called again.
const CALL_AGAIN: Duration = Duration::from_millis(250);
/// So many refusals in a row, over five seconds, and the agent is gone.  A guest that is short of
/// memory refuses a few.
const REFUSALS_MAX: u32 = 20;

/// What the I/O loop hands to [`VsockHost::on_socket`]: which socket is ready.
pub type Token = u32;

/// The vsock device with the sockets behind it.
#[derive(Debug)]
pub struct VsockHost {
    device: Mmio<Vsock>,
    epoll: Arc<Epoll>,
    tag: u64,
    path: PathBuf,
    listener: Option<Listener>,
    greetings: BTreeMap<Token, Greeting>,
    links: BTreeMap<Token, Link>,
    by_id: BTreeMap<Id, Token>,
    ids: BTreeMap<Token, Id>,
    next_token: Token,
    chunk: Vec<u8>,
    question: Option<Question>,
    /// A connection to a port of the guest that nobody uses.
    spare: Option<(Id, u32)>,
    /// Whether the agent is there, of a guest whose agent has been met.
    agent: Option<Agent>,
    /// Whether [`Self::pump`] ended at its limit.
    rest: bool,
}

/// The agent, to which the VMM always has a connection: the guest's kernel closes it when the agent
/// ends, and says so by itself.  So nobody asks a guest that does nothing.
#[derive(Debug)]
struct Agent {
    port: u32,
    /// A connection has ended, so that there may be none.
    look: bool,
    /// The VMM's call that the guest has not answered yet.
    call: Option<Id>,
    /// Calls in a row that it refused.
    refused: u32,
    /// When it is called again.
    due: Option<Instant>,
}

impl Agent {
    fn at(port: u32) -> Self {
        Self { port, look: false, call: None, refused: 0, due: None }
    }
}

/// The token that stands for the listening socket.
pub const LISTENER: Token = 0;

impl VsockHost {
    /// Bridges `device` to sockets at `path`, watched by `epoll` under tokens above `tag`.
    #[must_use]
    pub fn new(device: Mmio<Vsock>, path: PathBuf, epoll: Arc<Epoll>, tag: u64) -> Self {
        Self {
            device,
            epoll,
            tag,
            path,
            listener: None,
            greetings: BTreeMap::new(),
            links: BTreeMap::new(),
            by_id: BTreeMap::new(),
            ids: BTreeMap::new(),
            next_token: LISTENER + 1,
            chunk: vec![0; CHUNK_BYTES_MIN],
            question: None,
            spare: None,
            agent: None,
            rest: false,
        }
    }

    /// Tells `question` of the first client, and of its answer.
    pub fn expect(&mut self, question: Question) {
        self.question = Some(question);
    }

    /// The host's wall clock when the guest last sent anything on connection `id`, in nanoseconds
    /// since the epoch; 0 if it has not.
    #[must_use]
    pub fn received_ns(&self, id: Id) -> i64 {
        let link = self.by_id.get(&id).and_then(|token| self.links.get(token));
        link.map_or(0, |link| link.received_ns)
    }

    /// Opens `vsock.sock` to clients.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the socket cannot be made.
    pub fn listen(&mut self) -> Result<(), Error> {
        self.listener = Some(Listener::bind(&self.path)?);
        self.admit()
    }

    /// Ends every connection and goes on with `device`, for a guest that knows of none.  Nobody is
    /// let in until [`Self::admit`].
    pub fn rewind(&mut self, device: Mmio<Vsock>) {
        self.device = device;
        // Closing the sockets ends their watches.
        self.greetings.clear();
        self.links.clear();
        self.by_id.clear();
        self.ids.clear();
        self.spare = None;
        self.agent = None;
        if let Some(question) = &mut self.question {
            question.again();
        }
        if let Some(listener) = &self.listener {
            let fd = listener.descriptor();
            // It is watched, so this cannot fail.
            drop(self.watch(ControlOperation::Delete, fd, EventSet::empty(), LISTENER));
        }
    }

    /// Lets clients in.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the kernel has no memory for it.
    pub fn admit(&self) -> Result<(), Error> {
        self.listener
            .as_ref()
            .map_or(Ok(()), |listener| listener.watch(&self.epoll, self.tag | u64::from(LISTENER)))
    }

    /// Connects the VMM itself to a port of the guest: what is written to the other end of `stream`
    /// arrives there.
    ///
    /// That may be at once; the bytes wait until the guest has accepted.  Whoever is done with it
    /// may [`Self::pass_on`] the connection.
    ///
    /// # Errors
    ///
    /// [`Error::Guest`] if the device has no room, [`Error::Io`] if the socket cannot be watched.
    pub fn connect(&mut self, port: u32, stream: UnixStream) -> Result<Id, Error> {
        let id =
            self.device.device_mut().open(port).map_err(|_| {
                Error::Guest("the vsock device has no room for a connection".into())
            })?;
        self.add_link(stream, id, false)?;
        Ok(id)
    }

    /// Keeps a connection of the VMM's, whose stream ends here, for the next client of its port.
    ///
    /// The guest need not close the one and accept another, and a machine that nobody talks to
    /// does neither.  What was said must be complete on both sides.
    pub fn pass_on(&mut self, id: Id) {
        let Some(token) = self.by_id.remove(&id) else { return };
        self.ids.remove(&token);
        self.links.remove(&token);
        let status = self.device.device().status(id);
        if let Some(open) = status.filter(|status| !status.done && !status.deaf) {
            if let Some((older, _)) = self.spare.replace((id, open.ports.guest)) {
                self.device.device_mut().reset(older);
            }
            let agent = self.agent.get_or_insert_with(|| Agent::at(open.ports.guest));
            agent.refused = 0;
        } else {
            // Its end was heard already, so nobody would tell the next client.
            self.device.device_mut().reset(id);
            self.look_for_agent();
        }
    }

    /// Whether the agent, which was met, refuses every connection.
    #[must_use]
    pub fn agent_is_gone(&self) -> bool {
        self.agent.as_ref().is_some_and(|agent| agent.refused >= REFUSALS_MAX)
    }

    /// Whether it is time for [`Self::call_agent`].
    #[must_use]
    pub fn agent_is_due(&self) -> bool {
        self.agent_due_in().is_some_and(|left| left.is_zero())
    }

    /// When it is, if ever.
    #[must_use]
    pub fn agent_due_in(&self) -> Option<Duration> {
        let due = self.agent.as_ref()?.due?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Calls the agent if nobody has a connection to it.  Call [`Self::pump`] afterwards.
    pub fn call_agent(&mut self) {
        let Some(agent) = &mut self.agent else { return };
        (agent.look, agent.due) = (false, None);
        let (port, called) = (agent.port, agent.call.is_some());
        if called || self.spare.is_some_and(|(_, its)| its == port) || self.is_linked(port) {
            return;
        }
        let opened = self.device.device_mut().open(port);
        if let Some(agent) = &mut self.agent {
            match opened {
                Ok(id) => agent.call = Some(id),
                Err(_) => agent.due = Some(Instant::now() + CALL_AGAIN),
            }
        }
    }

    /// Whether a client has a connection to `port` that the guest has not ended, or waits for one.
    fn is_linked(&self, port: u32) -> bool {
        self.by_id.iter().any(|(id, token)| {
            let open = self.links.get(token).is_some_and(|link| !link.guest_done);
            open && self.device.device().status(*id).is_some_and(|one| one.ports.guest == port)
        })
    }

    fn look_for_agent(&mut self) {
        if let Some(agent) = &mut self.agent {
            agent.look = true;
        }
    }

    /// Hears of the VMM's call of the agent.
    fn called(&mut self, id: Id, event: VsockEvent) {
        let Some(agent) = self.agent.as_mut().filter(|agent| agent.call == Some(id)) else {
            return;
        };
        match event {
            VsockEvent::Connected(_) => {
                (agent.call, agent.refused) = (None, 0);
                if self.spare.is_none() {
                    self.spare = Some((id, agent.port));
                } else {
                    self.device.device_mut().reset(id);
                }
            }
            VsockEvent::Closed(_) | VsockEvent::HalfClosed { .. } => {
                agent.call = None;
                agent.refused += 1;
                agent.due = Some(Instant::now() + CALL_AGAIN);
                self.device.device_mut().reset(id);
                // The I/O thread is to know when it is due, and may not be the one that hears this.
                self.rest = true;
            }
            _ => {}
        }
    }

    /// The transport and the device, for a snapshot.
    #[must_use]
    pub fn device(&self) -> &Mmio<Vsock> {
        &self.device
    }

    /// Whether an interrupt is pending in the device.
    #[must_use]
    pub fn interrupt_pending(&self) -> bool {
        self.device.interrupt_pending()
    }

    /// A guest's load from a register.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.device.read(offset, data);
    }

    /// A guest's store to a register.  Returns whether an interrupt is due.
    pub fn write(&mut self, memory: &GuestMemoryMmap, offset: u64, data: &[u8]) -> bool {
        let interrupt = write_and_serve(&mut self.device, memory, offset, data);
        self.pump(memory) | interrupt
    }

    /// A socket is ready.  Call [`Self::pump`] afterwards.
    pub fn on_socket(&mut self, token: Token) {
        if token == LISTENER {
            self.accept();
        } else if self.greetings.contains_key(&token) {
            self.greet(token);
        } else if self.links.contains_key(&token) {
            self.deliver(token);
            self.collect(token);
            self.settle(token);
        }
    }

    /// Moves everything that can move, or as much as is one turn's share.  Returns whether an
    /// interrupt is due.  Look at [`Self::has_rest`] afterwards.
    pub fn pump(&mut self, memory: &GuestMemoryMmap) -> bool {
        let (mut interrupt, mut waits) = (false, false);
        self.rest = false;
        for _ in 0..PASSES_MAX {
            interrupt |= self.device.process(memory, RX_QUEUE);
            if self.device.is_unfinished(TX_QUEUE) {
                interrupt |= self.device.process(memory, TX_QUEUE);
            }
            let events: Vec<VsockEvent> = self.device.device_mut().drain_events().collect();
            if events.is_empty() && !self.device.unfinished() {
                // A connection that has ended makes room for a client.
                self.accept_waiting();
                if self.agent.as_ref().is_some_and(|agent| agent.look) {
                    self.call_agent();
                    continue;
                }
                self.rest = waits;
                return interrupt;
            }
            for event in events {
                self.on_event(event);
            }
            waits |= std::mem::take(&mut self.rest);
        }
        self.rest = true;
        interrupt
    }

    /// Whether the last [`Self::pump`] left something, of which nobody will tell.
    #[must_use]
    pub fn has_rest(&self) -> bool {
        self.rest
    }

    fn on_event(&mut self, event: VsockEvent) {
        if let VsockEvent::Incoming { id, host_port, .. } = event {
            return self.connect_out(id, host_port);
        }
        let id = match event {
            VsockEvent::Connected(id)
            | VsockEvent::Readable(id)
            | VsockEvent::Writable(id)
            | VsockEvent::Closed(id)
            | VsockEvent::HalfClosed { id, .. } => id,
            VsockEvent::Incoming { .. } => return,
        };
        let Some(token) = self.by_id.get(&id).copied() else { return self.give_up(id, event) };
        let host_port = self.device.device().status(id).map_or(0, |status| status.ports.host);
        if let Some(link) = self.links.get_mut(&token) {
            match event {
                VsockEvent::Connected(_) => link.accepted(host_port),
                VsockEvent::HalfClosed { done, .. } => link.guest_done |= done,
                _ => {}
            }
            if link.guest_done || matches!(event, VsockEvent::Closed(_)) {
                self.look_for_agent();
            }
        }
        self.deliver(token);
        self.collect(token);
        if let (VsockEvent::Closed(_), Some(link)) = (event, self.links.get_mut(&token)) {
            (link.closed, link.guest_done) = (true, true);
            self.by_id.remove(&id);
            self.ids.remove(&token);
        }
        self.settle(token);
    }

    /// Hears of a connection that has no socket: only the spare one is of interest, and the call.
    fn give_up(&mut self, id: Id, event: VsockEvent) {
        self.called(id, event);
        let over = matches!(event, VsockEvent::HalfClosed { .. } | VsockEvent::Closed(_));
        if over && self.spare.take_if(|(spare, _)| *spare == id).is_some() {
            self.device.device_mut().reset(id);
            self.look_for_agent();
        }
    }

    /// Accepts those who waited for room, or for the kernel.  To be called whenever the poll loop
    /// has served what woke it.  Returns when to be called again though nothing happened.
    pub fn accept_waiting(&mut self) -> Option<Duration> {
        if self.listener.as_ref().is_some_and(Listener::is_waiting) {
            self.accept();
        }
        self.listener.as_ref().and_then(Listener::retry)
    }

    fn accept(&mut self) {
        loop {
            // Each that is greeted is to have a connection.
            let greeted = self.greetings.len();
            let room = greeted < GREETINGS_MAX && greeted < self.device.device().room();
            let accepted = self.listener.as_mut().and_then(|listener| listener.accept(room));
            let Some(stream) = accepted else { return };
            if stream.set_nonblocking(true).is_err() {
                continue; // dropping the stream is the refusal
            }
            let token = self.take_token();
            if self.watch(ControlOperation::Add, stream.as_raw_fd(), EventSet::IN, token).is_ok() {
                self.greetings.insert(token, Greeting { stream, line: Vec::new() });
            }
        }
    }

    fn greet(&mut self, token: Token) {
        let Some(mut greeting) = self.greetings.remove(&token) else { return };
        match greeting.read() {
            Ok(None) => {
                self.greetings.insert(token, greeting);
            }
            Ok(Some(port)) => {
                let spare = self.spare.take_if(|(_, its)| *its == port);
                let opened = match spare {
                    Some((id, _)) => Ok(id),
                    None => self.device.device_mut().open(port),
                };
                let Ok(id) = opened else { return self.forget(&greeting.stream) };
                if let Some(question) = &mut self.question {
                    question.asked();
                }
                self.insert_link(token, greeting.stream, id, true);
                if spare.is_some() {
                    self.on_event(VsockEvent::Connected(id));
                }
            }
            Err(()) => self.forget(&greeting.stream),
        }
    }

    fn connect_out(&mut self, id: Id, port: u32) {
        let mut path = self.path.clone().into_os_string();
        path.push(format!("_{port}"));
        let stream = UnixStream::connect(Path::new(&path));
        let accepted = stream.and_then(|stream| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => {
                let wanted = self.device.device_mut().accept(id);
                if wanted && self.add_link(stream, id, false).is_ok() {
                    if let Some(link) =
                        self.by_id.get(&id).and_then(|token| self.links.get_mut(token))
                    {
                        link.connected = true;
                    }
                } else {
                    self.device.device_mut().reset(id);
                }
            }
            Err(_) => self.device.device_mut().refuse(id),
        }
    }

    fn add_link(&mut self, stream: UnixStream, id: Id, greets: bool) -> Result<(), Error> {
        stream.set_nonblocking(true).map_err(Error::io("configure a socket"))?;
        let token = self.take_token();
        self.watch(ControlOperation::Add, stream.as_raw_fd(), EventSet::IN, token)?;
        self.insert_link(token, stream, id, greets);
        Ok(())
    }

    /// Adds a link whose socket is watched for input already.
    fn insert_link(&mut self, token: Token, stream: UnixStream, id: Id, greets: bool) {
        let link = Link {
            stream,
            greets,
            connected: false,
            leftover: Vec::new(),
            guest_done: false,
            client_done: false,
            closed: false,
            interest: EventSet::IN,
            received_ns: 0,
        };
        self.links.insert(token, link);
        self.by_id.insert(id, token);
        self.ids.insert(token, id);
        self.settle(token);
    }

    /// Guest to socket.
    fn deliver(&mut self, token: Token) {
        let Some(link) = self.links.get_mut(&token) else { return };
        while link.flush() {
            let Some(id) = self.ids.get(&token) else { return };
            let count = self.device.device_mut().take(*id, &mut self.chunk);
            if count == 0 {
                return;
            }
            link.leftover.extend_from_slice(&self.chunk[..count]);
            link.received_ns = realtime_ns();
            if let Some(question) = self.question.as_mut().filter(|_| link.greets) {
                question.answered();
            }
            grow(&mut self.chunk, count);
        }
    }

    /// Socket to guest.
    fn collect(&mut self, token: Token) {
        let (Some(link), Some(id)) = (self.links.get_mut(&token), self.ids.get(&token)) else {
            return;
        };
        let device = self.device.device_mut();
        while link.connected && !link.client_done {
            let room = device.writable(*id).min(self.chunk.len());
            if room == 0 {
                return;
            }
            match link.stream.read(&mut self.chunk[..room]) {
                Ok(0) => {
                    link.client_done = true;
                    device.shutdown(*id, Shutdown::Write);
                }
                Ok(read) => {
                    device.send(*id, &self.chunk[..read]);
                    grow(&mut self.chunk, read);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    // The device says no more of an id that was reset.
                    (link.client_done, link.guest_done, link.closed) = (true, true, true);
                    link.leftover.clear();
                    device.reset(*id);
                    if let Some(agent) = &mut self.agent {
                        agent.look = true;
                    }
                }
            }
        }
    }

    /// Watches the socket of a link for what it can use now, or drops a link that is over.
    fn settle(&mut self, token: Token) {
        let Some(link) = self.links.get_mut(&token) else { return };
        let drained = link.leftover.is_empty();
        if link.closed && drained {
            if let Some(link) = self.links.remove(&token) {
                self.forget(&link.stream);
            }
            return;
        }
        if link.guest_done && drained {
            // The client may be gone; then there is nobody to tell.
            drop(link.stream.shutdown(std::net::Shutdown::Write));
        }
        let room = self.ids.get(&token).map_or(0, |id| self.device.device_mut().writable(*id));
        let mut interest = EventSet::empty();
        interest.set(EventSet::IN, link.connected && !link.client_done && room > 0);
        interest.set(EventSet::OUT, !drained);
        if interest != link.interest {
            link.interest = interest;
            let fd = link.stream.as_raw_fd();
            // The descriptor is ours and watched, so this fails only if memory runs out.
            drop(self.watch(ControlOperation::Modify, fd, interest, token));
        }
    }

    fn forget(&self, stream: &UnixStream) {
        drop(self.watch(ControlOperation::Delete, stream.as_raw_fd(), EventSet::empty(), 0));
    }

    fn watch(
        &self,
        operation: ControlOperation,
        fd: i32,
        interest: EventSet,
        token: Token,
    ) -> Result<(), Error> {
        let event = EpollEvent::new(interest, self.tag | u64::from(token));
        self.epoll.ctl(operation, fd, event).map_err(Error::io("watch a vsock socket"))
    }

    fn take_token(&mut self) -> Token {
        let in_use = |host: &Self, token| {
            token == LISTENER
                || host.greetings.contains_key(&token)
                || host.links.contains_key(&token)
        };
        while in_use(self, self.next_token) {
            self.next_token = self.next_token.wrapping_add(1);
        }
        let token = self.next_token;
        self.next_token = token.wrapping_add(1);
        token
    }
}

impl Drop for VsockHost {
    fn drop(&mut self) {
        if self.listener.is_some() {
            // Best effort: the folder may be gone already.
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Makes a chunk larger that was just filled.
fn grow(chunk: &mut Vec<u8>, filled: usize) {
    if filled == chunk.len() && filled < CHUNK_BYTES_MAX {
        chunk.resize(CHUNK_BYTES_MAX, 0);
    }
}

#[cfg(test)]
mod tests;
