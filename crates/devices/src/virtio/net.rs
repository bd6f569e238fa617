//! Ethernet frames between the guest and the host, without offloads.
//!
//! Queue 0 receives, queue 1 sends.  Every frame has a header of 12 bytes in
//! front; with no offload agreed on it is zeros but for a count of one buffer.
//!
//! | Configuration | Field    | Value                        |
//! |---------------|----------|------------------------------|
//! | 0x00, 6 bytes | `mac`    | as given                     |
//! | 0x0a, 2 bytes | `mtu`    | as given                     |
//!
//! # Trust
//!
//! The guest chooses its frames and its addresses in them: what they may reach
//! is decided where they arrive.  A frame shorter than an Ethernet header or
//! longer than [`FRAME_BYTES_MAX`] is dropped, as is one the host cannot take
//! at once; nothing is ever kept.  A received frame that does not fit the
//! guest's buffer is dropped too.  Each drop is counted.
//!
//! # Host side
//!
//! When [`Frames`] has something to receive, process [`RX_QUEUE`]; frames stay
//! where they are until the guest has buffers.

use std::io;

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MTU};
use virtio_queue::Queue;
use vm_memory::GuestMemory;

use super::chain::{Chain, Served, serve};
use super::{Broken, Progress, QUEUE_SIZE_MAX, TRANSPORT_FEATURES, VirtioDevice, read_space};

/// The queue of buffers for frames to the guest.
pub const RX_QUEUE: usize = 0;

/// The queue of frames from the guest.
pub const TX_QUEUE: usize = 1;

/// Longest frame in either direction.
pub const FRAME_BYTES_MAX: usize = 65_550;

/// Shortest frame: two addresses and a type.
pub const FRAME_BYTES_MIN: usize = 14;

const HEADER_BYTES: usize = 12;
const HEADER: [u8; HEADER_BYTES] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const CONFIG_BYTES: usize = 12;
const CONFIG_MTU: usize = 10;

/// The host's end of the wire.  Neither call may block.
pub trait Frames {
    /// Sends one whole frame.
    ///
    /// # Errors
    ///
    /// If it was not sent; it is dropped then.
    fn send(&mut self, frame: &[u8]) -> io::Result<()>;

    /// Receives one whole frame into `buffer` and returns its length, or
    /// `None` if none is waiting.
    ///
    /// # Errors
    ///
    /// If receiving failed; it is tried again at the next occasion.
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>>;
}

/// The device.
#[derive(Debug)]
pub struct Net<T> {
    wire: T,
    mac: [u8; 6],
    mtu: u16,
    rejected: u64,
}

impl<T: Frames> Net<T> {
    /// A device with this address on `wire`, whose packets have up to `mtu`
    /// bytes after the Ethernet header.
    pub fn new(wire: T, mac: [u8; 6], mtu: u16) -> Self {
        Self { wire, mac, mtu, rejected: 0 }
    }

    /// The host's end of the wire.
    pub fn wire(&self) -> &T {
        &self.wire
    }

    /// The host's end of the wire, to be changed.
    pub fn wire_mut(&mut self) -> &mut T {
        &mut self.wire
    }

    fn transmit<M: GuestMemory>(&mut self, memory: &M, chain: &Chain, frame: &mut Vec<u8>) {
        let mut input = chain.reader();
        let sent = input.skip(HEADER_BYTES as u64).is_ok()
            && buffer_for(frame, input.remaining()).is_some_and(|frame| {
                input.read(memory, frame).is_ok() && self.wire.send(frame).is_ok()
            });
        if !sent {
            self.reject();
        }
    }

    fn receive<M: GuestMemory>(
        &mut self,
        memory: &M,
        chain: &Chain,
        frame: &mut Vec<u8>,
    ) -> Served {
        if frame.is_empty() {
            *frame = vec![0; FRAME_BYTES_MAX];
        }
        let length = match self.wire.receive(frame) {
            Ok(Some(length)) => length,
            Ok(None) => return Served::Waiting,
            Err(_) => {
                self.reject();
                return Served::Waiting;
            }
        };
        let mut output = chain.writer();
        let delivered = frame.get(..length).is_some_and(|frame| {
            output.write(memory, &HEADER).is_ok() && output.write(memory, frame).is_ok()
        });
        if delivered {
            return Served::Used(u32::try_from(HEADER_BYTES + length).unwrap_or(0));
        }
        // The buffer goes back empty: keeping it would only drop the next one.
        self.reject();
        Served::Used(0)
    }

    fn reject(&mut self) {
        self.rejected = self.rejected.saturating_add(1);
    }
}

/// Room in `frame` for this many bytes, if that is a length a frame can have.
fn buffer_for(frame: &mut Vec<u8>, length: u64) -> Option<&mut [u8]> {
    let length = usize::try_from(length).ok()?;
    if !(FRAME_BYTES_MIN..=FRAME_BYTES_MAX).contains(&length) {
        return None;
    }
    if frame.len() < length {
        frame.resize(length, 0);
    }
    frame.get_mut(..length)
}

impl<T: Frames> VirtioDevice for Net<T> {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn device_features(&self) -> u64 {
        TRANSPORT_FEATURES | 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_MTU
    }

    fn queue_max_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE_MAX; 2]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; CONFIG_BYTES];
        config[..self.mac.len()].copy_from_slice(&self.mac);
        config[CONFIG_MTU..].copy_from_slice(&self.mtu.to_le_bytes());
        read_space(&config, offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        self.reject();
    }

    fn reset(&mut self) {}

    fn process<M: GuestMemory>(
        &mut self,
        memory: &M,
        queues: &mut [Queue],
        index: usize,
    ) -> Result<Progress, Broken> {
        let Some(queue) = queues.get_mut(index) else {
            return Ok(Progress::default());
        };
        let mut frame = Vec::new();
        if index == RX_QUEUE {
            return serve(memory, queue, |chain| self.receive(memory, chain, &mut frame));
        }
        serve(memory, queue, |chain| {
            self.transmit(memory, chain, &mut frame);
            Served::Used(0)
        })
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests;
