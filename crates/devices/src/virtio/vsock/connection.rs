//! One connection: its phase, its bytes in both directions, its credit.

use std::collections::VecDeque;
use std::num::Wrapping;

use super::packet::{
    Header, KIND_STREAM, OP_CREDIT_REQUEST, OP_CREDIT_UPDATE, OP_REQUEST, OP_RESPONSE, OP_RW,
    OP_SHUTDOWN, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE, SHUTDOWN_SEND,
};
use super::{BUFFER_BYTES, GUEST_CID, HOST_CID, Ports, SEND_BYTES_MAX};

/// How much the host takes before the guest is told that there is room again.
const CREDIT_UPDATE_BYTES: u32 = BUFFER_BYTES / 4;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The host asked; the guest has not answered.
    Requested,
    /// The guest asked; the host has not answered.
    Offered,
    /// Bytes may flow.
    Established,
    /// Over for the guest; received bytes may be left for the host.
    Finished,
}

/// Control packets that are to be sent, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Due(u8);

impl Due {
    pub(super) const REQUEST: Self = Self(1);
    pub(super) const RESPONSE: Self = Self(2);
    pub(super) const CREDIT_UPDATE: Self = Self(4);
    pub(super) const CREDIT_REQUEST: Self = Self(8);

    pub(super) fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }

    fn take(&mut self, other: Self) -> bool {
        let was = self.0 & other.0 != 0;
        self.0 &= !other.0;
        was
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ports: Ports,
    pub(super) phase: Phase,
    pub(super) due: Due,
    /// Whether it is in the device's list of those with packets to send.
    pub(super) scheduled: bool,
    /// Bytes from the guest that the host has not taken.
    // Invariant: at most BUFFER_BYTES.
    inbox: VecDeque<u8>,
    /// Bytes from the host that the guest has no buffer for yet.
    // Invariant: at most SEND_BYTES_MAX.
    outbox: VecDeque<u8>,
    /// Bytes taken by the host, ever, and as last told to the guest.
    forwarded: Wrapping<u32>,
    told_forwarded: Wrapping<u32>,
    /// Bytes sent to the guest, ever, and what it said of its side.
    sent: Wrapping<u32>,
    guest_buffer_bytes: u32,
    guest_forwarded: Wrapping<u32>,
    /// Shutdown flags: the host's wish, what the guest was told, the guest's.
    host_shut: u32,
    told_shut: u32,
    guest_shut: u32,
    /// Whether the guest was asked for credit since it last spoke.
    asked: bool,
}

impl Connection {
    pub(super) fn new(ports: Ports, phase: Phase) -> Self {
        Self {
            ports,
            phase,
            due: Due::default(),
            scheduled: false,
            inbox: VecDeque::new(),
            outbox: VecDeque::new(),
            forwarded: Wrapping(0),
            told_forwarded: Wrapping(0),
            sent: Wrapping(0),
            guest_buffer_bytes: 0,
            guest_forwarded: Wrapping(0),
            host_shut: 0,
            told_shut: 0,
            guest_shut: 0,
            asked: false,
        }
    }

    /// Bytes that the host can take.
    pub(super) fn readable(&self) -> usize {
        self.inbox.len()
    }

    /// Bytes that the host can send now.
    pub(super) fn writable(&self) -> usize {
        let open = self.phase == Phase::Established
            && self.host_shut & SHUTDOWN_SEND == 0
            && self.guest_shut & SHUTDOWN_RECEIVE == 0;
        if !open {
            return 0;
        }
        let credit = usize::try_from(self.credit()).unwrap_or(usize::MAX);
        SEND_BYTES_MAX.min(credit).saturating_sub(self.outbox.len())
    }

    /// Whether the guest will send no more.
    pub(super) fn guest_is_done(&self) -> bool {
        self.phase == Phase::Finished || self.guest_shut & SHUTDOWN_SEND != 0
    }

    /// Whether the guest will receive no more.
    pub(super) fn guest_is_deaf(&self) -> bool {
        self.phase == Phase::Finished || self.guest_shut & SHUTDOWN_RECEIVE != 0
    }

    /// Bytes that the guest has room for, beyond what was sent.
    fn credit(&self) -> u32 {
        let in_flight = self.sent - self.guest_forwarded;
        self.guest_buffer_bytes.saturating_sub(in_flight.0)
    }

    /// Notes what a packet says of the guest's side.
    pub(super) fn note_credit(&mut self, header: &Header) {
        self.guest_buffer_bytes = header.buffer_bytes;
        self.guest_forwarded = Wrapping(header.forwarded);
        self.asked = false;
    }

    /// Whether the guest may send this many bytes now.
    pub(super) fn has_room(&self, bytes: u32) -> bool {
        let done = self.guest_shut & SHUTDOWN_SEND != 0;
        let held = u32::try_from(self.inbox.len()).unwrap_or(u32::MAX);
        !done && held.checked_add(bytes).is_some_and(|total| total <= BUFFER_BYTES)
    }

    /// Takes in what the guest sent; drops it if the host will not read.
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        if self.host_shut & SHUTDOWN_RECEIVE == 0 {
            self.inbox.extend(bytes);
        } else {
            self.forward(bytes.len());
        }
    }

    /// Moves received bytes to `buffer`; returns how many.
    pub(super) fn take(&mut self, buffer: &mut [u8]) -> usize {
        let length = buffer.len().min(self.inbox.len());
        copy_front(&self.inbox, &mut buffer[..length]);
        self.inbox.drain(..length);
        release_if_empty(&mut self.inbox);
        self.forward(length);
        length
    }

    /// Counts bytes as out of our buffer, and tells the guest in time.
    fn forward(&mut self, bytes: usize) {
        self.forwarded += Wrapping(u32::try_from(bytes).unwrap_or(0));
        let untold = self.forwarded - self.told_forwarded;
        if untold.0 >= CREDIT_UPDATE_BYTES && self.phase == Phase::Established {
            self.due.add(Due::CREDIT_UPDATE);
        }
    }

    /// Accepts as much of `bytes` as there is room for; returns how much.
    pub(super) fn send(&mut self, bytes: &[u8]) -> usize {
        let length = bytes.len().min(self.writable());
        self.outbox.extend(&bytes[..length]);
        let stalled = length < bytes.len() && self.outbox.len() < SEND_BYTES_MAX;
        if stalled && self.phase == Phase::Established && !self.asked {
            self.asked = true;
            self.due.add(Due::CREDIT_REQUEST);
        }
        length
    }

    /// The guest closes one direction or both.
    pub(super) fn guest_shutdown(&mut self, flags: u32) {
        self.guest_shut |= flags & SHUTDOWN_BOTH;
        if self.guest_shut & SHUTDOWN_RECEIVE != 0 {
            self.outbox = VecDeque::new();
        }
    }

    /// Whether the guest has closed both directions.
    pub(super) fn guest_is_shut(&self) -> bool {
        self.guest_shut == SHUTDOWN_BOTH
    }

    /// The host closes one direction or both.
    pub(super) fn host_shutdown(&mut self, flags: u32) {
        self.host_shut |= flags;
        if self.host_shut & SHUTDOWN_RECEIVE != 0 {
            let unread = self.inbox.len();
            self.inbox = VecDeque::new();
            self.forward(unread);
        }
    }

    /// Over for the guest: nothing more is sent to it.
    pub(super) fn finish(&mut self) {
        self.phase = Phase::Finished;
        self.due = Due::default();
        self.outbox = VecDeque::new();
    }

    /// Whether there is a packet for the guest.
    pub(super) fn wants_to_send(&self) -> bool {
        self.due != Due::default() || self.sendable() > 0 || self.has_shutdown()
    }

    fn sendable(&self) -> u32 {
        if self.phase != Phase::Established {
            return 0;
        }
        u32::try_from(self.outbox.len()).unwrap_or(u32::MAX).min(self.credit())
    }

    /// The flags of a shutdown packet; the end of sending waits for the bytes.
    fn shutdown_flags(&self) -> u32 {
        if self.outbox.is_empty() { self.host_shut } else { self.host_shut & !SHUTDOWN_SEND }
    }

    fn has_shutdown(&self) -> bool {
        self.phase == Phase::Established && self.shutdown_flags() != self.told_shut
    }

    /// The next packet for a buffer with `room` bytes after the header.
    pub(super) fn next_packet(&mut self, room: u64) -> Option<Header> {
        let room = u32::try_from(room).unwrap_or(u32::MAX);
        let mut header = self.header();
        if self.due.take(Due::REQUEST) {
            header.op = OP_REQUEST;
        } else if self.due.take(Due::RESPONSE) {
            header.op = OP_RESPONSE;
        } else if self.sendable() > 0 && room > 0 {
            header.op = OP_RW;
            header.length = self.sendable().min(room);
        } else if self.has_shutdown() {
            header.op = OP_SHUTDOWN;
            header.flags = self.shutdown_flags();
            self.told_shut = header.flags;
        } else if self.due.take(Due::CREDIT_UPDATE) {
            header.op = OP_CREDIT_UPDATE;
        } else if self.due.take(Due::CREDIT_REQUEST) {
            header.op = OP_CREDIT_REQUEST;
        } else {
            return None;
        }
        // Every packet says how much we have taken.
        self.due.take(Due::CREDIT_UPDATE);
        self.told_forwarded = self.forwarded;
        Some(header)
    }

    /// The front of what is to be sent, in up to two pieces.
    pub(super) fn payload(&self, length: u32) -> (&[u8], &[u8]) {
        let length = usize::try_from(length).unwrap_or(0);
        let (first, second) = self.outbox.as_slices();
        let first = &first[..length.min(first.len())];
        (first, &second[..(length - first.len()).min(second.len())])
    }

    /// The front of what was to be sent has been.
    pub(super) fn sent(&mut self, length: u32) {
        self.sent += Wrapping(length);
        let length = usize::try_from(length).unwrap_or(0).min(self.outbox.len());
        self.outbox.drain(..length);
        release_if_empty(&mut self.outbox);
    }

    #[cfg(test)]
    pub(super) fn buffer_capacity(&self) -> usize {
        self.inbox.capacity() + self.outbox.capacity()
    }

    fn header(&self) -> Header {
        Header {
            source_cid: HOST_CID,
            target_cid: GUEST_CID,
            source_port: self.ports.host,
            target_port: self.ports.guest,
            kind: KIND_STREAM,
            buffer_bytes: BUFFER_BYTES,
            forwarded: self.forwarded.0,
            ..Header::default()
        }
    }
}

fn copy_front(from: &VecDeque<u8>, to: &mut [u8]) {
    let (first, second) = from.as_slices();
    let length = first.len().min(to.len());
    let (head, tail) = to.split_at_mut(length);
    head.copy_from_slice(&first[..length]);
    tail.copy_from_slice(&second[..tail.len()]);
}

/// An idle connection keeps no buffer.
fn release_if_empty(bytes: &mut VecDeque<u8>) {
    if bytes.is_empty() {
        *bytes = VecDeque::new();
    }
}
