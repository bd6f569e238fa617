//! Entropy: fills the guest's buffers with random bytes.
//!
//! One queue of writable buffers; no configuration space.
//!
//! # Trust
//!
//! The guest chooses how much it asks for.  A buffer gets at most
//! [`REQUEST_BYTES_MAX`] bytes however long it is; that is a short answer,
//! which the specification allows.
//!
//! # Forks
//!
//! No state: two children of one snapshot draw from the host separately, so
//! what they get differs.

use std::io;

use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use virtio_queue::Queue;
use vm_memory::GuestMemory;

use super::chain::{Chain, Served, serve};
use super::{Broken, Progress, QUEUE_SIZE_MAX, TRANSPORT_FEATURES, VirtioDevice, read_space};

/// Most bytes given for one buffer.
pub const REQUEST_BYTES_MAX: u64 = 4096;

/// Bytes drawn from the host at a time.
const DRAW_BYTES: usize = 256;

/// Where the random bytes come from.
pub trait Entropy {
    /// Fills `buffer` with bytes fit for keys.
    ///
    /// # Errors
    ///
    /// If the host has none to give; the guest then gets a short answer.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<()>;
}

/// The device.
#[derive(Debug)]
pub struct Rng<S> {
    source: S,
    rejected: u64,
}

impl<S: Entropy> Rng<S> {
    /// A device that hands out the bytes of `source`.
    pub fn new(source: S) -> Self {
        Self { source, rejected: 0 }
    }

    fn answer<M: GuestMemory>(&mut self, memory: &M, chain: &Chain) -> u32 {
        let mut buffer = chain.writer();
        let mut wanted = buffer.remaining().min(REQUEST_BYTES_MAX);
        let mut written = 0;
        let mut draw = [0; DRAW_BYTES];
        while wanted > 0 {
            let length = usize::try_from(wanted).map_or(DRAW_BYTES, |most| most.min(DRAW_BYTES));
            let piece = &mut draw[..length];
            if self.source.fill(piece).is_err() || buffer.write(memory, piece).is_err() {
                break;
            }
            written += length;
            wanted -= length as u64;
        }
        if written == 0 {
            self.rejected = self.rejected.saturating_add(1);
        }
        u32::try_from(written).unwrap_or(0)
    }
}

impl<S: Entropy> VirtioDevice for Rng<S> {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn device_features(&self) -> u64 {
        TRANSPORT_FEATURES
    }

    fn queue_max_sizes(&self) -> &'static [u16] {
        &[QUEUE_SIZE_MAX]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_space(&[], offset, data);
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        self.rejected = self.rejected.saturating_add(1);
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
        serve(memory, queue, |chain| Served::Used(self.answer(memory, chain)))
    }

    fn rejected(&self) -> u64 {
        self.rejected
    }
}

#[cfg(test)]
mod tests;
