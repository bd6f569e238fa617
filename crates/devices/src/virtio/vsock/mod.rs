//! Stream connections between the host and the guest.
//!
//! Queue 0 receives, queue 1 sends, queue 2 is for events and unused.  The
//! configuration space holds the guest's address, 8 bytes: [`GUEST_CID`].
//!
//! # Host side
//!
//! This file does no I/O.  The host calls [`Vsock::open`], [`Vsock::send`],
//! [`Vsock::take`] and so on, then processes [`RX_QUEUE`] if
//! [`Vsock::has_pending`]; whenever a queue was processed it looks at
//! [`Vsock::drain_events`].  A connection's life, seen from the host:
//!
//! ```text
//!   open ──► Connected ──┬─► Readable, Writable, HalfClosed … ──► Closed
//!   Incoming ──► accept ─┘                                 reset ──► (gone)
//! ```
//!
//! `Closed` comes once everything received has been taken, and is the last that
//! is heard of an id.  [`Vsock::reset`] forgets an id at once, without it.
//!
//! # Trust
//!
//! The guest chooses every header.  A packet with a wrong address or length is
//! dropped and counted; one that does not fit the connection it names, or sends
//! more than we gave credit for, resets that connection.  Connections are
//! limited by [`CONNECTIONS_MAX`], pending resets with them by [`TABLE_MAX`],
//! bytes by [`BUFFER_BYTES`] and [`SEND_BYTES_MAX`] per connection, and those
//! from the guest by [`RECEIVED_BYTES_MAX`] in all.
//! An id whose `Closed` the host has not seen still counts, so that a guest
//! cannot make events pile up.  Idle connections keep no buffers.
//!
//! # Forks
//!
//! Connections die at a fork and listeners live on.  A restored device knows no
//! connection, and first of all sends the guest a reset for each that it had.
//! There is no transport-reset event: a connection opened just after it could
//! overtake it in the guest.

mod connection;
mod model;
mod packet;

use std::collections::{BTreeMap, VecDeque};

use virtio_queue::Queue;
use vm_memory::GuestMemory;

use super::chain::{Chain, Served, serve};
use super::mmio::RestoreError;
use super::{Broken, Progress, QUEUE_SIZE_MAX, TRANSPORT_FEATURES, VirtioDevice, read_space};
use connection::{Connection, Due, Phase};
pub use model::{Full, Id, Ports, Shutdown, Status, VsockEvent, VsockState};
use packet::{
    HEADER_BYTES, Header, KIND_STREAM, OP_CREDIT_REQUEST, OP_CREDIT_UPDATE, OP_REQUEST,
    OP_RESPONSE, OP_RST, OP_RW, OP_SHUTDOWN, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};

/// The queue of buffers for packets to the guest.
pub const RX_QUEUE: usize = 0;

/// The queue of packets from the guest.
pub const TX_QUEUE: usize = 1;

/// The guest's address, in every machine: they never meet.
pub const GUEST_CID: u64 = 3;

/// The host's address.
pub const HOST_CID: u64 = 2;

/// Most connections at a time, those not yet reported as closed included.
pub const CONNECTIONS_MAX: usize = 1024;

/// Most connections that the guest believes in plus resets it has yet to hear.
pub const TABLE_MAX: usize = 2048;

/// Bytes that the guest may send on a connection before the host takes any.
pub const BUFFER_BYTES: u32 = 256 * 1024;

/// Bytes that the host may send on a connection before the guest has buffers.
pub const SEND_BYTES_MAX: usize = 64 * 1024;

/// Most bytes from the guest buffered for all connections together.
pub const RECEIVED_BYTES_MAX: usize = 64 * 1024 * 1024;

/// Longest payload of one packet from the guest.
pub const PACKET_BYTES_MAX: u32 = 64 * 1024;

/// The first port that the host calls from.
pub const HOST_PORT_MIN: u32 = 1 << 30;

const VIRTIO_ID_VSOCK: u32 = 19;

/// The device.
#[derive(Debug)]
pub struct Vsock {
    // Invariant: at most CONNECTIONS_MAX.
    connections: BTreeMap<Id, Connection>,
    // Invariant: exactly the connections that are not `Finished`.
    by_ports: BTreeMap<Ports, Id>,
    next_id: u64,
    next_port: u32,
    // Invariant: with `by_ports`, at most TABLE_MAX.
    resets: VecDeque<Reset>,
    /// Connections with packets to send, each once, in turn.
    ready: VecDeque<Id>,
    /// Events that were not reported, as bits, by connection.
    eventful: BTreeMap<Id, u8>,
    /// Bytes that can be taken from all connections together.
    received: usize,
    rejected: u64,
}

/// A reset that the guest has yet to hear.
#[derive(Clone, Copy, Debug)]
struct Reset {
    ports: Ports,
    kind: u16,
}

// Bits of `eventful`, reported in this order.
const CONNECTED: u8 = 1;
const INCOMING: u8 = 2;
const READABLE: u8 = 4;
const WRITABLE: u8 = 8;
const HALF_CLOSED: u8 = 16;
const CLOSED: u8 = 32;

impl Default for Vsock {
    fn default() -> Self {
        Self::new()
    }
}

impl Vsock {
    /// A device without connections.
    #[must_use]
    pub fn new() -> Self {
        Self {
            connections: BTreeMap::new(),
            by_ports: BTreeMap::new(),
            next_id: 0,
            next_port: HOST_PORT_MIN,
            resets: VecDeque::new(),
            ready: VecDeque::new(),
            eventful: BTreeMap::new(),
            received: 0,
            rejected: 0,
        }
    }

    /// A device without connections, that tells the guest first of all that
    /// those of `state` are gone.
    ///
    /// # Errors
    ///
    /// [`RestoreError`] if no device could have saved `state`.
    pub fn restore(state: &VsockState) -> Result<Self, RestoreError> {
        if state.connections.len() > TABLE_MAX {
            return Err(RestoreError::Connections(state.connections.len()));
        }
        if state.next_port < HOST_PORT_MIN {
            return Err(RestoreError::NextPort(state.next_port));
        }
        let resets = state.connections.iter().map(|&ports| Reset { ports, kind: KIND_STREAM });
        Ok(Self { resets: resets.collect(), next_port: state.next_port, ..Self::new() })
    }

    /// What to put in a snapshot.
    #[must_use]
    pub fn save(&self) -> VsockState {
        let pending = self.resets.iter().map(|reset| reset.ports);
        let connections = pending.chain(self.by_ports.keys().copied()).collect();
        VsockState { next_port: self.next_port, connections }
    }

    /// Calls `guest_port`; `Connected` or `Closed` follows.
    ///
    /// # Errors
    ///
    /// [`Full`] if there may be no more connections.
    pub fn open(&mut self, guest_port: u32) -> Result<Id, Full> {
        let mut ports = Ports { host: self.next_port, guest: guest_port };
        while self.by_ports.contains_key(&ports) {
            ports.host = port_after(ports.host);
        }
        let id = self.add(ports, Phase::Requested).ok_or(Full)?;
        self.next_port = port_after(ports.host);
        self.change(id, |connection| connection.due.add(Due::REQUEST));
        Ok(id)
    }

    /// Accepts what was `Incoming`; false if the guest has given up.
    pub fn accept(&mut self, id: Id) -> bool {
        self.change(id, |connection| {
            let offered = connection.phase == Phase::Offered;
            if offered {
                connection.phase = Phase::Established;
                connection.due.add(Due::RESPONSE);
            }
            offered
        })
        .unwrap_or(false)
    }

    /// Refuses what was `Incoming`; its id means nothing afterwards.
    pub fn refuse(&mut self, id: Id) {
        self.reset(id);
    }

    /// How a connection stands; `None` once it is gone.
    #[must_use]
    pub fn status(&self, id: Id) -> Option<Status> {
        self.connections.get(&id).map(|connection| Status {
            ports: connection.ports,
            readable: connection.readable(),
            writable: connection.writable(),
            done: connection.guest_is_done(),
            deaf: connection.guest_is_deaf(),
        })
    }

    /// How many more connections there may be.
    #[must_use]
    pub fn room(&self) -> usize {
        let connections = CONNECTIONS_MAX.saturating_sub(self.connections.len());
        connections.min(TABLE_MAX.saturating_sub(self.table()))
    }

    /// Bytes that can be taken from all connections together.
    #[must_use]
    pub fn received_bytes(&self) -> usize {
        self.received
    }

    /// Bytes that [`Vsock::send`] would accept now.
    #[must_use]
    pub fn writable(&self, id: Id) -> usize {
        self.connections.get(&id).map_or(0, Connection::writable)
    }

    /// Accepts the front of `bytes`, as much as there is room for, and returns
    /// how much.  `Writable` follows when there is room again.
    pub fn send(&mut self, id: Id, bytes: &[u8]) -> usize {
        self.change(id, |connection| connection.send(bytes)).unwrap_or(0)
    }

    /// Moves received bytes to `buffer` and returns how many.
    pub fn take(&mut self, id: Id, buffer: &mut [u8]) -> usize {
        self.change(id, |connection| connection.take(buffer)).unwrap_or(0)
    }

    /// Closes one direction or both.  What was sent before still arrives.
    pub fn shutdown(&mut self, id: Id, direction: Shutdown) {
        let flags = match direction {
            Shutdown::Read => SHUTDOWN_RECEIVE,
            Shutdown::Write => SHUTDOWN_SEND,
            Shutdown::Both => SHUTDOWN_BOTH,
        };
        self.change(id, |connection| connection.host_shutdown(flags));
    }

    /// Ends a connection and forgets its id.
    pub fn reset(&mut self, id: Id) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        if connection.phase != Phase::Finished {
            self.kill(id);
        }
        self.forget(id);
    }

    /// Whether there are packets for the guest: process [`RX_QUEUE`] then.
    #[must_use]
    pub fn has_pending(&self) -> bool {
        !self.resets.is_empty() || !self.ready.is_empty()
    }

    /// What happened since the last call.
    pub fn drain_events(&mut self) -> impl Iterator<Item = VsockEvent> + '_ {
        std::iter::from_fn(|| self.next_event())
    }

    fn next_event(&mut self) -> Option<VsockEvent> {
        loop {
            let mut entry = self.eventful.first_entry()?;
            let id = *entry.key();
            let event = 1 << entry.get().trailing_zeros();
            *entry.get_mut() &= !event;
            if *entry.get() == 0 {
                entry.remove();
            }
            let Some(connection) = self.connections.get(&id) else {
                continue;
            };
            let Ports { host: host_port, guest: guest_port } = connection.ports;
            let (done, deaf) = (connection.guest_is_done(), connection.guest_is_deaf());
            return Some(match event {
                CONNECTED => VsockEvent::Connected(id),
                INCOMING => VsockEvent::Incoming { id, host_port, guest_port },
                READABLE => VsockEvent::Readable(id),
                WRITABLE => VsockEvent::Writable(id),
                HALF_CLOSED => VsockEvent::HalfClosed { id, done, deaf },
                _ => {
                    self.forget(id);
                    VsockEvent::Closed(id)
                }
            });
        }
    }

    /// Changes a connection, then brings up to date what depends on it.
    fn change<R>(&mut self, id: Id, how: impl FnOnce(&mut Connection) -> R) -> Option<R> {
        let connection = self.connections.get_mut(&id)?;
        let (readable, writable) = (connection.readable(), connection.writable());
        let result = how(connection);
        self.received = self.received - readable + connection.readable();
        let mut events = 0;
        if connection.readable() > readable {
            events |= READABLE;
        }
        if writable == 0 && connection.writable() > 0 {
            events |= WRITABLE;
        }
        if connection.phase == Phase::Finished && connection.readable() == 0 {
            events |= CLOSED;
        }
        if connection.wants_to_send() && !connection.scheduled {
            connection.scheduled = true;
            self.ready.push_back(id);
        }
        self.report(id, events);
        Some(result)
    }

    fn report(&mut self, id: Id, events: u8) {
        if events != 0 {
            *self.eventful.entry(id).or_default() |= events;
        }
    }

    /// Adds a connection if the limits allow.
    fn add(&mut self, ports: Ports, phase: Phase) -> Option<Id> {
        if self.room() == 0 {
            return None;
        }
        let id = Id(self.next_id);
        self.next_id += 1;
        self.connections.insert(id, Connection::new(ports, phase));
        self.by_ports.insert(ports, id);
        Some(id)
    }

    fn table(&self) -> usize {
        self.by_ports.len() + self.resets.len()
    }

    /// A connection is over for the guest.
    fn finish(&mut self, id: Id) {
        let Some(connection) = self.connections.get(&id) else {
            return;
        };
        self.by_ports.remove(&connection.ports);
        if connection.readable() > 0 {
            self.report(id, HALF_CLOSED);
        }
        // One that the host never heard of is not worth two events.
        if self.eventful.get(&id).is_some_and(|events| events & INCOMING != 0) {
            self.forget(id);
        } else {
            self.change(id, Connection::finish);
        }
    }

    /// Finishes a connection and tells the guest.
    fn kill(&mut self, id: Id) {
        if let Some(connection) = self.connections.get(&id) {
            // Takes the place in the table that the connection gives up.
            self.resets.push_back(Reset { ports: connection.ports, kind: KIND_STREAM });
            self.finish(id);
        }
    }

    /// Removes every trace of a finished connection.
    fn forget(&mut self, id: Id) {
        if let Some(connection) = self.connections.remove(&id) {
            self.received -= connection.readable();
            if connection.scheduled {
                self.ready.retain(|&other| other != id);
            }
        }
        self.eventful.remove(&id);
    }

    fn receive_all<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
    ) -> Result<Progress, Broken> {
        let Some(queue) = queues.get_mut(TX_QUEUE) else {
            return Ok(Progress::default());
        };
        let mut payload = Vec::new();
        serve(memory, queue, |chain| {
            if self.receive(memory, chain, &mut payload).is_none() {
                self.reject();
            }
            Served::Used(0)
        })
    }

    fn deliver_all<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
    ) -> Result<Progress, Broken> {
        let Some(queue) = queues.get_mut(RX_QUEUE) else {
            return Ok(Progress::default());
        };
        serve(memory, queue, |chain| self.deliver(memory, chain))
    }

    /// Takes in one packet from the guest; `None` if it breaks the rules.
    fn receive<M: GuestMemory>(
        &mut self,
        memory: &M,
        chain: &Chain,
        payload: &mut Vec<u8>,
    ) -> Option<()> {
        let mut input = chain.reader();
        let mut bytes = [0; HEADER_BYTES];
        input.read(memory, &mut bytes).ok()?;
        let header = Header::from_bytes(&bytes);
        let addressed = header.source_cid == GUEST_CID && header.target_cid == HOST_CID;
        if !addressed || header.length > PACKET_BYTES_MAX {
            return None;
        }
        payload.resize(usize::try_from(header.length).ok()?, 0);
        input.read(memory, payload).ok()?;
        let ports = Ports { host: header.target_port, guest: header.source_port };
        if header.kind != KIND_STREAM {
            self.answer(ports, &header);
            return None;
        }
        match self.by_ports.get(&ports).copied() {
            Some(id) => self.advance(id, &header, payload),
            None if header.op == OP_REQUEST => self.offer(ports, &header),
            None => self.answer(ports, &header),
        }
    }

    /// Answers a packet that no connection wants with a reset.
    fn answer(&mut self, ports: Ports, header: &Header) -> Option<()> {
        if header.op == OP_RST {
            return Some(());
        }
        if self.table() >= TABLE_MAX {
            return None;
        }
        self.resets.push_back(Reset { ports, kind: header.kind });
        Some(())
    }

    /// Offers the host what the guest wants to open.
    fn offer(&mut self, ports: Ports, header: &Header) -> Option<()> {
        let Some(id) = self.add(ports, Phase::Offered) else {
            self.answer(ports, header)?;
            return None;
        };
        self.report(id, INCOMING);
        self.change(id, |connection| connection.note_credit(header))
    }

    /// Moves a connection on by a packet; resets it if the packet does not fit.
    fn advance(&mut self, id: Id, header: &Header, payload: &[u8]) -> Option<()> {
        self.change(id, |connection| connection.note_credit(header))?;
        let connection = self.connections.get(&id)?;
        match (connection.phase, header.op) {
            (_, OP_RST) => self.finish(id),
            (Phase::Requested, OP_RESPONSE) => {
                self.report(id, CONNECTED);
                self.change(id, |connection| connection.phase = Phase::Established)?;
            }
            (Phase::Established, OP_RW)
                if connection.has_room(header.length)
                    && self.received + payload.len() <= RECEIVED_BYTES_MAX =>
            {
                self.change(id, |connection| connection.receive(payload))?;
            }
            (Phase::Established, OP_SHUTDOWN) => self.guest_shutdown(id, header.flags),
            (Phase::Established, OP_CREDIT_UPDATE) => {}
            (Phase::Established, OP_CREDIT_REQUEST) => {
                self.change(id, |connection| connection.due.add(Due::CREDIT_UPDATE))?;
            }
            _ => {
                self.kill(id);
                return None;
            }
        }
        Some(())
    }

    fn guest_shutdown(&mut self, id: Id, flags: u32) {
        let shut = self.change(id, |connection| {
            connection.guest_shutdown(flags);
            connection.guest_is_shut()
        });
        self.report(id, HALF_CLOSED);
        if shut == Some(true) {
            // A clean end: the guest may forget the connection, and the host
            // takes what is left.
            self.kill(id);
        }
    }

    /// Fills one of the guest's buffers with the next packet for it.
    fn deliver<M: GuestMemory>(&mut self, memory: &M, chain: &Chain) -> Served {
        if !self.has_pending() {
            return Served::Waiting;
        }
        let Some(room) = chain.writer().remaining().checked_sub(HEADER_BYTES as u64) else {
            self.reject();
            return Served::Used(0);
        };
        if let Some(reset) = self.resets.pop_front() {
            return self.put(memory, chain, &reset.header(), None);
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            connection.scheduled = false;
            if let Some(header) = connection.next_packet(room) {
                return self.put(memory, chain, &header, Some(id));
            }
            if connection.wants_to_send() {
                // There are only bytes to send, and no room for one here.
                connection.scheduled = true;
                self.ready.push_front(id);
                self.reject();
                return Served::Used(0);
            }
        }
        Served::Waiting
    }

    /// Writes a packet of connection `id`, if of any, to the guest's buffer.
    fn put<M: GuestMemory>(
        &mut self,
        memory: &M,
        chain: &Chain,
        header: &Header,
        id: Option<Id>,
    ) -> Served {
        let mut output = chain.writer();
        let connection = id.and_then(|id| self.connections.get(&id));
        let (first, second) =
            connection.map_or((&[][..], &[][..]), |connection| connection.payload(header.length));
        let written = output
            .write(memory, &header.to_bytes())
            .and_then(|()| output.write(memory, first))
            .and_then(|()| output.write(memory, second));
        if written.is_err() {
            // The packet is lost, and with it the stream's order.
            self.reject();
            if let Some(id) = id {
                self.kill(id);
            }
            return Served::Used(0);
        }
        if let Some(id) = id {
            self.change(id, |connection| connection.sent(header.length));
        }
        let header_bytes = u32::try_from(HEADER_BYTES).unwrap_or(0);
        Served::Used(header_bytes + header.length)
    }

    fn reject(&mut self) {
        self.rejected = self.rejected.saturating_add(1);
    }
}

impl Reset {
    fn header(self) -> Header {
        Header {
            source_cid: HOST_CID,
            target_cid: GUEST_CID,
            source_port: self.ports.host,
            target_port: self.ports.guest,
            kind: self.kind,
            op: OP_RST,
            ..Header::default()
        }
    }
}

/// The next of the ports that the host calls from.
fn port_after(port: u32) -> u32 {
    port.checked_add(1).unwrap_or(HOST_PORT_MIN)
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn device_features(&self) -> u64 {
        TRANSPORT_FEATURES
    }

    fn queue_max_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE_MAX; 3]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&GUEST_CID.to_le_bytes(), offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        self.reject();
    }

    /// Every connection is over; the driver forgot them itself.
    fn reset(&mut self) {
        let ids: Vec<Id> = self.by_ports.values().copied().collect();
        for id in ids {
            self.finish(id);
        }
        self.resets.clear();
    }

    fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
        index: usize,
    ) -> Result<Progress, Broken> {
        let mut progress = Progress::default();
        if index == TX_QUEUE {
            progress = self.receive_all(memory, queues)?;
        }
        // Whatever the guest sent may need an answer.
        if self.has_pending() {
            progress = progress.and(self.deliver_all(memory, queues)?);
        }
        Ok(progress)
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests;
